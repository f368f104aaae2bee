"""Routed sends each slot through the reducer that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.reducers.gradients import bind, equal, gradients, plain, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire
from thinwire.reducers import Dense, Local, Quantized, Reducer, Routed
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
