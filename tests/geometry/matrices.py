"""Matrices and formats shared by the tests of geometries."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.formats import get
from thinwire.geometry import Place
from thinwire.reducers.round_trip import round_trip


def place(format: str = "nvfp4", rank: int = 0, world_size: int = 2) -> Place:
    """Where the tests bind."""
    return Place(rank, world_size, torch.device("cpu"), lambda matrix: round_trip(get(format), matrix))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dominated(
    rows: int = 256, columns: int = 512, tokens: int = 4096, seed: int = 0, draw: int = 0
) -> tuple[Tensor, Tensor]:
    """Inputs X (tokens, columns) with one dominant direction, and a layer's gradient (rows, columns).

    mu ~ N(0, 1/columns); X = 3 mu (1 + 0.3 xi) + N(0, 1/columns); delta = 0.9 N(0, 1) + 0.5 fixed;
    G = delta^T X / N. `seed` draws mu and the fixed part, `draw` the rest.
    """
    layer, g = generator(seed), generator(1000 * draw + seed)
    mu = torch.randn(columns, generator=layer) / columns**0.5
    fixed = torch.randn(rows, generator=layer)
    xi = torch.randn(tokens, 1, generator=g)
    x = 3 * mu * (1 + 0.3 * xi) + torch.randn(tokens, columns, generator=g) / columns**0.5
    delta = 0.9 * torch.randn(tokens, rows, generator=g) + 0.5 * fixed
    return x, delta.T @ x / tokens


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
