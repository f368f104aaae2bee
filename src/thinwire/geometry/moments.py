"""Second moments of rows of numbers, scaled to a mean diagonal of 1, and their low-rank parts.

Up to DENSE columns the moment itself is kept, (n, n), and decomposed. Beyond, only its product with a random
matrix Omega (n, k) and its diagonal are: the eigenpairs then come from the Nystroem approximation

    C ~ Y (Omega^T Y)^-1 Y^T,   Y = C Omega

with the shift that keeps it stable. Source: Tropp, Yurtsever, Udell, Cevher 2017 (arXiv 1706.05736).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

DENSE = 1024
"""Columns up to which a moment is formed and decomposed."""

_EXTRA = 16  # columns of the sketch beyond twice the rank


class Moment(Protocol):
    """The sum of x x^T over the rows that were added, up to a factor."""

    def add(self, rows: Tensor) -> None:
        """Take rows (m, n) into account, float32."""

    def blend(self, factor: Tensor, rest: Tensor, weight: float) -> None:
        """Make this (1 - weight) x this moment + weight x (F F^T + rest), both scaled to a mean diagonal of 1."""

    def split(self, rank: int) -> tuple[Tensor, Tensor] | None:
        """F (n, rank) and the rest of the diagonal (n,), of mean diagonal 1; None for a moment that is zero or
        not finite."""


def new_moment(n: int, rank: int, device: torch.device) -> Moment:
    """An empty moment of vectors of n numbers."""
    return Dense(n, device) if n <= DENSE else Sketch(n, min(n, 2 * rank + _EXTRA), device)


class Dense:
    """The moment as it is."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._sum = torch.zeros(n, n, device=device)

    def add(self, rows: Tensor) -> None:
        self._sum.addmm_(rows.T, rows)

    def blend(self, factor: Tensor, rest: Tensor, weight: float) -> None:
        self._sum.mul_((1 - weight) / self._sum.diagonal().mean())
        self._sum.addmm_(factor, factor.T, alpha=weight)
        self._sum.diagonal().add_(rest, alpha=weight)

    def split(self, rank: int) -> tuple[Tensor, Tensor] | None:
        moment = self._sum.double()
        mean = moment.diagonal().mean()
        if not _usable(moment, mean):
            return None
        values, vectors = torch.linalg.eigh((moment + moment.T) / (2 * mean))  # rising
        return _split(vectors[:, -rank:], values[-rank:], moment.diagonal() / mean)


class Sketch:
    """Its product with a random matrix, (n, k), and its diagonal."""

    def __init__(self, n: int, columns: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(n)
        omega = torch.randn(n, columns, generator=generator, dtype=torch.float64)
        self._omega = torch.linalg.qr(omega).Q.float().to(device)  # (n, k)
        self._sum = torch.zeros_like(self._omega)
        self._diagonal = torch.zeros(n, device=device)

    def add(self, rows: Tensor) -> None:
        self._sum.addmm_(rows.T, rows @ self._omega)
        self._diagonal.add_(rows.square().sum(0))

    def blend(self, factor: Tensor, rest: Tensor, weight: float) -> None:
        own = (1 - weight) / self._diagonal.mean()
        earlier = factor @ (factor.T @ self._omega) + rest[:, None] * self._omega
        self._sum.mul_(own).add_(earlier, alpha=weight)
        self._diagonal.mul_(own).add_(factor.square().sum(1) + rest, alpha=weight)

    def split(self, rank: int) -> tuple[Tensor, Tensor] | None:
        diagonal = self._diagonal.double()
        mean = diagonal.mean()
        if not _usable(self._sum, mean):
            return None
        omega = self._omega.double()
        y = self._sum.double() / mean  # (n, k)
        shift = torch.finfo(torch.float32).eps * y.norm()
        y = y + shift * omega
        core = omega.T @ y  # (k, k)
        lower = torch.linalg.cholesky((core + core.T) / 2)
        root = torch.linalg.solve_triangular(lower, y.T, upper=False).T  # (n, k): C ~ root root^T
        vectors, singular, _ = torch.linalg.svd(root, full_matrices=False)  # falling
        return _split(vectors[:, :rank], singular[:rank].square() - shift, diagonal / mean)


def _usable(moment: Tensor, mean: Tensor) -> bool:
    return bool(torch.isfinite(moment).all()) and 0.0 < float(mean) < float("inf")


def _split(vectors: Tensor, values: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
    factor = vectors * values.clamp(min=0.0).sqrt()  # (n, r)
    return factor.float(), (diagonal - factor.square().sum(1)).clamp(min=0.0).float()
