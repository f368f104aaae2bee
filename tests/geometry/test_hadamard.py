"""Hadamard coordinates: orthonormal, their own inverse, for any number of columns."""

from __future__ import annotations

import pytest
import torch

from tests.geometry.matrices import distance, generator, place
from thinwire.formats import get
from thinwire.geometry import Hadamard
from thinwire.reducers.round_trip import round_trip


@pytest.mark.parametrize("order", [16, 32, 64, 128])
@pytest.mark.parametrize("columns", [16, 17, 31, 96, 128, 344, 1000])
def test_norms_are_kept_and_the_inverse_is_exact(order: int, columns: int) -> None:
    bound = Hadamard(order).bind({"w": (5, columns)}, place())
    gradient = torch.randn(5, columns, generator=generator())
    u = bound.forward("w", gradient)
    assert distance(u.norm(dim=1), gradient.norm(dim=1)) < 1e-6
    assert distance(bound.inverse("w", u), gradient) < 1e-6


def test_a_block_is_signs_and_then_sylvesters_matrix() -> None:
    """Against the definition: H[i, j] = (-1)^(number of common bits of i and j)."""
    bound = Hadamard(16, seed=3).bind({"w": (16, 16)}, place())
    sylvester = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(16)] for i in range(16)])
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(3)) * 2.0 - 1.0
    assert torch.allclose(bound.forward("w", torch.eye(16)), signs[:, None] * sylvester / 4)


def test_columns_beyond_the_last_block_of_16_stay_as_they_are() -> None:
    bound = Hadamard(64, seed=None).bind({"w": (3, 64 + 16 + 7)}, place())
    gradient = torch.randn(3, 87, generator=generator())
    u = bound.forward("w", gradient)
    assert torch.equal(u[:, 80:], gradient[:, 80:])
    assert not torch.isclose(u[:, :80], gradient[:, :80]).all()


def test_narrow_matrices_keep_their_coordinates() -> None:
    assert Hadamard().bind({"narrow": (100, 15), "wide": (100, 16)}, place()).names == {"wide"}


def test_an_outlier_costs_int4_less_in_hadamard_coordinates() -> None:
    gradient = torch.randn(64, 512, generator=generator())
    gradient[:, 7] *= 40
    bound = Hadamard().bind({"w": (64, 512)}, place())
    plain = distance(round_trip(get("int4"), gradient), gradient)
    turned = distance(bound.inverse("w", round_trip(get("int4"), bound.forward("w", gradient))), gradient)
    assert turned < 0.6 * plain


def test_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="order must be 16, 32, 64 or 128, got 48"):
        Hadamard(48)
