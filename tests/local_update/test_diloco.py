"""DiLoCo and Streaming DiLoCo: what they are equal to, what they send, and how they go on after a stop."""

from __future__ import annotations

import copy
import os
import re
import signal
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW

import thinwire as tw
from tests.local_update.toys import Layers, apart, bits, loss, plain, train, weights
from tests.support.ranks import run_ranks

STEPS = 24
STREAMING = tw.StreamingDiLoCo(every=6, fragments=3, delay=1, merge=0.5, reducer=tw.Dense())


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run(
    method: tw.DiLoCo | tw.StreamingDiLoCo, inner: str = "adamw", *, steps: int = STEPS, wrapped: bool = False
) -> dict[str, Any]:
    """Train; the bits of this rank's weights after every step, what was sent in each, and the last weights."""
    model = Layers(seed=rank())  # equal only because rank 0's are given to all
    module = DDP(model) if wrapped else model
    optimizer = SGD(model.parameters(), lr=0.1) if inner == "sgd" else AdamW(model.parameters(), lr=0.01)
    sync = tw.local_update(module, optimizer, method)
    history, sent, before = [], [], 0
    for step in range(steps):
        train(module, optimizer, step, rank())
        sync.step()
        history.append(bits(weights(model)))
        sent.append(sync.ledger.sent_bytes() - before)
        before = sync.ledger.sent_bytes()
    sync.verify()
    local = weights(model)
    with sync.agreed():
        agreed = plain(weights(model))
    assert bits(weights(model)) == bits(local)
    sync.finish()
    finished = plain(weights(model))
    sync.close()
    return {"history": history, "sent": sent, "agreed": agreed, "finished": finished, "fragments": sync.fragments}


def ddp_sgd() -> dict[str, list[float]]:
    model = Layers()
    module = DDP(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        train(module, optimizer, step, rank())
    return plain(weights(model))


def several() -> dict[str, Any]:
    """Many short runs on the same ranks."""
    average = tw.DiLoCo(every=1, outer_lr=1.0, outer_momentum=0.0)
    one = tw.StreamingDiLoCo(every=6, fragments=1, delay=0, merge=0.0, outer_lr=0.7, reducer=tw.Dense())
    return {
        "ddp": ddp_sgd(),
        "every step": run(average, "sgd"),
        "diloco": run(tw.DiLoCo(every=6)),
        "wrapped": run(tw.DiLoCo(every=6), wrapped=True),
        "one fragment": run(one),
        "streaming": run(STREAMING),
        "int8": run(tw.DiLoCo(every=6, reducer=tw.Quantized("int8", feedback="error"))),
        "e3m0": run(replace(STREAMING, reducer=tw.Quantized("fp4_e3m0"))),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(several, 2)


def test_averaging_after_every_step_of_sgd_is_data_parallel_sgd(two: list[dict[str, Any]]) -> None:
    """A mean of steps is the step along the mean gradient; with AdamW inside it is not."""
    for found in two:
        assert apart(found["every step"]["finished"], found["ddp"]) < 1e-6


def test_ranks_agree_after_a_round_and_go_their_own_ways_within_it(two: list[dict[str, Any]]) -> None:
    for kind in ("diloco", "wrapped", "int8"):
        a, b = (found[kind]["history"] for found in two)
        assert [x == y for x, y in zip(a, b)] == [(step + 1) % 6 == 0 for step in range(STEPS)], kind


def test_all_ranks_finish_with_the_same_weights_and_agree_before(two: list[dict[str, Any]]) -> None:
    for kind in ("diloco", "streaming", "int8", "e3m0"):
        for what in ("agreed", "finished"):
            assert bits(two[0][kind][what]) == bits(two[1][kind][what])


def test_a_ddp_model_is_trained_like_a_bare_one(two: list[dict[str, Any]]) -> None:
    assert [found["wrapped"]["history"] for found in two] == [found["diloco"]["history"] for found in two]


def test_streaming_with_one_fragment_no_delay_and_no_merge_is_diloco(two: list[dict[str, Any]]) -> None:
    assert [found["one fragment"]["history"] for found in two] == [found["diloco"]["history"] for found in two]


def test_a_fragment_is_sent_once_in_a_round_and_nothing_else(two: list[dict[str, Any]]) -> None:
    """In float32 two ranks send each number once: 4 bytes."""
    model = weights(Layers())
    for found in two:
        streaming, whole = found["streaming"], found["diloco"]
        size = [4 * sum(model[name].numel() for name in names) for names in streaming["fragments"]]
        assert sorted(name for names in streaming["fragments"] for name in names) == sorted(model)
        assert max(size) <= 1.1 * sum(size) / 3
        sent = streaming["sent"]  # after steps 1, 3 and 5 of a round, or on the way to the next one
        assert [a + b for a, b in zip(sent[::2], sent[1::2])] == size * (STEPS // 6)
        assert whole["sent"] == [0, 0, 0, 0, 0, sum(size)] * (STEPS // 6)


def test_narrow_formats_send_their_bytes(two: list[dict[str, Any]]) -> None:
    for found in two:
        dense = sum(found["diloco"]["sent"])
        assert sum(found["int8"]["sent"]) < 0.6 * dense  # pieces are padded to blocks of 128
        assert apart(found["int8"]["finished"], found["diloco"]["finished"]) < 0.02


# -- one rank: written out ---------------------------------------------------------------------------------------


def outer_by_hand(method: tw.DiLoCo, steps: int) -> dict[str, Tensor]:
    """Inner AdamW and torch's SGD on the weights of the round before."""
    model = Layers()
    optimizer = AdamW(model.parameters(), lr=0.01)
    anchors = [p.detach().clone() for p in model.parameters()]
    outer = SGD(anchors, lr=method.outer_lr, momentum=method.outer_momentum, nesterov=method.outer_momentum > 0)
    for step in range(1, steps + 1):
        train(model, optimizer, step - 1, 0)
        if step % method.every == 0:
            for anchor, parameter in zip(anchors, model.parameters()):
                anchor.grad = anchor - parameter.detach()
            outer.step()
            with torch.no_grad():
                for anchor, parameter in zip(anchors, model.parameters()):
                    parameter.copy_(anchor)
    return weights(model)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.9, 0.8), (0.5, 0.0)])
def test_the_outer_step_is_that_of_torchs_sgd_bit_for_bit(lr: float, momentum: float) -> None:
    """With momentum 0 and lr below 1, that is Lookahead."""
    method = tw.DiLoCo(every=4, outer_lr=lr, outer_momentum=momentum)
    assert bits(run(method)["agreed"]) == bits(outer_by_hand(method, STEPS))


def test_alone_with_a_step_of_one_it_is_the_inner_optimizer() -> None:
    plain, model = run(tw.DiLoCo(every=5, outer_lr=1.0, outer_momentum=0.0)), Layers()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        train(model, optimizer, step, 0)
    assert apart(plain["finished"], weights(model)) < 1e-5


def test_any_optimizer_may_be_the_outer_one_and_schedulers_count_rounds() -> None:
    model = Layers()
    inner = AdamW(model.parameters(), lr=0.01)
    sync = tw.local_update(model, inner, tw.DiLoCo(every=4, outer=partial(torch.optim.Adam, lr=0.1)))
    schedule = torch.optim.lr_scheduler.ExponentialLR(sync.outer, gamma=0.5)
    rounds = 0
    for step in range(10):
        train(model, inner, step, 0)
        if sync.step():
            schedule.step()
            rounds += 1
    assert rounds == 2
    assert sync.outer.param_groups[0]["lr"] == 0.025
    assert loss(model, 99, 0).item() < 10


# -- weights, stops, what is refused ---------------------------------------------------------------------------


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
    with pytest.raises(ValueError, match="the local-update state has fragments"):
        tw.local_update(model, inner, STREAMING).load_state_dict(state)


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
