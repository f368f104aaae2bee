"""LowRank is PowerSGD: torch's own numbers, nothing lost, identical replicas, any shape and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.reducers.gradients import (
    UNEVEN,
    bind,
    equal,
    exact_mean,
    gradients,
    plain,
    reduce,
    residuals,
    sum_over_ranks,
)
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire, all_reduce_bytes
from thinwire.reducers import Dense, LowRank, Quantized, Reducer

WIDE = (Slot("a", (48, 96)), Slot("b", (48, 96)), Slot("c", (64, 3, 5)), Slot("bias", (7,)), Slot("thin", (2, 3)))
FP8 = Quantized("fp8_e4m3")


def as_torchs_hook(steps: int, rank: int) -> float:
    """The largest difference of a weight after some steps / the largest weight."""

    def model() -> DistributedDataParallel:
        torch.manual_seed(3)
        return DistributedDataParallel(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 50)))

    def train(ddp: DistributedDataParallel) -> list[Tensor]:
        optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            ddp(torch.randn(16, 40, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in ddp.parameters()]

    theirs = model()
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, random_seed=11)
    theirs.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    ours = model()
    link = tw.attach(ours, tw.After(2, LowRank(rank)))
    content = link.state_dict()
    # Its first right factors: drawn one after the other, under a seed that it draws for each bucket.
    torch.manual_seed(np.random.RandomState(11).randint(1_000_000_000))
    for name in ("2.weight", "0.weight"):  # as they lie in DDP's bucket
        content[f"after.same.right.{name}"] = torch.randn(content[f"after.same.right.{name}"].shape)
    link.load_state_dict(content)
    pairs = list(zip(train(theirs), train(ours)))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("rank", [1, 4])
def test_weights_are_those_of_torchs_hook(rank: int) -> None:
    assert max(run_ranks(as_torchs_hook, 2, 12, rank)) < 1e-5


def telescoped(reducer: Reducer, scale: float) -> float:
    """|sum of means + residuals - sum of exact means| / |sum of exact means|, the largest over slots."""
    bound, wire = bind(reducer, WIDE)
    bound.set_loss_scale(scale)
    sums = {slot.name: torch.zeros(slot.shape, dtype=torch.float64) for slot in WIDE}
    exact = {name: total.clone() for name, total in sums.items()}
    for step in range(12):
        named = {name: g * scale for name, g in gradients(WIDE, step, wire.rank).items()}
        for name, mean in reduce(bound, named).items():
            sums[name] += mean.double() / scale
        for slot in WIDE:
            exact[slot.name] += exact_mean(slot, step, wire.world_size)
    owed = residuals(bound)
    wire.close()
    for name, residual in owed.items():
        sums[name] += sum_over_ranks(residual)
    assert set(owed) == {"a", "b", "c"}
    return max(float((sums[name] - exact[name]).norm() / exact[name].norm()) for name in sums)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("factors", [Dense(), FP8], ids=["dense", "fp8"])
def test_means_and_residuals_are_the_exact_means(factors: Reducer, world_size: int) -> None:
    for scale in (1.0, 1024.0):
        assert max(run_ranks(telescoped, world_size, LowRank(3, factors=factors), scale)) < 1e-5


def reduced(reducer: Reducer, calls: int) -> dict[str, Any]:
    """What the third reduction gives, in so many calls that are under way together."""
    bound, wire = bind(reducer, WIDE)
    for step in range(3):
        named = gradients(WIDE, step, wire.rank)
        bound.begin()
        names = list(named)
        futures = [bound.all_reduce({name: named[name] for name in names[n::calls]}) for n in range(calls)]
        for future in futures:
            future.wait()
    wire.close()
    return plain(named)


@pytest.mark.parametrize("calls", [1, 3])
def test_all_ranks_hold_the_same_bits_also_with_many_calls_under_way(calls: int) -> None:
    for factors in (Dense(), FP8):
        found = run_ranks(reduced, 3, LowRank(3, factors=factors), calls)
        assert all(equal(found[0], other) for other in found[1:])


def test_buckets_change_a_mean_by_rounding_alone() -> None:
    (one, _), (three, _) = (run_ranks(reduced, 2, LowRank(3), calls) for calls in (1, 3))
    for name, mean in one.items():
        np.testing.assert_allclose(three[name], mean, rtol=0, atol=1e-5 * np.abs(mean).max())


def low_rank_means() -> float:
    """Gradients whose mean has rank 2, but not each: one step of power iteration finds it all."""
    bound, wire = bind(LowRank(2), WIDE)
    torch.manual_seed(0)
    common = torch.randn(48, 2) @ torch.randn(2, 96)
    own = torch.randn(48, 96) * (1 if wire.rank == 0 else -1)
    means = reduce(bound, {"a": common + own})
    wire.close()
    return float((means["a"] - common).norm() / common.norm())


def test_a_mean_of_low_rank_arrives_whole() -> None:
    assert max(run_ranks(low_rank_means, 2)) < 1e-5


def odd_values() -> dict[str, list[float]]:
    bound, wire = bind(LowRank(3), WIDE)
    means: dict[str, list[float]] = {}

    def step(name: str, value: Tensor) -> Tensor:
        result = reduce(bound, {"a": value})["a"]
        means[name] = [float(result.abs().max()), float(result.isfinite().all())]
        return result

    torch.manual_seed(1)
    some = torch.randn(48, 3) @ torch.randn(3, 96)
    step("zero", torch.zeros(48, 96))
    step("after zero", some.clone())
    means["error after zero"] = [float((step("again", some.clone()) - some).norm() / some.norm())]
    before = residuals(bound)["a"].clone()
    spoiled = some.clone()
    spoiled[3, 4] = float("inf") if wire.rank == 1 else 0.0
    step("inf", spoiled)
    means["kept"] = [float(torch.equal(residuals(bound)["a"], before))]
    step("tiny", some * 1e-30)
    step("huge", some * 1e18)
    wire.close()
    return means


def test_zeros_infinities_and_extreme_values_leave_a_reducer_that_works() -> None:
    for found in run_ranks(odd_values, 2):
        assert found["zero"] == [0.0, 1.0]
        assert found["error after zero"][0] < 1e-5  # zeros have not cost it its right factors
        assert found["inf"][1] == 0.0
        assert found["kept"] == [1.0]
        assert found["tiny"][1] == found["huge"][1] == 1.0


def pieces() -> float:
    rows = tuple(Slot(s.name, s.shape, unit=max(1, s.numel // s.shape[0])) for s in WIDE)
    whole, wire = bind(LowRank(3), rows)
    parts, wire2 = bind(LowRank(3), rows)
    worst = 0.0
    for step in range(3):
        means = reduce(whole, gradients(rows, step, wire.rank))
        own = {s.name: _part(torch.zeros(s.shape), wire) for s in rows}
        parts.begin()
        parts.reduce_scatter(gradients(rows, step, wire.rank), own).wait()
        worst = max(
            worst, *(float((own[n] - _part(m, wire)).abs().max()) for n, m in means.items() if own[n].numel())
        )
    for each in (wire, wire2):
        each.close()
    return worst


def _part(whole: Tensor, wire: Wire) -> Tensor:
    chunks = whole.chunk(wire.world_size)
    return chunks[wire.rank].clone() if wire.rank < len(chunks) else whole[:0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_reduce_scatter_leaves_the_pieces_of_the_same_means(world_size: int) -> None:
    assert max(run_ranks(pieces, world_size)) == 0.0


def ledger(reducer: LowRank) -> tuple[int, int]:
    bound, wire = bind(reducer, WIDE)
    before = _sent(wire)
    reduce(bound, gradients(WIDE, 0, wire.rank))
    wire.close()
    return _sent(wire) - before, reducer.sent_bytes(WIDE, wire.world_size)


def _sent(wire: Wire) -> int:
    return sum(row.sent_bytes for row in wire.ledger.rows() if row.phase != "control")


@pytest.mark.parametrize("world_size", [2, 4])
def test_bytes_are_those_of_the_formula(world_size: int) -> None:
    columns = 3 * (2 * (48 + 96) + 64 + 15)
    for sent, told in run_ranks(ledger, world_size, LowRank(3)):
        assert sent == told
        assert abs(sent - all_reduce_bytes(4 * (columns + 7 + 6), world_size)) <= 8
    for sent, told in run_ranks(ledger, world_size, LowRank(3, factors=FP8)):
        assert sent == told


def resumed_elsewhere(state: Mapping[str, Any] | None) -> dict[str, Any]:
    bound, wire = bind(LowRank(3), WIDE)
    if state is not None:
        arrays = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in state.items()}
        bound.load_state_dict(arrays)
    reduce(bound, gradients(WIDE, 0, 0))
    content = bound.state_dict()
    wire.close()
    return {key: value.numpy() if isinstance(value, Tensor) else value for key, value in content.items()}


def test_a_state_of_two_ranks_does_for_one_and_back() -> None:
    two = run_ranks(resumed_elsewhere, 2, None)[0]
    one = run_ranks(resumed_elsewhere, 1, two)[0]
    assert not any(value.any() for key, value in one.items() if key.startswith("residual."))  # it paid
    back = run_ranks(resumed_elsewhere, 2, one)[0]
    assert back["reductions"] == 3


def bfloat16() -> float:
    slots = (Slot("a", (48, 96), torch.bfloat16),)
    bound, wire = bind(LowRank(3), slots)
    total, exact = torch.zeros(48, 96, dtype=torch.float64), torch.zeros(48, 96, dtype=torch.float64)
    for step in range(5):
        total += reduce(bound, gradients(slots, step, wire.rank))["a"].double()
        exact += exact_mean(slots[0], step, wire.world_size)
    total += sum_over_ranks(residuals(bound)["a"])
    wire.close()
    return float((total - exact).norm() / exact.norm())


def test_what_a_narrow_dtype_rounds_away_is_owed_too() -> None:
    assert max(run_ranks(bfloat16, 2)) < 1e-5


def refused() -> list[str]:
    found = []
    for make in (
        lambda: LowRank(0),
        lambda: LowRank(2, feedback="some"),  # type: ignore[arg-type]
        lambda: LowRank(2, factors=Quantized("fp8_e4m3", feedback="error")).bind(UNEVEN, Wire()),
        lambda: LowRank(2).bind((Slot("ids", (9, 9), torch.int64),), Wire()),
    ):
        with pytest.raises(ValueError, match="LowRank") as error:
            make()
        found.append(str(error.value))
    return found


def test_what_it_cannot_do_is_said() -> None:
    for rank, feedback, factors, ids in run_ranks(refused, 2):
        assert rank == "LowRank rank must be a whole number of at least 1, got 0"
        assert feedback == "LowRank feedback must be 'none' or 'error', got 'some'"
        assert factors == "LowRank keeps what its factors leave out itself: use factors without feedback"
        assert "got torch.int64 for 'ids'" in ids
