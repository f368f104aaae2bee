"""GIFT bound on several ranks of one process, and what a reducer does with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.geometry.matrices import dominated, place
from thinwire.geometry import GIFT, Shapes
from thinwire.geometry.gift import BoundGIFT

SHAPES: Shapes = {"a": (64, 96), "b": (7, 33), "tall": (300, 20)}


def world(config: GIFT, shapes: Shapes = SHAPES, ranks: int = 2, format: str = "nvfp4") -> list[BoundGIFT]:
    bound = [config.bind(shapes, place(format, rank, ranks)) for rank in range(ranks)]
    assert all(isinstance(each, BoundGIFT) for each in bound)
    return bound  # type: ignore[return-value]


def gradients(shapes: Shapes = SHAPES, draw: int = 0) -> dict[str, Tensor]:
    """Of one batch."""
    named = enumerate(shapes.items())
    return {name: dominated(*shape, tokens=500, seed=7 * n, draw=draw)[1] for n, (name, shape) in named}


def unchanged(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Nothing is kept in old coordinates."""


def refresh(ranks: list[BoundGIFT], reduction: int, named: dict[str, Tensor]) -> Tensor | None:
    """One reduction in which all ranks see the same gradients; returns the payloads."""
    for bound in ranks:
        bound.open(reduction)
        for name, gradient in named.items():
            bound.see(name, gradient)
    carry_statistics(ranks)
    payloads = [bound.payload() for bound in ranks]
    if payloads[0] is None:
        assert payloads == [None] * len(ranks)
        return None
    stacked = torch.stack([p for p in payloads if p is not None])
    for bound in ranks:
        bound.install(stacked, unchanged)
    return stacked


def carry_statistics(ranks: list[BoundGIFT]) -> None:
    """To the owners, where there are any."""
    sent = [bound.statistics() for bound in ranks]
    for bound in ranks:
        own = bound._place.rank
        rows = [statistics[own] for rank, statistics in enumerate(sent) if statistics is not None and rank != own]
        if rows:
            bound.combine(torch.stack(rows))
