"""Orthonormalisation of whole matrices: the orthogonal factor of u = O (u^T u)^(1/2), or close to it.

An odd polynomial, applied again and again, drives every singular value towards 1 and leaves the singular vectors:

    X = u / |u|;    A = X X^T;    X <- a X + (b A + c A^2) X

in a few matrix products, which bfloat16 stands. Published coefficients differ in how near 1 they end:

    "jordan"         0.68 to 1.13   the same five times (Keller Jordan et al. 2024)
    "dion"           0.98 to 1.03   from the code of Dion (microsoft/dion)
    "polar_express"  0.86 to 1.14   and still 0.85 at a thousandth of the norm (arXiv 2505.16932)

for singular values of at least a hundredth of the norm. "exact" takes a singular value decomposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

Method: TypeAlias = Literal["jordan", "dion", "polar_express", "exact"]


BATCH = 1 << 18
"""Elements of a batch: small matrices are slow one by one, and large batches save nothing."""


@dataclass(frozen=True)
class Coefficients:
    """Of a Newton-Schulz iteration."""

    steps: tuple[tuple[float, float, float], ...]
    """a, b, c of each step."""
    margin: float = 1.0
    """By what the norm is multiplied before dividing by it."""
    eps: float = 1e-7


COEFFICIENTS = {
    "jordan": Coefficients(((3.4445, -4.7750, 2.0315),) * 5),
    "dion": Coefficients(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    "polar_express": Coefficients(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        margin=1.02,
        eps=1e-6,
    ),
}


def orthonormalize(u: Tensor, method: Method = "jordan", *, dtype: torch.dtype | None = torch.bfloat16) -> Tensor:
    """The orthogonal factor of each matrix of `u`, (..., rows, columns), by `method`; zero where `u` is zero.

    Computed and returned in `dtype` (None: that of `u`); "exact" is computed in float32 at least. Sends nothing.
    """
    check_method(method)
    dtype = dtype or u.dtype
    if u.numel() == 0:
        return u.to(dtype)
    if method == "exact":
        return exact_polar(u).to(dtype)
    coefficients = COEFFICIENTS[method]
    tall = u.shape[-2] > u.shape[-1]
    x = (u.mT if tall else u).to(dtype)  # (..., m, n), m <= n
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)  # added up in float32
    x = x * (1 / (norm * coefficients.margin).clamp(min=coefficients.eps))
    shape, x = x.shape, x.reshape(-1, *x.shape[-2:]).squeeze(0)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for a, b, c in coefficients.steps:
        gram = x @ x.mT  # (batch, m, m), without the batch where it is 1
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a X + (b A + c A A) X
    x = x.view(shape)
    return x.mT if tall else x


def orthonormalize_reference(u: Tensor, method: Method = "jordan") -> Tensor:
    """One matrix, (rows, columns), in the dtype of `u`: the formula and nothing else."""
    if method == "exact":
        left, _, right = torch.linalg.svd(u, full_matrices=False)
        return left @ right  # type: ignore[no-any-return]
    if u.shape[0] > u.shape[1]:
        return orthonormalize_reference(u.T, method).T
    coefficients = COEFFICIENTS[method]
    x: Tensor = u / (coefficients.margin * u.norm()).clamp(min=coefficients.eps)
    for a, b, c in coefficients.steps:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def exact_polar(u: Tensor) -> Tensor:
    """By singular values, those that are zero to rounding left out; in float32 at least."""
    wide = u if u.dtype == torch.float64 else u.float()
    left, values, right = torch.linalg.svd(wide, full_matrices=False)
    floor = values.amax(-1, keepdim=True) * torch.finfo(wide.dtype).eps * max(u.shape[-2:])
    return (left * (values > floor).to(wide.dtype).unsqueeze(-2)) @ right  # type: ignore[no-any-return]


def orthonormalize_all(
    matrices: Sequence[Tensor], method: Method, *, dtype: torch.dtype = torch.bfloat16
) -> list[Tensor]:
    """As `orthonormalize`, of matrices (rows, columns) of any shapes: those of one shape, either way up, in one
    batch."""
    batches: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        batches.setdefault(tuple(sorted(matrix.shape)), []).append(index)
    found: dict[int, Tensor] = {}
    for shape, indices in batches.items():
        together = max(1, BATCH // max(1, shape[0] * shape[1]))
        for start in range(0, len(indices), together):
            some = indices[start : start + together]
            tall = [matrices[i].shape[0] > matrices[i].shape[1] for i in some]
            wide = [matrices[i].mT if up else matrices[i] for i, up in zip(some, tall)]
            batch = torch.stack(wide) if len(wide) > 1 else wide[0][None]
            results = orthonormalize(batch, method, dtype=dtype).unbind()
            found.update({i: result.mT if up else result for i, up, result in zip(some, tall, results)})
    return [found[index] for index in range(len(matrices))]


def check_method(method: str) -> None:
    """Raise ValueError for a name that is none of the methods."""
    if method not in get_args(Method):
        raise ValueError(f"ns must be one of {', '.join(get_args(Method))}, got {method!r}")
