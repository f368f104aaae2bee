"""Whitened coordinates: exact inverses, the moment they come from, and what they buy."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.geometry.matrices import distance, dominated, generator
from thinwire.formats import get
from thinwire.geometry.moments import DENSE, Dense, Sketch, new_moment
from thinwire.geometry.whitening import Whitening, whitening
from thinwire.reducers.round_trip import round_trip


def of(rows: Tensor, rank: int, *, damping: float, power: float) -> Whitening:
    moment = new_moment(rows.shape[1], rank, rows.device).with_rows(rows)
    split = moment.split(rank)
    assert split is not None
    return whitening(*split, damping=damping, power=power)


def dense(w: Whitening) -> Tensor:
    """D^1/2 (I + V E V^T) D^1/2, float64."""
    v, root = w.vectors.double(), w.diagonal.double().sqrt()
    inner = torch.eye(len(v), dtype=torch.float64) + (v * w.energy.double()) @ v.T
    return root[:, None] * inner * root


@pytest.mark.parametrize("rank", [1, 8, 32, 96])
@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("damping", [1e-3, 1.0])
def test_inverse_undoes_forward(rank: int, power: float, damping: float) -> None:
    x, gradient = dominated(40, 96)
    w = of(x, rank, damping=damping, power=power)
    assert distance(w.inverse(w.forward(gradient)), gradient) < 1e-5
    assert distance(w.forward(w.inverse(gradient)), gradient) < 1e-5


def test_without_directions_and_with_a_flat_diagonal_nothing_changes_bit_for_bit() -> None:
    n = 64
    w = Whitening(torch.zeros(n, 4), torch.zeros(4), torch.ones(n), damping=1.0, power=0.5)
    gradient = torch.randn(10, n, generator=generator())
    assert torch.equal(w.forward(gradient), gradient)
    assert torch.equal(w.inverse(gradient), gradient)


def test_at_full_rank_the_moment_is_the_one_that_was_seen() -> None:
    x = torch.randn(500, 48, generator=generator()) @ torch.randn(48, 48, generator=generator(1))
    w = of(x, 48, damping=1e-2, power=1.0)
    moment = x.double().T @ x.double()
    moment /= moment.diagonal().mean()
    assert distance(dense(w), moment + 1e-2 * torch.eye(48)) < 1e-5


def test_full_rank_whitening_of_the_root_of_the_moment_gives_orthonormal_rows() -> None:
    """Power 1: forward(A^1/2) forward(A^1/2)^T = I, as with the Cholesky factor of the paper."""
    x = torch.randn(400, 32, generator=generator(2)) * torch.logspace(-1, 1, 32)
    moment = x.double().T @ x.double()
    moment /= moment.diagonal().mean()
    values, vectors = torch.linalg.eigh(moment)
    root = (vectors * values.sqrt()) @ vectors.T
    w = of(x, 32, damping=1e-7, power=1.0)
    u = w.forward(root.float()).double()
    assert distance(u @ u.T, torch.eye(32, dtype=torch.float64)) < 1e-2


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_power_one_is_the_papers_cholesky_form_up_to_a_rotation(power: float) -> None:
    """W L^-T and the symmetric form have the same lengths of rows: both whiten by the same moment. At other
    powers only the symmetric form is one of A^power."""
    x, gradient = dominated(16, 64)
    w = of(x, 64, damping=1e-2, power=power)
    lower = torch.linalg.cholesky(dense(w))
    paper = torch.linalg.solve_triangular(lower, gradient.double().T, upper=False).T  # W L^-T
    same = distance(w.forward(gradient).norm(dim=1), paper.norm(dim=1)) < 1e-4
    assert same == (power == 1.0)


def test_damping_can_be_changed_without_seeing_the_data_again() -> None:
    x, _ = dominated(16, 64)
    direct, changed = of(x, 8, damping=1.0, power=0.5), of(x, 8, damping=1e-3, power=0.5).damped(1.0)
    assert distance(dense(changed), dense(direct)) < 1e-5
    assert changed.damping == 1.0


@pytest.mark.parametrize("name", ["fp8_e5m2_span", "fp8_e4m3_span", "nvfp4"])
@pytest.mark.parametrize("damping", [1e-3, 1e-1, 1.0, 3.0])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_dominant_direction_costs_a_fifth_of_the_error_or_less(name: str, damping: float, power: float) -> None:
    x, gradient = dominated()
    w = of(x, 1, damping=damping, power=power)
    plain = distance(round_trip(get(name), gradient), gradient)
    better = distance(w.inverse(round_trip(get(name), w.forward(gradient))), gradient)
    limit = 0.2 if power == 1.0 else 0.45
    assert better <= limit * plain


def test_a_diagonal_alone_does_not_help_a_floating_format() -> None:
    x, gradient = dominated()
    moment = x.square().mean(0)
    w = whitening(torch.zeros(512, 1), moment / moment.mean(), damping=1e-3, power=1.0)
    plain = distance(round_trip(get("fp8_e5m2_span"), gradient), gradient)
    assert distance(w.inverse(round_trip(get("fp8_e5m2_span"), w.forward(gradient))), gradient) == pytest.approx(
        plain, rel=0.05
    )


def test_a_wide_moment_is_sketched_and_finds_the_same_directions() -> None:
    x = torch.randn(300, 10, generator=generator(3)) * torch.logspace(1, 0, 10)
    rows = x @ torch.linalg.qr(torch.randn(256, 10, generator=generator(4))).Q.T
    rows += 1e-2 * torch.randn(300, 256, generator=generator(5))
    exact, sketched = Dense(256, rows.device), Sketch(256, 48, rows.device)
    for half in rows.split(150):
        exact, sketched = exact.with_rows(half), sketched.with_rows(half)
    a, b = exact.split(8), sketched.split(8)
    assert a is not None
    assert b is not None
    assert distance(b[0] @ b[0].T, a[0] @ a[0].T) < 1e-2
    assert distance(b[1], a[1]) < 0.3
    assert isinstance(new_moment(DENSE + 1, 8, rows.device), Sketch)


@pytest.mark.parametrize("kind", [Dense, lambda n, device: Sketch(n, 40, device)])
def test_blending_is_the_weighted_sum_of_normalised_moments(kind: type[Dense]) -> None:
    g = generator(6)
    old, new = torch.randn(90, 40, generator=g), 1e-3 * torch.randn(70, 40, generator=g)
    split = kind(40, old.device).with_rows(old).split(40)
    assert split is not None
    blended = kind(40, old.device).with_rows(new).split(40, split, 0.25)
    assert blended is not None
    c_old, c_new = old.T @ old, new.T @ new
    expected = 0.25 * c_old / c_old.diagonal().mean() + 0.75 * c_new / c_new.diagonal().mean()
    assert distance(blended[0] @ blended[0].T + blended[1].diag(), expected) < 1e-3


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("columns", [32, DENSE + 16])
def test_a_moment_of_nothing_or_of_non_finite_rows_gives_no_coordinates(value: float, columns: int) -> None:
    moment = new_moment(columns, 8, torch.device("cpu")).with_rows(torch.full((4, columns), value))
    assert moment.split(8) is None


def test_a_sketch_that_rounding_has_made_indefinite_gives_no_coordinates() -> None:
    sketch = Sketch(200, 40, torch.device("cpu")).with_rows(torch.randn(300, 200, generator=generator()))
    product, diagonal = sketch.packed().split([200 * 40, 200])
    assert sketch.plus(torch.cat([-3 * product, diagonal])).split(8) is None
    assert sketch.split(8) is not None
