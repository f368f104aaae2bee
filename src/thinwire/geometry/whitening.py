"""Coordinates in which a second moment is flatter: diagonal plus low rank, O(rows x columns x rank) a change.

A second moment C (n, n), scaled to a mean diagonal of 1, is approximated by a low-rank part and a diagonal,

    C ~ F F^T + D = D^1/2 (I + B B^T) D^1/2        B = D^-1/2 F (n, r),   D = rest + damping

and B B^T = V diag(energy) V^T with orthonormal V. The coordinates of a row g of a gradient are u = g T^-1 with

    T = (I + V diag(energy) V^T)^(p/2) D^(p/2)
    u = x + ((x V) ((1 + energy)^(-p/2) - 1)) V^T,   x = g D^(-p/2)
    g = (u + ((u V) ((1 + energy)^(+p/2) - 1)) V^T) D^(p/2)

Power p = 1 whitens: it is the symmetric form of the Cholesky factor that GIFT uses (arXiv 2607.07494). A format
whose error is proportional to the size of u makes an error of tr(C M^-1) tr(M) in g, with M = T^2, which is
smallest for M = C^(1/2): power 1/2 of the gradient's own second moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Whitening:
    """An invertible change of the coordinates of vectors of n numbers."""

    vectors: Tensor
    """V, float32 (n, r), orthonormal columns."""
    energy: Tensor
    """float32 (r,), what the directions have beyond the diagonal; not negative."""
    diagonal: Tensor
    """D, float32 (n,), positive, damping included."""
    damping: float
    power: float

    def forward(self, rows: Tensor) -> Tensor:
        """g (m, n) to u (m, n)."""
        x = rows * self._shrink
        along = x @ self.vectors  # (m, r)
        if not self._steep:
            return x.addmm_(along * self._flatten, self.vectors.T)
        x.addmm_(along, self.vectors.T, alpha=-1)
        x.addmm_(x @ self.vectors, self.vectors.T, alpha=-1)  # what rounding left there, before it is enlarged
        return x.addmm_(along * (self._flatten + 1.0), self.vectors.T)

    def inverse(self, rows: Tensor) -> Tensor:
        """u (m, n) to g (m, n)."""
        x = rows.addmm((rows @ self.vectors) * self._restore, self.vectors.T)
        return x.mul_(self._grow)

    @property
    def factor(self) -> Tensor:
        """F (n, r)."""
        return self.vectors * self.energy.sqrt() * self.diagonal.sqrt()[:, None]

    @property
    def rest(self) -> Tensor:
        """D without damping (n,)."""
        return (self.diagonal - self.damping).clamp_(min=0.0)

    def damped(self, damping: float) -> Whitening:
        """The same moment with another damping."""
        return whitening(self.factor, self.rest, damping=damping, power=self.power)

    @cached_property
    def _steep(self) -> bool:
        """Whether rounding along the directions comes back 64 times larger."""
        return bool((self._restore > 63.0).any())

    @cached_property
    def _shrink(self) -> Tensor:
        return self.diagonal.pow(-self.power / 2)  # (n,)

    @cached_property
    def _grow(self) -> Tensor:
        return self.diagonal.pow(self.power / 2)  # (n,)

    @cached_property
    def _flatten(self) -> Tensor:
        return torch.expm1(torch.log1p(self.energy) * (-self.power / 2))  # (r,)

    @cached_property
    def _restore(self) -> Tensor:
        return torch.expm1(torch.log1p(self.energy) * (self.power / 2))  # (r,)


def whitening(factor: Tensor, rest: Tensor, *, damping: float, power: float) -> Whitening:
    """From F (n, r) and the rest of the diagonal (n,), of mean diagonal 1, and the damping to be added."""
    diagonal = rest.double() + damping
    b = factor.double() / diagonal.sqrt()[:, None]  # (n, r)
    vectors, singular, _ = torch.linalg.svd(b, full_matrices=False)  # (n, r), (r,)
    return Whitening(vectors.float(), singular.square().float(), diagonal.float(), damping, power)
