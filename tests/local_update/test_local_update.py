"""`local_update`: weights in the mean, stops and resumes, and what is refused."""

from __future__ import annotations

import copy
import os
import re
import signal
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import thinwire as tw
from tests.local_update.toys import Layers, apart, bits, train, weights
from tests.support.ranks import run_ranks

STEPS = 24
STREAMING = tw.StreamingDiLoCo(every=6, fragments=3, delay=1, merge=0.5, reducer=tw.Dense())


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def by_tokens() -> float:
    """How far the agreed weights are from the mean in which rank 1 counts three times as much."""
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(model, optimizer, tw.DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0))
    alone = []
    for r in range(2):
        own = Layers()
        own_optimizer = SGD(own.parameters(), lr=0.1)
        for step in range(3):
            train(own, own_optimizer, step, r)
        alone.append(weights(own))
    for step in range(3):
        train(model, optimizer, step, rank())
        sync.step(tokens=(100, 300)[rank()])
    sync.close()
    return apart(weights(model), {name: 0.25 * a + 0.75 * alone[1][name] for name, a in alone[0].items()})


def test_ranks_count_by_their_tokens() -> None:
    assert max(run_ranks(by_tokens, 2)) < 1e-6


def resumed(stop: int, method: tw.StreamingDiLoCo) -> tuple[list[str], list[str]]:
    """Bits after each step of a run, and of one that was stopped and built anew from what it had saved."""
    histories: list[list[str]] = []
    for stops in ((), (stop,)):
        model = Layers()
        optimizer = AdamW(model.parameters(), lr=0.01)
        sync = tw.local_update(model, optimizer, method)
        history = []
        for step in range(STEPS):
            if step in stops:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
                sync.close()
                model = Layers(seed=7)
                optimizer = AdamW(model.parameters(), lr=0.5)
                sync = tw.local_update(model, optimizer, method)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                sync.load_state_dict(saved[2])
            train(model, optimizer, step, rank())
            sync.step()
            history.append(bits(weights(model)))
        sync.finish()
        histories.append([*history, bits(weights(model))])
        sync.close()
    return histories[0], histories[1]


@pytest.mark.parametrize(
    ("stop", "reducer"),
    [(13, tw.Quantized("int4", feedback="error")), (14, tw.Dense()), (7, tw.Quantized("fp4_e3m0"))],
)
def test_a_run_goes_on_bit_for_bit_from_within_a_round(stop: int, reducer: Any) -> None:
    """After steps 7 and 13 a fragment is in flight."""
    for straight, stopped in run_ranks(resumed, 2, stop, replace(STREAMING, reducer=reducer)):
        assert straight == stopped


def test_a_mean_that_is_not_finite_moves_nobody(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(model, optimizer, tw.DiLoCo(every=2))
    before = weights(model)
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    sync.step()
    sync.step()
    assert bits(weights(model)) == bits(before)
    assert "is not finite: all ranks go back to its agreed weights" in caplog.text


def test_a_closed_local_update_takes_no_steps() -> None:
    model = Layers()
    sync = tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.DiLoCo(every=1))
    sync.close()
    with pytest.raises(RuntimeError, match="was closed; make a new one"):
        sync.step()


def test_bfloat16_parameters_are_agreed_on_in_float32() -> None:
    model = Layers().bfloat16()
    sync = tw.local_update(
        model, SGD(model.parameters(), lr=0.1), tw.DiLoCo(every=1, outer_lr=0.001, outer_momentum=0.0)
    )
    with torch.no_grad():
        start = model.head.weight.clone()
        for _ in range(100):  # each agreed step is far below what bfloat16 resolves
            model.head.weight += 0.25
            sync.step()
    moved = (model.head.weight.float() - start.float()).mean().item()
    assert 0.015 < moved < 0.035


def differing_methods() -> str:
    model = Layers()
    with pytest.raises(ValueError, match="ranks average by different methods") as raised:
        tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.DiLoCo(every=5 + rank()))
    return str(raised.value)


def test_ranks_with_different_methods_are_told_so() -> None:
    for said in run_ranks(differing_methods, 2):
        assert "every=5" in said
        assert "every=6" in said


def killed() -> None:
    """Rank 1 dies within a round. Rank 0 ends with what it is told, whether its weights had gone on, and whether
    they are those agreed before."""
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(model, optimizer, tw.DiLoCo(every=4), timeout=timedelta(seconds=20))
    agreed, apart_before = "", False
    for step in range(8):
        if step == 4:
            agreed = bits(weights(model))
        if step == 6 and rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, step, rank())
        apart_before = apart_before or (step > 4 and bits(weights(model)) != agreed)
        try:
            sync.step()
        except tw.CollectiveError as error:
            rolled_back = bits(weights(model)) == agreed
            raise AssertionError(f"{error}|{apart_before}|{rolled_back}") from None


def test_when_a_rank_dies_the_others_are_told_and_hold_the_weights_agreed_last() -> None:
    survivor = str(run_ranks(killed, 2, check=False)[0])
    assert re.search(
        r"AssertionError: rank 0: all_reduce of .*no answer from rank 1.*\|True\|True$", survivor, re.M
    )


def test_few_rounds_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers()
    tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.DiLoCo(every=100), total_steps=1000).close()
    assert "1000 steps are 10 rounds of 100" in caplog.text
    caplog.clear()
    tw.local_update(model, SGD(model.parameters(), lr=0.1), tw.DiLoCo(every=20), total_steps=1000).close()
    assert not caplog.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
        ({"every": 2.5}, "every must be a whole number of at least 1, got 2.5"),
        ({"every": 6, "delay": 0.5}, "delay must be 0 to every // fragments - 1, 0, got 0.5"),
        ({"outer": 0.7}, "outer must be a function of the tensors that it moves, got 0.7"),
        ({"every": 6, "fragments": 7}, "fragments must be 1 to every, 6, got 7"),
        ({"every": 6, "fragments": 3, "delay": 2}, "delay must be 0 to every // fragments - 1, 1, got 2"),
        ({"fragments": ("head.*",)}, "fragments must be a number of at least 1, or names and globs of each"),
        ({"fragments": 2.0}, "fragments must be a number of at least 1, or names and globs of each"),
        ({"merge": "x"}, "merge must be from 0 to 1, got 'x'"),
        ({"merge": 1.5}, "merge must be from 0 to 1, got 1.5"),
        ({"order": "random"}, "order must be 'strided' or 'sequential', got 'random'"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tw.StreamingDiLoCo(**arguments)


@pytest.mark.parametrize("method", [tw.Dense(), tw.DiLoCo, "diloco"])
def test_what_is_no_method_or_reducer_is_refused(method: Any) -> None:
    model = Layers()
    with pytest.raises(TypeError, match=r"local_update needs a method such as tw\.DiLoCo\(\), got"):
        tw.local_update(model, SGD(model.parameters(), lr=0.1), method)
    with pytest.raises(TypeError, match="a local-update method needs a reducer such as"):
        tw.DiLoCo(reducer=tw.GIFT())  # type: ignore[arg-type]


def left_alone() -> float:
    """How far a parameter that DDP is told to ignore is from where it was put on this rank."""
    model = Layers()
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
    ddp = DDP(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    sync = tw.local_update(ddp, optimizer, tw.DiLoCo(every=1))
    with torch.no_grad():
        model.head.weight.fill_(float(rank()))
    sync.step()
    sync.close()
    return float((model.head.weight - rank()).abs().max())


def test_parameters_that_ddp_ignores_are_not_averaged() -> None:
    assert run_ranks(left_alone, 2) == [0.0, 0.0]


def test_what_does_not_fit_a_model_is_refused_by_name() -> None:
    model, other = Layers(), Layers()
    inner = SGD(model.parameters(), lr=0.1)
    named = replace(STREAMING, fragments=(("layers.*",), ("tail.*",)))
    with pytest.raises(ValueError, match=r"no parameter is called 'tail\.\*'; there are layers\.0\.weight"):
        tw.local_update(model, inner, named)
    with pytest.raises(ValueError, match=r"'head\.weight' belongs to none"):
        tw.local_update(model, inner, replace(named, fragments=(("layers.0.*",), ("layers.[12].*",))))
    with pytest.raises(ValueError, match="7 of 7 parameters that are not the model's"):
        tw.local_update(model, SGD(other.parameters(), lr=0.1), tw.DiLoCo())
    frozen = Layers().requires_grad_(False)
    with pytest.raises(ValueError, match="the model has no parameters that take gradients"):
        tw.local_update(frozen, SGD(frozen.parameters(), lr=0.1), tw.DiLoCo())
    sync = tw.local_update(model, inner, tw.DiLoCo())
    sync.step()
    with pytest.raises(ValueError, match="tokens are given in some steps and not in others"):
        sync.step(tokens=5)
    state = sync.state_dict()
    with pytest.raises(ValueError, match=r"no 'anchor\.head\.weight' of shape \(5, 16\)"):
        sync.load_state_dict({k: v for k, v in state.items() if k != "anchor.head.weight"})
    with pytest.raises(ValueError, match=r"'method': 'DiLoCo', .* expected .*'method': 'StreamingDiLoCo'"):
        tw.local_update(model, inner, STREAMING).load_state_dict(state)
    with pytest.raises(ValueError, match="the local-update state has fragments"):
        sync.load_state_dict({**state, "fragments": [["head.weight"]]})


def test_a_state_without_its_outer_momentum_or_of_another_outer_optimizer_is_refused_and_nothing_changed() -> None:
    model = Layers()
    inner = AdamW(model.parameters(), lr=0.01)
    method = tw.DiLoCo(every=2)
    sync = tw.local_update(model, inner, method)
    for step in range(2):
        train(model, inner, step, 0)
        sync.step()
    state = sync.state_dict()
    for step in range(2, 4):
        train(model, inner, step, 0)
        sync.step()
    after = bits({k: v for k, v in sync.state_dict().items() if isinstance(v, Tensor)})
    key = "outer.head.weight.momentum_buffer"
    with pytest.raises(ValueError, match=f"has no '{key}' of the outer optimizer"):
        sync.load_state_dict({k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match="outer_class 'Adam', expected 'SGD'"):
        sync.load_state_dict({**state, "outer_class": "Adam"})
    assert bits({k: v for k, v in sync.state_dict().items() if isinstance(v, Tensor)}) == after
    sync.load_state_dict(state)


def test_plain_averages_are_not_warned_of_for_few_rounds(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers()
    for method in (tw.LocalSGD(every=100), tw.PostLocalSGD(every=100)):
        tw.local_update(model, SGD(model.parameters(), lr=0.1), method, total_steps=300).close()
    assert not caplog.text
