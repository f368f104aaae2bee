"""Dion on one rank: the formula, what it becomes at full rank, stops, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import thinwire as tw
from tests.optim.toys import Small, groups, loss, matrix_groups, resumed, train, weights
from thinwire.optim.dion import dion_reference

SHAPES = {"square": (16, 16), "tall": (40, 12), "wide": (12, 40), "again": (12, 40), "odd": (7, 3), "row": (1, 9)}


def dion(model: torch.nn.Module, **options: Any) -> tw.optim.Dion:
    return tw.optim.Dion(groups(model), **{"lr": 0.02, "rank_fraction": 0.25, **options})


@pytest.mark.parametrize("basis", ["qr", "rcqr"])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_the_batched_version_is_the_formula(basis: str, fraction: float) -> None:
    group = matrix_groups(**{name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    optimizer = tw.optim.Dion(group, 0.03, rank_fraction=fraction, basis=basis, weight_decay=0.1)  # type: ignore[arg-type]
    named: dict[str, Tensor] = dict(group[0]["params"])
    expected = {}
    for name, p in named.items():
        q = optimizer.state[p]["right_0"][0].clone()
        assert q.shape[1] == math.ceil(fraction * min(p.shape))
        up = p.shape[0] >= p.shape[1]
        expected[name] = [p.detach().clone() if up else p.detach().clone().T, torch.zeros(1), q]
    torch.manual_seed(1)
    for _ in range(4):
        for name, p in named.items():
            p.grad = torch.randn(p.shape).double()
            x, m, q = expected[name]
            upright = p.shape[0] >= p.shape[1]
            scale = math.sqrt(p.shape[0] / p.shape[1]) / math.sqrt(x.shape[0] / x.shape[1])  # as of the parameter
            lr, wd = 0.03 * scale, 0.1 / scale
            gradient = p.grad if upright else p.grad.T
            expected[name] = list(dion_reference(x, m, q, gradient, lr=lr, mu=0.95, wd=wd))
        optimizer.step()
    for name, p in named.items():
        x = expected[name][0] if p.shape[0] >= p.shape[1] else expected[name][0].T
        torch.testing.assert_close(p.detach(), x, atol=1e-12, rtol=0)


def constant(shape: tuple[int, int], steps: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, momentum and last update where the momentum is the same in every step."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(n, n).double()).Q for n in shape)
    least = min(shape)
    m = left[:, :least] * (1.3 ** torch.arange(least).double()) @ right[:, :least].T
    group = matrix_groups(w=torch.zeros(shape, dtype=torch.float64))
    optimizer = tw.optim.Dion(group, 1.0, weight_decay=0.0, mu=0.9, **options)
    p = group[0]["params"][0][1]
    for _ in range(steps):
        optimizer.state[p]["momentum"].copy_(m)
        p.grad = torch.zeros_like(p)
        before = p.detach().clone()
        optimizer.step()
    return m, optimizer.state[p]["momentum"], before - p.detach()


@pytest.mark.parametrize("shape", [(12, 12), (20, 12), (12, 20)])
def test_at_full_rank_it_is_muon_with_the_exact_polar_factor(shape: tuple[int, int]) -> None:
    m, left_over, update = constant(shape, 150)
    torch.testing.assert_close(left_over, 0.9 * m, atol=1e-12, rtol=1e-12)  # nothing but decay
    group = matrix_groups(w=torch.zeros(shape, dtype=torch.float64))
    muon = tw.optim.Muon(group, 1.0, ns="exact", scale="spectral", dtype=torch.float64)
    group[0]["params"][0][1].grad = m
    muon.step()
    torch.testing.assert_close(update, -group[0]["params"][0][1].detach(), atol=1e-7, rtol=0)


def test_it_points_where_the_muon_of_torch_points() -> None:
    m, _, update = constant((20, 12), 100)
    p = torch.nn.Parameter(torch.zeros(20, 12))
    p.grad = m.float()
    torch.optim.Muon([p], lr=1.0, nesterov=False).step()
    assert torch.cosine_similarity(update.flatten().float(), -p.detach().flatten(), dim=0) > math.cos(
        math.radians(20)
    )


def test_what_a_step_does_not_use_stays_in_the_momentum() -> None:
    m, left_over, update = constant((20, 12), 1, rank_fraction=0.25)
    scale = math.sqrt(20 / 12)
    assert torch.linalg.matrix_rank(update) == 3
    assert torch.linalg.matrix_rank(m - left_over) == 3
    assert (update.norm() / scale - 3**0.5).abs() < 0.5
    nothing = matrix_groups(w=torch.ones(4, 3))
    optimizer = tw.optim.Dion(nothing, rank_fraction=0.5, weight_decay=0.0)
    p = nothing[0]["params"][0][1]
    before = optimizer.state[p]["right_0"].clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, torch.ones(4, 3))
    assert torch.equal(optimizer.state[p]["right_0"], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_a_model_with_odd_parameters_learns_and_the_idle_ones_stay(dtype: torch.dtype, fraction: float) -> None:
    model = Small(dtype=dtype)
    start, first = weights(model), loss(model, 0, 0).item()
    train(model, dion(model, rank_fraction=fraction), range(40))
    assert loss(model, 0, 0).item() < 0.7 * first
    for name, before in start.items():
        same = torch.equal(dict(model.named_parameters())[name], before)
        assert same == (name.startswith(("unused", "frozen", "empty"))), name


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    went_on, resumed_run = resumed(dion)
    assert went_on == resumed_run


def test_a_gradient_that_is_not_finite_shows() -> None:
    group = matrix_groups(w=torch.ones(6, 4))
    optimizer = tw.optim.Dion(group, rank_fraction=0.5)
    p = group[0]["params"][0][1]
    p.grad = torch.full((6, 4), float("nan"))
    optimizer.step()
    assert p.isnan().any()


def test_ranks_are_multiples_of_what_is_asked_and_at_most_all() -> None:
    def rank(shape: tuple[int, int], **options: Any) -> int:
        group = matrix_groups(w=torch.zeros(shape))
        optimizer = tw.optim.Dion(group, **options)
        return int(optimizer.state[group[0]["params"][0][1]]["right_0"].shape[-1])

    assert rank((30, 20), rank_fraction=0.25) == 5
    assert rank((30, 20), rank_fraction=0.25, rank_multiple_of=8) == 8
    assert rank((30, 20), rank_fraction=0.9, rank_multiple_of=16) == 20
    assert rank((1, 20), rank_fraction=0.1) == 1


def test_settings_that_cannot_be_are_refused() -> None:
    for options, message in [
        ({"rank_fraction": 0.0}, "rank_fraction must be above 0 and at most 1, got 0.0"),
        ({"mu": 1.0}, "mu must be from 0 to less than 1, got 1.0"),
        ({"rank_multiple_of": 0}, "rank_multiple_of must be a number of at least 1, got 0"),
        ({"basis": "svd"}, "basis must be one of qr, cqr, rcqr, got 'svd'"),
    ]:
        with pytest.raises(ValueError, match=message):
            dion(Small(), **options)
