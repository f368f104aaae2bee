"""Dion on several ranks: replicas of it move as one would, in the bytes of the factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.optim.toys import Small, apart, bits, groups, plain, resumed, train
from tests.support.ranks import run_ranks

STEPS = 10


def dion(model: nn.Module, **options: Any) -> tw.optim.Dion:
    return tw.optim.Dion(groups(model), **{"lr": 0.02, "rank_fraction": 0.25, **options})


def momenta(model: nn.Module, optimizer: tw.optim.Dion) -> dict[str, Any]:
    return {
        n: optimizer.state[p]["momentum"].tolist()
        for n, p in model.named_parameters()
        if n != "empty" and "momentum" in optimizer.state.get(p, {})
    }


def replicated(wrapped: bool, fraction: float) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Weights, momenta and bits after a run on local gradients."""
    inner = Small(dtype=torch.float64)
    model: nn.Module = inner
    if wrapped:
        model = DDP(inner, find_unused_parameters=True)
        tw.attach(model, tw.Local())
    optimizer = dion(model, rank_fraction=fraction)
    train(model, optimizer, range(STEPS))
    return plain(inner), momenta(inner, optimizer), bits(inner)


@pytest.mark.parametrize(("world", "wrapped", "fraction"), [(2, True, 0.25), (3, False, 0.25), (2, False, 1.0)])
def test_replicas_with_their_own_gradients_move_as_one_with_the_mean(
    world: int, wrapped: bool, fraction: float
) -> None:
    model = Small(dtype=torch.float64)
    central = dion(model, rank_fraction=fraction)
    train(model, central, range(STEPS), ranks=range(world))
    found = run_ranks(replicated, world, wrapped, fraction)
    assert len({bits for _, _, bits in found}) == 1
    assert apart(found[0][0], plain(model)) < 1e-9
    for name, expected in momenta(model, central).items():
        own = torch.tensor([momentum[name] for _, momentum, _ in found], dtype=torch.float64)
        torch.testing.assert_close(own.mean(0), torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    first = [torch.tensor(momentum["first.weight"]) for _, momentum, _ in found]
    assert ((first[0] - first[1]).abs().max() > 1e-3) == (fraction < 1)  # at full rank the gradient is averaged


def quadratic(ranks: list[int]) -> dict[str, Any]:
    """Weights after 50 steps with the mean of these ranks' noisy gradients of a quadratic, in float64."""
    torch.manual_seed(0)
    shapes = {"tall": (48, 32), "wide": (9, 21), "fused": (12, 10), "row": (1, 6)}
    named = {name: nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in shapes.items()}
    goals = {name: torch.randn(shape).double() for name, shape in shapes.items()}
    curved = {name: torch.rand(shape[1]).double() + 0.05 for name, shape in shapes.items()}
    plain_ones = {"params": [(n, p) for n, p in named.items() if n != "fused"], "kind": "matrix"}
    fused = {"params": [("fused", named["fused"])], "kind": "matrix", "sizes": (8, 4)}
    optimizer = tw.optim.Dion([plain_ones, fused], lr=0.1, rank_fraction=0.25)
    for step in range(50):
        for number, (name, p) in enumerate(named.items()):
            noise = [
                torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + number))
                for rank in ranks
            ]
            p.grad = (p.detach() - goals[name]) * curved[name] + 0.3 * torch.stack(noise).double().mean(0)
        optimizer.step()
    return {name: p.tolist() for name, p in named.items()}


def quadratic_of_this_rank() -> dict[str, Any]:
    return quadratic([dist.get_rank()])


def test_fifty_steps_on_local_gradients_are_fifty_on_their_mean() -> None:
    central = quadratic([0, 1, 2])
    for found in run_ranks(quadratic_of_this_rank, 3):
        assert apart(found, central) < 1e-10


def sent(shape: tuple[int, int], fraction: float, reducer: Any) -> dict[str, int]:
    """Bytes of training data by op, of one step of one matrix and one vector of 5."""
    torch.manual_seed(dist.get_rank())
    named = [("w", nn.Parameter(torch.randn(shape)))], [("b", nn.Parameter(torch.randn(5)))]
    kinds = [{"params": named[0], "kind": "matrix"}, {"params": named[1], "kind": "vector"}]
    optimizer = tw.optim.Dion(kinds, rank_fraction=fraction, reducer=reducer)
    for _, p in (*named[0], *named[1]):
        p.grad = torch.randn_like(p)
    optimizer.step()
    found: dict[str, int] = {}
    for row in optimizer.ledger.rows():
        if row.phase != "control":
            found[row.op] = found.get(row.op, 0) + row.sent_bytes
    return found


def all_sent() -> list[dict[str, int]]:
    fp8 = tw.Routed(tw.Quantized("fp8_e4m3"), "[lr]*t_0.w")
    return [
        sent((24, 16), 0.25, tw.Dense()),
        sent((24, 16), 0.9, tw.Dense()),
        sent((24, 16), 1.0, tw.Dense()),
        sent((16, 24), 10 / 16, tw.Dense()),
        sent((96, 64), 0.25, fp8),
    ]


def test_the_ledger_counts_the_factors_or_the_gradient_where_they_are_more() -> None:
    """Two ranks send every element once."""
    low, high, full, even, fp8 = run_ranks(all_sent, 2)[0]
    assert low == {"all_reduce": 4 * ((24 + 16) * 4 + 5)}
    assert high == full == {"all_reduce": 4 * (24 * 16 + 5)}
    assert even == {"all_reduce": 4 * (24 * 16 + 5)}  # 40 x 10 > 384
    assert fp8["all_reduce"] == 4 * 5
    elements = (96 + 64) * 16
    assert elements <= fp8["all_to_all"] + fp8["all_gather"] <= 1.1 * elements


def in_fp8(steps: int) -> tuple[dict[str, Any], str]:
    model = Small(seed=dist.get_rank())
    factors = tw.Routed(tw.Quantized("fp8_e4m3"), lambda slot: not slot.name.startswith("gradient"))
    train(model, dion(model, reducer=factors), range(steps))
    return plain(model), bits(model)


def test_factors_travel_in_fp8_and_replicas_stay_identical() -> None:
    (found, first), (_, second) = run_ranks(in_fp8, 2, STEPS)
    assert first == second
    model = Small()
    train(model, dion(model), range(STEPS), ranks=range(2))
    assert 1e-5 < apart(found, plain(model)) < 0.5


def goes_on() -> tuple[str, str]:
    reducer = tw.Routed(tw.Quantized("fp8_e4m3", feedback="error"), lambda slot: slot.numel >= 16)
    return resumed(lambda model: dion(model, reducer=reducer))


def test_a_resumed_run_goes_on_bit_for_bit_on_each_rank() -> None:
    for went_on, resumed_run in run_ranks(goes_on, 2):
        assert went_on == resumed_run


def saved(synchronize: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]:
    """The optimizer's state after some steps, the weights then and after more steps; what another rank's says."""
    model = Small(dtype=torch.float64)
    optimizer = dion(model)
    train(model, optimizer, range(5))
    then = plain(model)
    if synchronize:
        optimizer.synchronize_for_checkpoint()
    state = optimizer.state_dict()
    kept = _plain(state)
    train(model, optimizer, range(5, 10))
    foreign = {**state, "thinwire": {**state["thinwire"], "rank": 1 - dist.get_rank()}}
    message = ""
    try:
        optimizer.load_state_dict(foreign)
    except ValueError as error:
        message = str(error)
    return kept, then, plain(model), message


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return ("tensor", state.tolist(), tuple(state.shape), str(state.dtype))
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, list) else state


def _state(saved: Any) -> Any:
    if isinstance(saved, tuple) and saved[:1] == ("tensor",):
        return torch.tensor(saved[1], dtype=getattr(torch, saved[3].removeprefix("torch."))).view(saved[2])
    if isinstance(saved, dict):
        return {key: _state(value) for key, value in saved.items()}
    return [_state(value) for value in saved] if isinstance(saved, list) else saved


def test_a_synchronized_state_goes_on_on_any_number_of_ranks() -> None:
    (state, then, expected, message), _ = run_ranks(saved, 2, True)
    assert message == ""
    model = Small(seed=3, dtype=torch.float64)
    optimizer = dion(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.tensor(then[name], dtype=p.dtype).view(p.shape))
    optimizer.load_state_dict(_state(state))
    train(model, optimizer, range(5, 10), ranks=range(2))
    assert apart(plain(model), expected) < 1e-10


def test_a_state_of_one_rank_alone_is_refused_on_another() -> None:
    for rank, (*_, message) in enumerate(run_ranks(saved, 2, False)):
        assert message.startswith(
            f"Dion: the state has the momentum of rank {1 - rank} of 2 alone, this is rank {rank}"
        )
        assert "synchronize_for_checkpoint()" in message


def twice() -> str:
    model = DDP(Small(), find_unused_parameters=True)
    try:
        train(model, dion(model), range(1))
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_model_whose_gradients_ddp_averages_is_refused() -> None:
    for message in run_ranks(twice, 2):
        assert "Dion: the gradients of all ranks are equal before they were averaged" in message
