"""A refresh: what ranks saw goes to the owners of matrices, what those found out to all, who change together."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.collectives import Wire
from thinwire.collectives.pipeline import Task
from thinwire.geometry.geometry import BoundGeometry, Rebase


def refresh(geometry: BoundGeometry, wire: Wire, rebase: Rebase) -> None:
    """Change the coordinates together, if that is due. All ranks call this alike, with no collective under way."""
    statistics = geometry.statistics()
    if statistics is not None and statistics.numel():
        geometry.combine(_to_owners(statistics, wire))
    payload = geometry.payload()
    if payload is not None and payload.numel():
        geometry.install(_to_all(payload, wire), rebase)


def _to_owners(rows: Tensor, wire: Wire) -> Tensor:
    """Send row r of (W, length) to rank r; the rows (W-1, length) that the other ranks sent to this one."""
    others = [rank for rank in range(wire.world_size) if rank != wire.rank]
    send = rows[others].view(torch.uint8)
    received = torch.empty_like(send)

    def task() -> Task:
        yield wire.all_to_all(received, send, counted_as="refresh")

    wire.submit([task()], "statistics of coordinates").wait()
    return received.view(rows.dtype)


def _to_all(payload: Tensor, wire: Wire) -> Tensor:
    """The payloads of all ranks, (W, length)."""
    payloads = payload.new_empty(wire.world_size, payload.numel())

    def task() -> Task:
        yield wire.all_gather(payloads.view(torch.uint8), payload.view(torch.uint8), counted_as="refresh")

    wire.submit([task()], "coordinates").wait()
    return payloads
