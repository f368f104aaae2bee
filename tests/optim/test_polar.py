"""Newton-Schulz iterations against singular value decompositions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thinwire.optim.polar import COEFFICIENTS, orthonormalize, orthonormalize_all, orthonormalize_reference

NAMES = tuple(COEFFICIENTS)
RANGES = {"jordan": (0.682, 1.134), "dion": (0.978, 1.032), "polar_express": (0.859, 1.141)}


def with_singular_values(values: Tensor) -> Tensor:
    left, right = (torch.linalg.qr(torch.randn(len(values), len(values))).Q for _ in range(2))
    return left * values @ right.mT


@pytest.mark.parametrize("name", NAMES)
def test_singular_values_end_in_the_measured_range(name: str) -> None:
    torch.manual_seed(0)
    values = torch.logspace(-2, 0, 400)
    values *= (1 / (values / values.norm()).min()) * 0.01  # the smallest is a hundredth of the norm
    ended = torch.linalg.svdvals(orthonormalize(with_singular_values(values[:256]), name, dtype=None))  # type: ignore[arg-type]
    low, high = RANGES[name]
    assert low - 0.02 <= ended.min()
    assert ended.max() <= high + 0.02


def test_polar_express_lifts_small_singular_values_most() -> None:
    torch.manual_seed(0)
    u = with_singular_values(torch.tensor([1.0, 1e-3]))
    ended = {name: torch.linalg.svdvals(orthonormalize(u, name, dtype=None)).min() for name in NAMES}  # type: ignore[arg-type]
    assert ended["polar_express"] > 0.82
    assert max(ended["jordan"], ended["dion"]) < 0.55


@pytest.mark.parametrize("name", [*NAMES, "exact"])
def test_rotations_and_transposition_pass_through(name: str) -> None:
    torch.manual_seed(0)
    u = torch.randn(24, 40)
    a, b = torch.linalg.qr(torch.randn(24, 24)).Q, torch.linalg.qr(torch.randn(40, 40)).Q
    o = orthonormalize(u, name, dtype=None)  # type: ignore[arg-type]
    torch.testing.assert_close(orthonormalize(a @ u @ b, name, dtype=None), a @ o @ b, atol=1e-4, rtol=0)  # type: ignore[arg-type]
    torch.testing.assert_close(orthonormalize(u.mT, name, dtype=None), o.mT, atol=1e-5, rtol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*NAMES, "exact"])
def test_a_batch_of_any_shapes_is_what_the_formula_gives_for_each(name: str) -> None:
    torch.manual_seed(0)
    shapes = [(1, 1), (1, 7), (5, 1), (8, 6), (6, 8), (8, 6), (17, 17)]
    matrices = [torch.randn(shape).double() for shape in shapes]
    found = orthonormalize_all(matrices, name, dtype=torch.float64)  # type: ignore[arg-type]
    for matrix, o in zip(matrices, found):
        torch.testing.assert_close(o, orthonormalize_reference(matrix, name), atol=1e-12, rtol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*NAMES, "exact"])
def test_nothing_comes_of_nothing(name: str) -> None:
    assert not orthonormalize(torch.zeros(3, 4, 5), name).any()  # type: ignore[arg-type]
    assert orthonormalize(torch.zeros(2, 0, 5), name).shape == (2, 0, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "least"), [("jordan", 0.97), ("dion", 0.999), ("polar_express", 0.99)])
def test_the_direction_is_that_of_the_polar_factor_also_in_bfloat16(name: str, least: float) -> None:
    torch.manual_seed(0)
    u = torch.randn(96, 160)
    exact = orthonormalize(u, "exact", dtype=None)
    found = orthonormalize(u.bfloat16(), name).float()  # type: ignore[arg-type]
    assert torch.cosine_similarity(exact.flatten(), found.flatten(), dim=0) > least
    torch.testing.assert_close(exact @ exact.mT, torch.eye(96), atol=1e-5, rtol=0)
