"""Second moments of rows of numbers, scaled to a mean diagonal of 1, and their low-rank parts.

Up to DENSE columns the moment itself is kept, (n, n), and decomposed. Beyond, only its product with a random
matrix Omega (n, k) and its diagonal are: the eigenpairs then come from the Nystroem approximation

    C ~ Y (Omega^T Y)^-1 Y^T,   Y = C Omega

with the shift that keeps it stable. Source: Tropp, Yurtsever, Udell, Cevher 2017 (arXiv 1706.05736).
"""

from __future__ import annotations

from copy import copy
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

DENSE = 1024
"""Columns up to which a moment is formed and decomposed."""

_EXTRA = 16  # columns of the sketch beyond twice the rank
_LEAST = 1e-31  # mean diagonal: below, numbers 1e-7 of it lie under float32's smallest


Split: TypeAlias = tuple[Tensor, Tensor]
"""F (n, rank) and the rest of the diagonal (n,) of a moment, of mean diagonal 1."""


class Moment(Protocol):
    """The sum of x x^T over rows that were seen, up to a factor. It never changes, so layers may share one."""

    def with_rows(self, rows: Tensor) -> Moment:
        """This and the rows (m, n), float32, together."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""

    def packed(self) -> Tensor:
        """As a vector of `packed_moment_size` numbers, float32."""

    def plus(self, packed: Tensor) -> Moment:
        """This and another one of the same kind, which arrived as a vector, together."""

    def split(self, rank: int, earlier: Split | None = None, weight: float = 0.0) -> Split | None:
        """The low-rank part and the rest; None for a moment that is zero, not finite or lost in rounding.

        With an `earlier` one, of (1 - weight) x this moment + weight x (F F^T + rest), both of mean diagonal 1.
        """


def new_moment(n: int, rank: int, device: torch.device, *, travels: bool = False) -> Moment:
    """An empty moment of vectors of n numbers; of the smaller kind if it `travels`."""
    return Dense(n, device) if _is_dense(n, rank, travels) else Sketch(n, _columns(n, rank), device)


def packed_moment_size(n: int, rank: int) -> int:
    """Numbers as which a moment travels."""
    return n * (n + 1) // 2 if _is_dense(n, rank, travels=True) else n * (_columns(n, rank) + 1)


def _is_dense(n: int, rank: int, travels: bool) -> bool:
    return n <= DENSE and not (travels and n * (n + 1) // 2 > n * (_columns(n, rank) + 1))


def _columns(n: int, rank: int) -> int:
    return min(n, 2 * rank + _EXTRA)


class Dense:
    """The moment as it is."""

    def __init__(self, n: int, device: torch.device) -> None:
        self._sum = torch.zeros(n, n, dtype=torch.float32, device=device)

    def with_rows(self, rows: Tensor) -> Dense:
        both = copy(self)
        both._sum = torch.addmm(self._sum, rows.T, rows)
        return both

    @property
    def nbytes(self) -> int:
        return self._sum.nbytes

    def packed(self) -> Tensor:
        """The upper triangle, row by row."""
        n = len(self._sum)
        return self._sum[*torch.triu_indices(n, n, device=self._sum.device)]

    def plus(self, packed: Tensor) -> Dense:
        n = len(self._sum)
        upper = torch.zeros_like(self._sum)
        upper[*torch.triu_indices(n, n, device=upper.device)] = packed
        both = copy(self)
        both._sum = self._sum + (upper + upper.triu(1).T)
        return both

    def split(self, rank: int, earlier: Split | None = None, weight: float = 0.0) -> Split | None:
        moment = self._sum.double()
        mean = moment.diagonal().mean()
        if not _usable(moment, mean):
            return None
        moment = (moment + moment.T) / (2 * mean)
        if earlier is not None:
            factor, rest = earlier[0].double(), earlier[1].double()
            moment = (1 - weight) * moment + weight * (factor @ factor.T + rest.diag())
        values, vectors = torch.linalg.eigh(moment)  # rising
        return _split(vectors[:, -rank:], values[-rank:], moment.diagonal())


class Sketch:
    """Its product with a random matrix, (n, k), and its diagonal."""

    def __init__(self, n: int, columns: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(n)
        omega = torch.randn(n, columns, generator=generator, dtype=torch.float64)
        self._omega = torch.linalg.qr(omega).Q.float().to(device)  # (n, k)
        self._sum = torch.zeros_like(self._omega)
        self._diagonal = torch.zeros(n, dtype=torch.float32, device=device)

    def with_rows(self, rows: Tensor) -> Sketch:
        both = copy(self)
        both._sum = torch.addmm(self._sum, rows.T, rows @ self._omega)
        both._diagonal = self._diagonal + rows.square().sum(0)
        return both

    @property
    def nbytes(self) -> int:
        return int(self._sum.nbytes + self._omega.nbytes + self._diagonal.nbytes)

    def packed(self) -> Tensor:
        return torch.cat([self._sum.reshape(-1), self._diagonal])

    def plus(self, packed: Tensor) -> Sketch:
        n, columns = self._omega.shape
        product, diagonal = packed.split([n * columns, n])
        both = copy(self)
        both._sum, both._diagonal = self._sum + product.view(n, columns), self._diagonal + diagonal
        return both

    def split(self, rank: int, earlier: Split | None = None, weight: float = 0.0) -> Split | None:
        diagonal = self._diagonal.double()
        mean = diagonal.mean()
        if not _usable(self._sum, mean):
            return None
        omega = self._omega.double()
        y, diagonal = self._sum.double() / mean, diagonal / mean  # (n, k), (n,)
        if earlier is not None:
            factor, rest = earlier[0].double(), earlier[1].double()
            y = (1 - weight) * y + weight * (factor @ (factor.T @ omega) + rest[:, None] * omega)
            diagonal = (1 - weight) * diagonal + weight * (factor.square().sum(1) + rest)
        shift = torch.finfo(torch.float32).eps * y.norm()
        y = y + shift * omega
        core = omega.T @ y  # (k, k)
        lower, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
        if failed:
            return None
        root = torch.linalg.solve_triangular(lower, y.T, upper=False).T  # (n, k): C ~ root root^T
        vectors, singular, _ = torch.linalg.svd(root, full_matrices=False)  # falling
        return _split(vectors[:, :rank], singular[:rank].square() - shift, diagonal)


def _usable(moment: Tensor, mean: Tensor) -> bool:
    return bool(torch.isfinite(moment).all()) and _LEAST < float(mean) < float("inf")


def _split(vectors: Tensor, values: Tensor, diagonal: Tensor) -> Split:
    factor = vectors * values.clamp(min=0.0).sqrt()  # (n, r)
    return factor.float(), (diagonal - factor.square().sum(1)).clamp(min=0.0).float()
