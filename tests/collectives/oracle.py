"""The two-phase mean written out for one slot in a single process: what ranks must agree with, bit for bit.

Knows the format's own encode and decode (tested against ml_dtypes elsewhere) but not the layout, the wire,
chunks or buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.collectives import CHUNK
from thinwire.formats import Format


def through(format: Format, piece: Tensor) -> Tensor:
    """One piece, float32 of whole blocks, encoded and decoded span by span."""
    out = torch.empty_like(piece)
    longest = CHUNK // format.block * format.block
    for span, into in zip(piece.split(longest), out.split(longest)):
        spans = (span.numel(),)
        buffer = torch.zeros(format.nbytes(spans), dtype=torch.uint8)
        format.encode(span, buffer, spans=spans)
        format.decode(buffer, into, spans=spans)
    return out


def pieces(x: Tensor, world_size: int, block: int) -> Tensor:
    """x (n,) as (W, piece), padded with zeros; a piece is a whole number of blocks."""
    blocks = max(1, -(-x.numel() // block))
    piece = -(-blocks // world_size) * block
    padded = torch.zeros(world_size * piece)
    padded[: x.numel()] = x
    return padded.view(world_size, piece)


def sums(contributions: Sequence[Tensor], format: Format, weights: Sequence[float] | None = None) -> Tensor:
    """After the first phase, (W, piece): what every rank's part of each owner's piece adds up to, in rank order.

    An owner's own part is never encoded.
    """
    world_size = len(contributions)
    weights = weights or [1.0] * world_size
    parts = [
        pieces(x.detach().reshape(-1).float(), world_size, format.block) * (weight / world_size)
        for x, weight in zip(contributions, weights)
    ]
    totals = []
    for owner in range(world_size):
        total = None
        for rank, part in enumerate(parts):
            arrived = part[owner] if rank == owner else through(format, part[owner])
            total = arrived.clone() if total is None else total + arrived
        assert total is not None
        totals.append(total)
    return torch.stack(totals)


def mean(contributions: Sequence[Tensor], format: Format, weights: Sequence[float] | None = None) -> Tensor:
    """After both phases: float32 of the contributions' shape."""
    first = contributions[0]
    if len(contributions) == 1:
        return first.detach().float()
    decoded = torch.stack([through(format, total) for total in sums(contributions, format, weights)])
    return decoded.view(-1)[: first.numel()].view(first.shape)
