"""Muon on one rank: against torch's, against the formula, on odd parameters, over stops."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import thinwire as tw
from tests.optim.toys import Small, apart, groups, loss, matrix_groups, resumed, train, weights
from thinwire.optim.muon import MuonRule, muon_reference

SHAPES = {"square": (16, 16), "tall": (40, 12), "wide": (12, 40), "again": (12, 40), "odd": (7, 3), "row": (1, 9)}


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("scale", "adjust"), [("jordan", "original"), ("moonshot", "match_rms_adamw")])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equal_to_the_muon_of_torch(scale: str, adjust: str, nesterov: bool) -> None:
    ours = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    theirs = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    muon = tw.optim.Muon(
        [{"params": list(ours.items()), "kind": "matrix"}],
        lr=0.02,
        scale=scale,  # type: ignore[arg-type]
        nesterov=nesterov,
        weight_decay=0.1,
    )
    torchs = torch.optim.Muon(theirs.values(), lr=0.02, adjust_lr_fn=adjust, nesterov=nesterov, weight_decay=0.1)
    moved = {name: torch.zeros(()) for name in SHAPES}
    for step in range(20):
        for name, gradient in gradients(step).items():
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        before = weights_of(theirs)
        muon.step()
        torchs.step()
        for name in SHAPES:
            moved[name] = moved[name] + (theirs[name].detach() - before[name]).norm()
    for name in SHAPES:
        assert (ours[name] - theirs[name]).norm() < 0.02 * moved[name], name


def weights_of(named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


@pytest.mark.parametrize("ns", ["jordan", "dion", "polar_express", "exact"])
@pytest.mark.parametrize("scale", ["none", "jordan", "spectral", "moonshot"])
def test_equal_to_the_formula(ns: str, scale: str) -> None:
    group = matrix_groups(**{name: torch.ones(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    muon = tw.optim.Muon(group, 0.03, ns=ns, scale=scale, dtype=torch.float64, weight_decay=0.1)  # type: ignore[arg-type]
    named = dict(group[0]["params"])
    x = {name: p.detach().clone() for name, p in named.items()}
    m = {name: torch.zeros_like(p) for name, p in x.items()}
    for step in range(3):
        for name, gradient in gradients(step).items():
            named[name].grad = gradient.double()
            x[name], m[name] = muon_reference(
                *(x[name], m[name], gradient.double()),
                **{"lr": 0.03, "mu": 0.95, "nesterov": True, "wd": 0.1, "ns": ns, "scale": scale},  # type: ignore[arg-type]
            )
        muon.step()
    assert apart(named, x) < 1e-12


def test_updates_of_moonshot_are_as_large_as_those_of_adamw() -> None:
    torch.manual_seed(0)
    group = matrix_groups(w=torch.zeros(128, 128))
    muon = tw.optim.Muon(group, 1.0, ns="dion", scale="moonshot")
    parameter = group[0]["params"][0][1]
    parameter.grad = torch.randn(128, 128)
    muon.step()
    assert 0.18 < parameter.square().mean().sqrt() < 0.22


def test_everything_else_moves_as_under_the_adamw_of_torch() -> None:
    ours, theirs = Small(), Small()
    muon = tw.optim.Muon(groups(ours), rest=tw.optim.AdamW(lr=0.01, weight_decay=0.1))
    named = dict(theirs.named_parameters())
    rest = [name for g in groups(theirs) if g["kind"] != "matrix" for name, _ in g["params"]]
    adamw = torch.optim.AdamW(
        [{"params": [named[n]], "weight_decay": 0.0 if n == "lm_head.weight" else 0.1} for n in rest],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    for step in range(5):
        ours.load_state_dict(
            {n: p if n not in rest else ours.state_dict()[n] for n, p in theirs.state_dict().items()}
        )
        ours.zero_grad()
        theirs.zero_grad()
        loss(ours, step, 0).backward()
        loss(theirs, step, 0).backward()
        muon.step()
        adamw.step()
    assert apart({n: dict(ours.named_parameters())[n].detach() for n in rest}, weights(theirs)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rest", [tw.optim.AdamW(), tw.optim.Lion(lr=0.005)])
def test_a_model_with_odd_parameters_learns_and_the_idle_ones_stay(
    dtype: torch.dtype, rest: tw.optim.Lion
) -> None:
    model = Small(dtype=dtype)
    start = weights(model)
    muon = tw.optim.Muon(groups(model), lr=0.02, weight_decay=0.01, rest=rest)
    first = loss(model, 0, 0).item()
    train(model, muon, range(40))
    assert loss(model, 0, 0).item() < 0.7 * first
    now = weights(model)
    for name, before in start.items():
        same = torch.equal(now[name], before)
        assert same == (name.startswith(("unused", "frozen", "empty"))), name
        assert now[name].dtype == dtype


def test_momentum_of_narrow_parameters_is_wide_and_survives_a_load() -> None:
    model = Small(dtype=torch.bfloat16)
    muon = tw.optim.Muon(groups(model))
    train(model, muon, range(2))
    other = tw.optim.Muon(groups(Small(dtype=torch.bfloat16)))
    other.load_state_dict(muon.state_dict())
    for a, b in zip(muon.state.values(), other.state.values()):
        for key in a:
            assert a[key].dtype == b[key].dtype
            assert torch.equal(a[key], b[key])
    assert muon.state[model.first.weight]["momentum"].dtype == torch.float32
    assert muon.memory_bytes() > 0


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    went_on, resumed_run = resumed(lambda model: tw.optim.Muon(groups(model)))
    assert went_on == resumed_run


def test_state_belongs_to_names_and_not_to_places() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    first, second = matrix_groups(a=a.clone(), b=b.clone()), matrix_groups(b=b.clone(), a=a.clone())
    muon, other = tw.optim.Muon(first), tw.optim.Muon(second)
    for name, p in first[0]["params"]:
        p.grad = torch.ones_like(p) * (1 if name == "a" else 2)
    muon.step()
    other.load_state_dict(muon.state_dict())
    for name, p in second[0]["params"]:
        assert torch.equal(other.state[p]["momentum"], muon.state[dict(first[0]["params"])[name]]["momentum"])
    with pytest.raises(ValueError, match="in group 0 only the saved optimizer has 'a'"):
        tw.optim.Muon(matrix_groups(b=b, c=a)).load_state_dict(muon.state_dict())
    with pytest.raises(ValueError, match=r"'momentum' of 'a' is of shape \(3, 4\), expected shape \(4, 3\)"):
        tw.optim.Muon(matrix_groups(a=a.T, b=b)).load_state_dict(muon.state_dict())
    cut = tw.optim.Muon([{**matrix_groups(a=a, b=b)[0], "repeat": 3, "apart": True}])
    with pytest.raises(ValueError, match="group 0 was of another kind, or its matrices were cut otherwise"):
        cut.load_state_dict(muon.state_dict())


def test_state_dicts_of_torch_distributed_checkpoint_work() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    model = Small()
    muon = tw.optim.Muon(groups(model))
    train(model, muon, range(2))
    state = get_optimizer_state_dict(model, muon)
    assert torch.equal(state["state"]["first.weight"]["momentum"], muon.state[model.first.weight]["momentum"])
    other = Small()
    fresh = tw.optim.Muon(groups(other))
    set_optimizer_state_dict(other, fresh, state)
    assert torch.equal(fresh.state[other.first.weight]["momentum"], state["state"]["first.weight"]["momentum"])


def test_learning_rate_schedules_move_all_groups() -> None:
    model = Small()
    muon = tw.optim.Muon(groups(model), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(muon, lambda step: 0.5)
    assert {group["lr"] for group in muon.param_groups} == {0.05, 1.5e-4}
    train(model, muon, range(1))
    schedule.step()


def test_splitting_a_fused_layer_is_training_its_parts_apart() -> None:
    torch.manual_seed(0)
    whole, gradient = torch.randn(12, 6), torch.randn(12, 6)
    fused = [{**matrix_groups(w=whole.clone())[0], "sizes": (4, 8)}]
    parts = matrix_groups(a=whole[:4].clone(), b=whole[4:].clone())
    for group in (fused, parts):
        for (_, p), g in zip(group[0]["params"], [gradient] if group is fused else gradient.split([4, 8])):
            p.grad = g.clone()
        tw.optim.Muon(group, dtype=torch.float32).step()
    torch.testing.assert_close(
        fused[0]["params"][0][1].detach(), torch.cat([p for _, p in parts[0]["params"]]).detach()
    )


def test_what_it_cannot_do_is_refused_by_name() -> None:
    w = torch.ones(3, 3)
    muon = partial(tw.optim.Muon)
    with pytest.raises(
        TypeError, match=r"Muon must know which parameters are matrices: give it tw.optim.param_groups"
    ):
        muon(Small().parameters())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="group 0 must hold pairs of name and parameter"):
        muon([{"params": [nn.Parameter(w)], "kind": "matrix"}])
    with pytest.raises(ValueError, match=r"'v' of shape \(3,\) is in a matrix group"):
        muon(matrix_groups(v=torch.ones(3)))
    with pytest.raises(ValueError, match=r"'c' is torch.complex64, must be real and floating point"):
        muon(matrix_groups(c=torch.ones(3, 3, dtype=torch.complex64)))
    with pytest.raises(ValueError, match="two parameters are called 'w'"):
        muon([*matrix_groups(w=w), *matrix_groups(w=w)])
    with pytest.raises(ValueError, match="Muon got no parameters"):
        muon([])
    with pytest.raises(ValueError, match="lr and weight_decay must be at least 0, got -1"):
        muon(matrix_groups(w=w), lr=-1)
    with pytest.raises(ValueError, match="ns must be one of jordan, dion, polar_express, exact, got 'svd'"):
        muon(matrix_groups(w=w), ns="svd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale must be one of none, jordan, spectral, moonshot, got 'rms'"):
        muon(matrix_groups(w=w), scale="rms")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum must be from 0 to less than 1, got 1"):
        MuonRule(1.0, True, "jordan", "none", torch.float32)
    with pytest.raises(TypeError, match="Muon needs a reducer such as"):
        muon(matrix_groups(w=w), reducer="dense")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Muon: replicate must be a process group or a mesh"):
        muon(matrix_groups(w=w), replicate="world")  # type: ignore[arg-type]
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = muon(tw.optim.param_groups(embedding))
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="the gradient of 'weight' is sparse"):
        optimizer.step()
    with pytest.raises(ValueError, match="groups cannot be added later"):
        optimizer.add_param_group({"params": [nn.Parameter(w)]})
