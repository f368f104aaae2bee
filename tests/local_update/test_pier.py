"""Pier: its schedules, its two phases, its groups and what it is equal to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
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
from thinwire.local_update.method import Moment
from thinwire.local_update.pier import SMOOTH_LR, SMOOTH_MOMENTUM, STEPPED_LR, STEPPED_MOMENTUM
from thinwire.local_update.schedule import value_at

STEPS, EVERY = 40, 4
PIER = tw.Pier(every=EVERY, groups=2)
NO_OUTER = replace(PIER, groups=1, outer_lr=((0.0, 1.0),), outer_momentum=((0.0, 0.0),))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# -- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("progress", "lr", "momentum"),
    [
        (0.0999, 0.0, 0.9),
        (0.10, 0.0, 0.99),
        (0.1499, 0.499, 0.99),
        (0.15, 0.5, 0.95),
        (0.1999, 0.999, 0.95),
        (0.20, 1.1, 0.9),
        (0.7999, 1.1, 0.9),
        (0.80, 0.9, 0.9),
        (1.0, 0.9, 0.9),
    ],
)
def test_the_stepped_schedules_are_those_of_the_authors_scripts(
    progress: float, lr: float, momentum: float
) -> None:
    assert value_at(STEPPED_LR, progress) == pytest.approx(lr, abs=1e-12)
    assert value_at(STEPPED_MOMENTUM, progress) == momentum


def test_the_smooth_schedules_have_the_same_ends_and_no_jumps() -> None:
    assert value_at(SMOOTH_LR, 0.2) == pytest.approx(value_at(SMOOTH_LR, 0.2 - 1e-9)) == pytest.approx(1.1)
    assert value_at(SMOOTH_LR, 0.6) == pytest.approx(1.0)
    assert value_at(SMOOTH_LR, 1.0) == pytest.approx(0.9)
    assert value_at(SMOOTH_MOMENTUM, 0.1) == 0.99
    assert value_at(SMOOTH_MOMENTUM, 0.55) == pytest.approx(0.945)
    assert value_at(SMOOTH_MOMENTUM, 1.0) == pytest.approx(0.9)


def test_the_last_round_of_the_warm_up_has_its_momentum_and_moves_nothing() -> None:
    plan = tw.Pier().plan(1000)
    assert plan.alike == 100
    assert plan.settings is not None
    assert plan.settings(Moment(0.1, 0.1, 0.1, alike=True)) == {"lr": 0.0, "momentum": 0.9}
    later = plan.settings(Moment(0.15, 0.1, 0.1, alike=False))
    assert later == {"lr": pytest.approx(0.5), "momentum": 0.95}


# -- what it is equal to -----------------------------------------------------------------------------------------


def run(method: Any, *, wrapped: bool, steps: int = STEPS, stops: Sequence[int] = ()) -> dict[str, Any]:
    """Train; this rank's weights after every step, the bytes of every step by scope, the outer momentum."""
    built = build(method, wrapped=wrapped)
    history, sent, momentum = [], [], []
    before: dict[str, int] = {}
    for step in range(steps):
        if step in stops:
            model, optimizer, sync, _ = built
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
            sync.close()
            built = build(method, wrapped=wrapped)
            for part, state in zip(built, saved):
                part.load_state_dict(state)
        model, optimizer, sync, module = built
        train(module, optimizer, step, rank())
        if sync.step():
            momentum.append({name: momentum_of(sync, name) for name in weights(model)})
        history.append(plain(weights(model)))
        now = {scope: sync.ledger.sent_bytes(scope=scope) for scope in ("world", "group", "between groups")}
        sent.append({scope: now[scope] - before.get(scope, 0) for scope in now})
        before = now
    sync.verify()
    with sync.agreed():
        agreed = plain(weights(model))
    memory = sync.memory_bytes()
    sync.finish()
    sync.close()
    return {
        "history": history,
        "sent": sent,
        "momentum": momentum,
        "agreed": agreed,
        "finished": plain(weights(model)),
        "memory": memory,
    }


def build(method: Any, *, wrapped: bool) -> tuple[Any, Any, Any, Any]:
    model = Layers()
    module = with_final_buckets(model) if wrapped else model
    optimizer = AdamW(model.parameters(), lr=0.01)
    return model, optimizer, tw.local_update(module, optimizer, method, total_steps=STEPS), module


def with_final_buckets(model: Layers) -> DDP:
    """DDP orders its buckets anew after the first backward pass, and more than two ranks add in their order."""
    module = DDP(model)
    loss(module, 0, rank()).backward()
    module.zero_grad()
    return module


def momentum_of(sync: Any, name: str) -> list[float] | None:
    buffer = sync.state_dict().get(f"outer.{name}.momentum_buffer")
    return None if buffer is None else buffer.tolist()


def ddp(steps: int = STEPS) -> list[dict[str, list[float]]]:
    model = Layers()
    module = with_final_buckets(model)
    optimizer = AdamW(model.parameters(), lr=0.01)
    history = []
    for step in range(steps):
        train(module, optimizer, step, rank())
        history.append(plain(weights(model)))
    return history


def several() -> dict[str, Any]:
    warm = replace(PIER, warmup=0.5)
    return {
        "ddp": ddp(),
        "warm": run(warm, wrapped=True),
        "warm bare": run(warm, wrapped=False),
        "one group": run(NO_OUTER, wrapped=True),
        "groups": run(PIER, wrapped=True),
        "groups bare": run(PIER, wrapped=False),
        "alone": run(replace(PIER, groups=None), wrapped=True),
        "shared": run(replace(PIER, shard_reference=True), wrapped=True),
        "offload": run(replace(PIER, offload=True), wrapped=True),
        "narrow": run(replace(PIER, reducer=tw.Quantized("fp8_e4m3")), wrapped=True),
        "stopped": run(PIER, wrapped=True, stops=(2, 14, 33)),
        "stopped shared": run(replace(PIER, shard_reference=True), wrapped=True, stops=(3, 19)),
        "stopped bare": run(PIER, wrapped=False, stops=(2, 15)),
        "smooth": run(replace(PIER, outer_lr=SMOOTH_LR, outer_momentum=SMOOTH_MOMENTUM), wrapped=True),
    }


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return run_ranks(several, 4, timeout=300.0)


def test_while_all_ranks_are_alike_it_is_ddp_bit_for_bit(four: list[dict[str, Any]]) -> None:
    """Identity 1: the weights; on a bare model the same means, made of one flat buffer."""
    for found in four:
        assert found["warm"]["history"][: STEPS // 2] == found["ddp"][: STEPS // 2]
        assert apart(found["warm bare"]["history"][19], found["ddp"][19]) < 1e-5


def test_the_warm_up_gathers_the_momentum_of_each_round(four: list[dict[str, Any]]) -> None:
    """Identity 1: after k rounds it is the sum over j of 0.9^(k-j) times what round j moved."""
    start = plain(weights(Layers()))
    for found in four:
        ends = [start, *found["ddp"][EVERY - 1 : STEPS // 2 : EVERY]]
        gathered = {name: torch.zeros_like(torch.tensor(value)) for name, value in start.items()}
        for index in range(len(ends) - 1):
            for name in gathered:
                moved = torch.tensor(ends[index][name]) - torch.tensor(ends[index + 1][name])
                gathered[name] = 0.9 * gathered[name] + moved
            assert apart(found["warm"]["momentum"][index], gathered) < 1e-6


def test_one_group_whose_outer_step_is_plain_is_ddp(four: list[dict[str, Any]]) -> None:
    """Identity 2, to the rounding of r - (r - w)."""
    for found in four:
        for step in range(STEPS):
            assert apart(found["one group"]["history"][step], found["ddp"][step]) < 2e-5


def by_hand(method: tw.Pier) -> dict[str, Tensor]:
    """Two groups of two in one process: gradients averaged by hand, torch's SGD for the outer step."""
    models = [Layers() for _ in range(2)]
    optimizers = [AdamW(model.parameters(), lr=0.01) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    outer = SGD(anchors, lr=1.0, momentum=0.9, nesterov=True)
    copies = [Layers() for _ in range(4)]
    for step in range(1, STEPS + 1):
        gradients = []
        for number, own in enumerate(copies):
            own.load_state_dict(models[number // 2].state_dict())
            own.zero_grad()
            loss(own, step - 1, number).backward()
            gradients.append([p.grad for p in own.parameters()])
        alike = step <= method.warmup * STEPS
        for group, (model, optimizer) in enumerate(zip(models, optimizers)):
            members = range(4) if alike else range(2 * group, 2 * group + 2)
            for index, parameter in enumerate(model.parameters()):
                parameter.grad = torch.stack([gradients[m][index] for m in members]).mean(0)  # type: ignore
            optimizer.step()
        if step % method.every:
            continue
        progress = step / STEPS
        settings = {
            "lr": 0.0 if alike else value_at(method.outer_lr, progress),
            "momentum": value_at(method.outer_momentum, 0.0 if alike else progress),
        }
        outer.param_groups[0].update(settings)
        for anchor, *parameters in zip(anchors, *(model.parameters() for model in models)):
            anchor.grad = torch.stack([anchor - p.detach() for p in parameters]).mean(0)
        outer.step()
        with torch.no_grad():
            for anchor, *parameters in zip(anchors, *(model.parameters() for model in models)):
                if alike:
                    anchor.copy_(parameters[0])
                for parameter in parameters:
                    parameter.copy_(anchor)
    return weights(models[0])


@pytest.mark.parametrize("kind", ["groups", "groups bare", "shared", "offload"])
def test_groups_schedules_and_momentum_are_those_of_the_method_written_out(
    four: list[dict[str, Any]], kind: str
) -> None:
    """Identity 3: torch's SGD on the mean pseudo-gradient, in one process."""
    expected = by_hand(PIER)
    for found in four:
        assert apart(found[kind]["agreed"], expected) < 5e-5


def test_replicas_agree_after_a_round_and_within_their_groups_always(four: list[dict[str, Any]]) -> None:
    for step in range(STEPS):
        for kind in ("groups", "shared", "narrow", "smooth"):
            now = [bits(found[kind]["history"][step]) for found in four]
            assert now[0] == now[1]
            assert now[2] == now[3]
            together = step < STEPS // 10 or (step + 1) % EVERY == 0
            assert (now[0] == now[2]) == together, (kind, step)
        alone = {bits(found["alone"]["history"][step]) for found in four}
        assert len(alone) == (1 if step < STEPS // 10 or (step + 1) % EVERY == 0 else 4)


def test_offloading_changes_no_bit(four: list[dict[str, Any]]) -> None:
    for found in four:
        assert found["offload"]["history"] == found["groups"]["history"]


def test_between_rounds_nothing_leaves_a_group_and_a_round_sends_two_thirds_of_what_ddp_does(
    four: list[dict[str, Any]],
) -> None:
    """Identity 5: n x 4 x 2 (D-1)/D bytes per round over all D ranks; shared, n/2 x 4 x 2 (m-1)/m of m groups."""
    n = 4 * sum(tensor.numel() for tensor in weights(Layers()).values())
    for found in four:
        for step in range(STEPS):
            sent, shared = found["groups"]["sent"][step], found["shared"]["sent"][step]
            ends_round = (step + 1) % EVERY == 0
            if step < STEPS // 10:
                assert sent["world"] == pytest.approx(1.5 * n, abs=16)  # gradients; the round sends nothing
                assert sent["group"] == 0
            else:
                assert sent["world"] == pytest.approx(1.5 * n if ends_round else 0, abs=16)
                assert sent["group"] == pytest.approx(n, abs=16)
                assert shared["world"] == 0
                assert shared["between groups"] == pytest.approx(n / 2 if ends_round else 0, abs=64)


def test_a_shared_reference_takes_half_the_memory_in_groups_of_two(four: list[dict[str, Any]]) -> None:
    n = 4 * sum(tensor.numel() for tensor in weights(Layers()).values())
    for found in four:
        assert found["groups"]["memory"] == 2 * n
        assert found["shared"]["memory"] == pytest.approx(n, rel=0.02)


@pytest.mark.parametrize(
    ("stopped", "straight"),
    [("stopped", "groups"), ("stopped shared", "shared"), ("stopped bare", "groups bare")],
)
def test_a_run_goes_on_bit_for_bit_in_either_phase(
    four: list[dict[str, Any]], stopped: str, straight: str
) -> None:
    for found in four:
        a, b = found[stopped], found[straight]
        first = next((step for step in range(STEPS) if a["history"][step] != b["history"][step]), None)
        assert first is None
        assert a["finished"] == b["finished"]


# -- alone, and what is refused ----------------------------------------------------------------------------------


def test_a_world_of_one_rank_sends_nothing() -> None:
    found = run(replace(PIER, groups=None), wrapped=False)
    assert all(not any(step.values()) for step in found["sent"])
    assert found["agreed"] == found["finished"]


def test_few_rounds_are_warned_of_and_the_length_of_the_run_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Pier's schedules are fractions of the run: pass total_steps"):
        tw.local_update(model, optimizer, tw.Pier())
    tw.local_update(model, optimizer, tw.Pier(every=50), total_steps=1000).close()
    assert "1000 steps are 20 rounds of 50" in caplog.text
    state = tw.local_update(model, optimizer, tw.Pier(every=5), total_steps=1000).state_dict()
    with pytest.raises(ValueError, match=r"'total_steps': 1000.*expected .*'total_steps': 900"):
        tw.local_update(model, optimizer, tw.Pier(every=5), total_steps=900).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"warmup": 1.5}, "warmup must be from 0 to less than 1, a fraction of the run, got 1.5"),
        ({"outer_lr": 0.7}, r"outer_lr must be stretches \(start, value\).*, got 0.7"),
        ({"outer_lr": ((0.5, 1.0), (0.1, 1.0))}, "outer_lr must be stretches"),
        ({"outer_momentum": ((0.0, 0.9, 0.8, "sine"),)}, "outer_momentum must be stretches"),
        ({"outer_momentum": ((0.0, 1.5),)}, "outer_momentum must have values of at least 0 and below 1, got"),
        ({"outer_lr": ((0.0, -1.0),)}, "outer_lr must have values of at least 0, got"),
        ({"warmup": "x"}, "warmup must be from 0 to less than 1, a fraction of the run, got 'x'"),
        ({"warmup": 0.05}, "warmup 0.05 ends before outer_lr starts, at 0.1 of the run: rounds in between"),
        ({"groups": 0}, "groups must be at least 1, got 0"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tw.Pier(**arguments)


def unequal_groups() -> str:
    model = Layers()
    with pytest.raises(ValueError, match="groups must divide the 2 ranks into equal parts, got 3") as raised:
        tw.local_update(DDP(model), SGD(model.parameters(), lr=0.1), replace(PIER, groups=3), total_steps=STEPS)
    return str(raised.value)


def test_groups_must_be_equal() -> None:
    run_ranks(unequal_groups, 2)
    model = Layers()
    shared = tw.Pier(shard_reference=True)
    with pytest.raises(ValueError, match="shares anchors among the ranks of a group: say how many groups"):
        tw.local_update(model, partial(SGD, lr=0.1)(model.parameters()), shared, total_steps=STEPS)


def without_tokens() -> list[str]:
    """Bits after a round in which no rank had a token, and after one in which ranks do not count by tokens."""
    method = tw.Pier(every=2, groups=1, shard_reference=True, warmup=0.0, outer_lr=((0.0, 0.7),))
    found = []
    for tokens in (0, None):
        model = Layers()
        optimizer = AdamW(model.parameters(), lr=0.01)
        sync = tw.local_update(model, optimizer, method, total_steps=100)
        for step in range(2):
            train(model, optimizer, step, rank())
            sync.step(tokens)
        found.append(bits(weights(model)))
        sync.close()
    return found


def test_where_no_rank_had_a_token_all_count_alike() -> None:
    for none, uncounted in run_ranks(without_tokens, 2):
        assert none == uncounted
