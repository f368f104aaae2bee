"""Routed sends each slot through the reducer that suits it; After changes the reducer once; Local leaves all alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.reducers.gradients import bind, equal, gradients, plain, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire
from thinwire.reducers import After, BoundReducer, Dense, Local, Quantized, Reducer, Routed
from thinwire.reducers.routed import MATRICES, Rule, matches

SLOTS = (
    Slot("embed.weight", (64, 64)),
    Slot("block.weight", (70, 60)),
    Slot("norm.weight", (8192,)),
    Slot("small.weight", (63, 65)),
    Slot("block.bias", (60,)),
    Slot("double.weight", (64, 64), torch.float64),
)
BF16, FP8 = Quantized("bf16"), Quantized("fp8_e5m2")


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (Slot("w", (64, 64)), True),
        (Slot("w", (2, 2, 32, 32)), True),
        (Slot("w", (64, 64), torch.bfloat16), True),
        (Slot("w", (63, 65)), False),
        (Slot("w", (1 << 20,)), False),
        (Slot("w", (64, 64), torch.float64), False),
        (Slot("w", (64, 64), torch.int64), False),
        (Slot("w", ()), False),
    ],
)
def test_by_default_matrices_of_at_least_4096_elements_match(slot: Slot, expected: bool) -> None:
    assert matches(MATRICES, slot) is expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("*.weight", {"embed.weight", "block.weight", "norm.weight", "small.weight", "double.weight"}),
        ("embed*", {"embed.weight"}),
        ("EMBED*", set()),
        ("[be]*.weight", {"embed.weight", "block.weight"}),
        (lambda slot: len(slot.shape) == 1, {"norm.weight", "block.bias"}),
        (MATRICES, {"embed.weight", "block.weight"}),
    ],
)
def test_rules_are_globs_or_predicates(rule: Rule, expected: set[str]) -> None:
    assert {slot.name for slot in SLOTS if matches(rule, slot)} == expected


def sent(named: Mapping[str, torch.Tensor], part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part[name] for name in named}


def routes() -> None:
    """Every slot gets the mean that its own reducer alone would give it."""
    wire = Wire()
    alone = {}
    for name, reducer in {"dense": Dense(), "bf16": BF16, "fp8": FP8}.items():
        some = [slot for slot in SLOTS if slot.dtype == torch.float32 or name == "dense"]
        named = gradients(some, 0, wire.rank)
        bound = reducer.bind(some, wire)
        bound.begin()
        for slot in some:
            bound.all_reduce({slot.name: named[slot.name]}).wait()
        alone[name] = plain(named)

    routed: list[tuple[Reducer, dict[str, str]]] = [
        (Routed(FP8), {"embed.weight": "fp8", "block.weight": "fp8"}),
        (Routed(FP8, "block*"), {"block.weight": "fp8", "block.bias": "fp8"}),
        (Routed(BF16, lambda slot: slot.numel == 60), {"block.bias": "bf16"}),
        (
            Routed(Dense(), "embed*", otherwise=Routed(BF16, "block.bias", otherwise=Routed(FP8))),
            {"block.bias": "bf16", "block.weight": "fp8"},
        ),
        (Routed(Routed(BF16, "embed*", otherwise=FP8)), {"embed.weight": "bf16", "block.weight": "fp8"}),
    ]
    for reducer, expected in routed:
        bound = reducer.bind(SLOTS, wire)
        named = gradients(SLOTS, 0, wire.rank)
        bound.begin()
        for future in [bound.all_reduce({name: named[name]}) for name in named]:
            future.wait()
        for name, mean in plain(named).items():
            assert equal({name: mean}, {name: alone[expected.get(name, "dense")][name]}), f"{reducer} {name}"
        assert bound.replicas == "identical"
    wire.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_slot_gets_the_mean_of_its_own_reducer(world_size: int) -> None:
    run_ranks(routes, world_size)


def dawdling() -> dict[str, Any]:
    """Calls that mix both routes, many outstanding, on ranks that dawdle differently."""
    import random
    import time

    naps = random.Random(dist.get_rank())
    slots = [Slot(f"{kind}{i}", (40, 40)) for i in range(12) for kind in ("w", "b")]
    bound, wire = bind(Routed(FP8, "w*"), slots)
    named = gradients(slots, 0, wire.rank)
    names = list(named)
    bound.begin()
    futures = []
    for start in range(0, len(names), 3):
        time.sleep(naps.random() * 0.01)
        futures.append(bound.all_reduce({name: named[name] for name in names[start : start + 3]}))
    for future in futures:
        future.wait()
    wire.close()
    return plain(named)


def test_mixed_calls_on_ranks_that_dawdle_differently_give_the_same_means() -> None:
    first, second, third = run_ranks(dawdling, 3)
    assert equal(first, second)
    assert equal(first, third)


def empty_calls() -> None:
    bound, wire = bind(Routed(FP8), [Slot("b", (3,))])
    bound.begin()
    bound.all_reduce({}).wait()
    bound.reduce_scatter({}, {}).wait()
    mean = reduce(bound, {"b": torch.tensor([1.0, 2.0, 3.0]) * (wire.rank + 1)})["b"]
    assert mean.tolist() == [1.5, 3.0, 4.5]
    for reducer in (Dense(), FP8, Local()):
        other = reducer.bind([], wire)
        other.begin()
        other.all_reduce({}).wait()
        other.reduce_scatter({}, {}).wait()
        assert reducer.sent_bytes([], 2) == 0
    wire.close()


def test_routes_without_slots_and_calls_without_tensors_do_nothing() -> None:
    run_ranks(empty_calls, 2)


class Counted:
    """Which phases a reduction used."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._before = wire, {}

    def phases(self) -> set[str]:
        now = {row.phase: row.calls for row in self._wire.ledger.rows()}
        used = {phase for phase, calls in now.items() if calls > self._before.get(phase, 0)}
        self._before: dict[str, int] = now
        return used


def warmed_up() -> list[list[str]]:
    """Phases by reduction, straight and resumed after the first."""
    slots = [Slot("w", (64, 64))]
    wire = Wire()
    config = After(2, Quantized("fp8_e4m3", feedback="error"))
    bound = config.bind(slots, wire)
    counted, found = Counted(wire), []
    states = []
    for number in range(4):
        mean = reduce(bound, gradients(slots, number, wire.rank))["w"]
        expected = (Dense() if number < 2 else Quantized("fp8_e4m3")).bind(slots, wire)
        found.append(sorted(counted.phases()))
        if number < 3:  # from the second lossy reduction on there is feedback
            assert torch.equal(mean, reduce(expected, gradients(slots, number, wire.rank))["w"])
            counted.phases()
        states.append(bound.state_dict())
    for resumed_after in (1, 2, 3):
        resumed = config.bind(slots, wire)
        resumed.load_state_dict(states[resumed_after - 1])
        counted.phases()
        for number in range(resumed_after, 4):
            reduce(resumed, gradients(slots, number, wire.rank))
            assert sorted(counted.phases()) == found[number]
        assert torch.equal(resumed.state_dict()["after.residual.w"], states[-1]["after.residual.w"])
    wire.close()
    return found


def test_after_changes_the_reducer_at_its_reduction_and_remembers_where_it_was() -> None:
    dense, lossy = ["dense"], ["gather", "scatter"]
    assert run_ranks(warmed_up, 2) == [[dense, dense, lossy, lossy]] * 2


def test_after_refuses_a_negative_count() -> None:
    with pytest.raises(ValueError, match="After needs a number of reductions of at least 0, got -1"):
        After(-1, FP8)


def local() -> int:
    bound, wire = bind(Local(), SLOTS)
    named = gradients(SLOTS, 0, wire.rank)
    before = plain(named)
    assert equal(plain(reduce(bound, named)), before)
    assert bound.replicas == "drift"
    assert Routed(Local(), "embed*").bind(SLOTS, wire).replicas == "drift"
    piece = {"block.bias": torch.zeros(20)}
    bound.reduce_scatter({"block.bias": named["block.bias"]}, piece).wait()
    assert torch.equal(piece["block.bias"], named["block.bias"][20 * wire.rank : 20 * wire.rank + 20])
    wire.close()
    return wire.ledger.sent_bytes()


def test_local_leaves_tensors_alone_and_sends_nothing() -> None:
    assert run_ranks(local, 3) == [0, 0, 0]


def memory(reducer: Reducer) -> tuple[int, int]:
    """What the reducer says it holds and the tensors that have come into the world since it was bound."""
    import gc

    def storages() -> dict[int, int]:
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return found

    wire = Wire()
    before = storages()
    bound: BoundReducer = reducer.bind(SLOTS, wire)
    for number in range(2):
        reduce(bound, gradients(SLOTS, number, wire.rank))
    held = {pointer: size for pointer, size in storages().items() if pointer not in before}
    wire.close()
    return bound.memory_bytes(), sum(held.values())


@pytest.mark.parametrize(
    "reducer", [Routed(Quantized("fp8_e4m3", feedback="error")), Routed(FP8), Dense(), Local()], ids=repr
)
def test_memory_bytes_is_what_the_tensors_take(reducer: Reducer) -> None:
    for said, measured in run_ranks(memory, 2, reducer):
        assert said <= measured <= said + 64  # a few scalars


def elements(feedback: Any) -> int:
    slots = [Slot("w", (512, 512))]
    bound, wire = bind(Quantized("fp8_e4m3", feedback=feedback), slots)
    bytes_at_rest = bound.memory_bytes()
    wire.close()
    return bytes_at_rest


@pytest.mark.parametrize(("feedback", "expected"), [("none", 4), ("error", 8)])
def test_memory_is_4_bytes_per_element_and_8_with_feedback(feedback: str, expected: int) -> None:
    assert run_ranks(elements, 2, feedback) == [expected * 512 * 512] * 2
