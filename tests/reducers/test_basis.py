"""Orthonormal bases: as good as Householder's whatever the condition, and the same one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.reducers.basis import SPREAD, _cholesky, orthonormal_basis


def tall(condition: float, dtype: torch.dtype = torch.float32, rows: int = 1024, columns: int = 64) -> Tensor:
    torch.manual_seed(0)
    left = torch.linalg.qr(torch.randn(2, rows, columns, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(2, columns, columns, dtype=torch.float64)).Q
    values = torch.logspace(0, -1, columns, base=condition, dtype=torch.float64)
    return (left * values @ right).to(dtype)


def off(q: Tensor) -> float:
    """How far the columns are from orthonormal."""
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max())


@pytest.mark.parametrize("algorithm", ["qr", "cqr", "rcqr"])
@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 1e4, 1e6])
def test_columns_are_orthonormal_and_span_the_same(algorithm: str, condition: float) -> None:
    p = tall(condition)
    q = orthonormal_basis(p, algorithm)  # type: ignore[arg-type]
    assert off(q) <= 1e-5
    torch.testing.assert_close(q @ (q.mT @ p), p, atol=1e-5, rtol=0)


def test_the_quick_algorithm_alone_loses_the_square_of_the_condition() -> None:
    """So it has to be caught."""
    assert [bool(_cholesky(tall(condition), SPREAD["cqr"])[1].all()) for condition in (3.0, 1e3, 1e6)] == [
        True,
        False,
        False,
    ]
    q, _ = _cholesky(tall(1e3), 0.0)
    assert off(q) > 1e-4


@pytest.mark.parametrize("algorithm", ["cqr", "rcqr"])
def test_all_algorithms_give_the_same_columns_up_to_sign(algorithm: str) -> None:
    p = tall(1e3, torch.float64)
    exact, q = orthonormal_basis(p, "qr"), orthonormal_basis(p, algorithm)  # type: ignore[arg-type]
    signs = (exact * q).sum(-2, keepdim=True).sign()
    torch.testing.assert_close(q * signs, exact, atol=1e-8, rtol=0)


@pytest.mark.parametrize("algorithm", ["qr", "cqr", "rcqr"])
def test_dependent_columns_and_zeros_still_get_a_basis_and_nan_stays(algorithm: str) -> None:
    p = tall(2.0)
    p[0, :, 5] = p[0, :, 4]
    p[0, :, 7] = 0
    p[1] = 0
    q = orthonormal_basis(p, algorithm)  # type: ignore[arg-type]
    assert off(q) <= 1e-5
    p[1, 3, 3] = float("nan")
    q = orthonormal_basis(p, algorithm)  # type: ignore[arg-type]
    assert off(q[:1]) <= 1e-5
    assert q[1].isnan().any()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 7), (2, 9, 1), (0, 5, 2), (1, 300, 200)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q = orthonormal_basis(torch.randn(shape))
    assert q.shape == shape
    assert q.numel() == 0 or off(q) <= 1e-5
