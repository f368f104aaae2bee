"""NorMuon: rows of an update become as long as each other; on ranks it is what it is on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from tests.optim.toys import Small, apart, bits, groups, loss, matrix_groups, plain, resumed, train
from tests.support.ranks import run_ranks
from thinwire.optim.normuon import even_reference
from thinwire.optim.polar import orthonormalize_reference


def test_equal_to_the_formula_for_each_part_of_a_fused_layer() -> None:
    torch.manual_seed(0)
    group = {**matrix_groups(w=torch.zeros(14, 6, dtype=torch.float64))[0], "sizes": (4, 10)}
    optimizer = tw.optim.NorMuon([group], 0.1, ns="dion", scale="spectral", dtype=torch.float64, nesterov=False)
    parameter = group["params"][0][1]
    x, m = torch.zeros(14, 6).double(), torch.zeros(14, 6).double()
    seconds = [torch.zeros(4).double(), torch.zeros(10).double()]
    for _ in range(4):
        parameter.grad = torch.randn(14, 6).double()
        m = 0.95 * m + 0.05 * parameter.grad
        moves = []
        for i, u in enumerate(m.split([4, 10])):
            n, seconds[i] = even_reference(orthonormalize_reference(u, "dion"), seconds[i], 0.95)
            moves.append((u.shape[0] / u.shape[1]) ** 0.5 * n)
        x = x - 0.1 * torch.cat(moves)
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), x, atol=1e-12, rtol=0)


def test_rows_become_equally_long_and_the_norm_stays() -> None:
    torch.manual_seed(0)
    group = matrix_groups(w=torch.zeros(64, 16))
    optimizer = tw.optim.NorMuon(group, 1.0, ns="exact", scale="none", beta=0.0)
    parameter = group[0]["params"][0][1]
    parameter.grad = torch.randn(64, 16) * torch.logspace(-1, 1, 64)[:, None]
    optimizer.step()
    lengths = parameter.detach().norm(dim=1)
    assert lengths.max() / lengths.min() < 1.01
    assert abs(parameter.detach().norm() / 16**0.5 - 1) < 0.01
    parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["momentum"] = 0.0
    before = parameter.detach().clone()
    optimizer.step()
    assert torch.equal(parameter, before)


def normuon(model: torch.nn.Module, **options: Any) -> tw.optim.NorMuon:
    return tw.optim.NorMuon(groups(model), weight_decay=0.01, **options)


def test_it_learns_and_resumes_bit_for_bit() -> None:
    model = Small()
    first = loss(model, 0, 0).item()
    train(model, normuon(model, rest=tw.optim.AdamW()), range(40))
    assert loss(model, 0, 0).item() < 0.7 * first
    went_on, resumed_run = resumed(normuon)
    assert went_on == resumed_run
    with pytest.raises(ValueError, match=r"beta must be from 0 to less than 1 and eps positive, got 1.0 and"):
        normuon(Small(), beta=1.0)


def on_ranks() -> tuple[dict[str, Any], str]:
    model = Small(seed=dist.get_rank(), dtype=torch.float64)
    train(model, normuon(model, reducer=tw.Dense(), dtype=torch.float64), range(4))
    return plain(model), bits(model)


def test_ranks_that_share_the_work_move_as_one_that_does_it_all() -> None:
    model = Small(dtype=torch.float64)
    train(model, normuon(model, dtype=torch.float64), range(4), ranks=range(2))
    (found, first), (_, second) = run_ranks(on_ranks, 2)
    assert first == second
    assert apart(found, plain(model)) < 1e-9
