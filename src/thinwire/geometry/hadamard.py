"""Hadamard: random signs, then an orthonormal Walsh-Hadamard transform of blocks along each row.

    u = (g * signs) H / sqrt(order)    per block of `order` columns;  g = (u H / sqrt(order)) * signs

H is symmetric (Sylvester's), so the inverse is the same product. It spreads a large number over its block,
which helps integers and outlier-heavy blocks; floating-point codes on ordinary gradients gain nothing. Columns
that do not fill a block of `order` are covered by smaller blocks, down to 16; fewer than 16 stay as they are.
Source: the random Hadamard transform of QuIP# (arXiv 2402.04396) and of NVIDIA's NVFP4 recipe (arXiv 2509.25149).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from thinwire.geometry.geometry import BoundGeometry, Fidelity, Observer, Place, Rebase, Shapes

SMALLEST = 16


@dataclass(frozen=True)
class Hadamard:
    """Block Hadamard coordinates; no state, nothing to communicate."""

    order: int = 128
    """Columns per block: 16, 32, 64 or 128."""

    seed: int | None = 0
    """Of the random signs, the same for all matrices; None: no signs."""

    def __post_init__(self) -> None:
        if self.order not in (16, 32, 64, 128):
            raise ValueError(f"Hadamard order must be 16, 32, 64 or 128, got {self.order}")

    def bind(self, shapes: Shapes, place: Place) -> BoundGeometry:
        return BoundHadamard(self, shapes, place.device)

    def refresh_bytes(self, shapes: Shapes, world_size: int) -> int:
        return 0


class BoundHadamard:
    """The matrices and signs of one device."""

    mixes_rows = False

    def __init__(self, config: Hadamard, shapes: Shapes, device: torch.device) -> None:
        self.names = frozenset(name for name, (_, columns) in shapes.items() if columns >= SMALLEST)
        self._order = config.order
        self._device = device
        widest = max((columns for _, columns in shapes.values()), default=0)
        self.description = f"Hadamard(order={config.order}, seed={config.seed})"
        self._signs = torch.ones(widest, dtype=torch.float32, device=device)
        if config.seed is not None:
            generator = torch.Generator().manual_seed(config.seed)
            self._signs = (torch.randint(0, 2, (widest,), generator=generator) * 2 - 1).to(self._signs)

    def forward(self, name: str, matrix: Tensor) -> Tensor:
        return self._transform(matrix * self._signs[: matrix.shape[1]])

    def inverse(self, name: str, matrix: Tensor) -> Tensor:
        return self._transform(matrix.clone()).mul_(self._signs[: matrix.shape[1]])

    def observers(self, reduction: int) -> Mapping[str, Observer]:
        return {}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {}

    def open(self, reduction: int) -> None:
        pass

    def see(self, name: str, gradient: Tensor) -> None:
        pass

    def statistics(self) -> Tensor | None:
        return None

    def combine(self, statistics: Tensor) -> None:
        pass

    def payload(self) -> Tensor | None:
        return None

    def install(self, payloads: Tensor, rebase: Rebase) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass

    def memory_bytes(self) -> int:
        return self._signs.nbytes

    def _transform(self, matrix: Tensor) -> Tensor:
        """In place, the blocks of (rows, columns)."""
        for start, count, order in _blocks(matrix.shape[1], self._order):
            part = matrix[:, start : start + count * order]
            blocks = part.reshape(-1, count, order)  # (rows, count, order)
            part.copy_((blocks @ _matrix(order, self._device)).view_as(part))
        return matrix


def _blocks(columns: int, order: int) -> Iterator[tuple[int, int, int]]:
    """(first column, number of blocks, order) of the blocks that cover the columns."""
    start = 0
    while order >= SMALLEST:
        if count := (columns - start) // order:
            yield start, count, order
            start += count * order
        order //= 2


@cache
def _matrix(order: int, device: torch.device) -> Tensor:
    """H / sqrt(order), symmetric and orthonormal."""
    h = torch.ones(1, 1, dtype=torch.float32, device=device)
    while len(h) < order:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h.div_(order**0.5)
