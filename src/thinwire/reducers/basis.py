"""An orthonormal basis of the columns of tall, narrow matrices: P = Q R with Q^T Q = 1 and R upper triangular.

Householder's algorithm ("qr") is exact and slow. Cholesky's is matrix products, R = cholesky(P^T P), Q = P R^-1,
and loses the square of P's condition number ("cqr"). A random sketch S P, of a few hundred rows, gives an R that
makes P well-conditioned first ("rcqr", as in Dion's code, arXiv 2504.05295). Whatever a quick algorithm cannot do
well enough, by its own R, is given to the next slower one. All give the same Q up to the signs of columns.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Algorithm: TypeAlias = Literal["qr", "cqr", "rcqr"]

SPREAD = {"cqr": 0.3, "rcqr": 0.05}
"""Smallest over largest diagonal entry of R below which Cholesky's algorithm is not trusted: a sketch of few more
rows than columns leaves some spread, which does no harm."""


def orthonormal_basis(p: Tensor, algorithm: Algorithm = "rcqr") -> Tensor:
    """Q of each matrix of `p`, (batch, rows, columns) with rows >= columns, in float32 or float64.

    The same on every rank that has the same `p`: the sketch is drawn from a fixed seed.
    """
    check_algorithm(algorithm)
    _, rows, columns = p.shape
    size = _sketch_size(columns)
    if algorithm == "qr" or rows <= size or p.numel() == 0:
        q: Tensor = torch.linalg.qr(p).Q
        return q
    if algorithm == "cqr":
        q, good = _cholesky(p, SPREAD[algorithm])
    else:
        sketched = _sketch(size, rows, p.dtype, p.device) @ p  # (batch, size, columns)
        first = torch.linalg.solve_triangular(torch.linalg.qr(sketched).R, p, upper=True, left=False)
        q, good = _cholesky(first, SPREAD[algorithm])
    if bool(good.all()):
        return q
    bad = (~good).nonzero().flatten()
    q[bad] = orthonormal_basis(p[bad], "rcqr" if algorithm == "cqr" else "qr")
    return q


def check_algorithm(algorithm: str) -> None:
    """Raise ValueError for a name that is none of the algorithms."""
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"basis must be one of {', '.join(get_args(Algorithm))}, got {algorithm!r}")


def _cholesky(p: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Q, and for each matrix whether it can be trusted."""
    lower, info = torch.linalg.cholesky_ex(p.mT @ p)
    q = torch.linalg.solve_triangular(lower.mT, p, upper=True, left=False)
    diagonal = lower.diagonal(dim1=-2, dim2=-1)
    spread = diagonal.amin(-1) / diagonal.amax(-1)
    return q, (info == 0) & (spread > least) & q.isfinite().all(-1).all(-1)


def _sketch_size(columns: int) -> int:
    return 128 * math.ceil(1.25 * columns / 128)


@functools.lru_cache(maxsize=64)
def _sketch(size: int, rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(size * 1_000_003 + rows)
    return (torch.randn(size, rows, generator=generator, dtype=dtype) / math.sqrt(size)).to(device)
