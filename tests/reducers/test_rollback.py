"""Error memory is pending until the reduction is committed: at the next begin, or when the state is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.reducers.gradients import UNEVEN, bind, equal, gradients, plain, reduce, residuals
from tests.support.ranks import run_ranks
from thinwire.collectives import Layout, Wire
from thinwire.reducers import After, BoundReducer, Dense, Quantized, Reducer, Routed

FEEDBACK = Quantized("fp8_e4m3", feedback="error")
BIASES = Routed(FEEDBACK, "*weight")
"""Some slots through error feedback, the others through Dense."""


def owed(bound: BoundReducer) -> dict[str, Any]:
    """All residuals, under whatever prefix."""
    return plain({key: value for key, value in bound.state_dict().items() if "residual." in key})


def step(bound: BoundReducer, number: int, rank: int) -> dict[str, Any]:
    return plain(reduce(bound, gradients(UNEVEN, number, rank)))


def committed_when() -> None:
    bound, wire = bind(FEEDBACK)
    assert all(not value.any() for value in owed(bound).values())
    step(bound, 0, wire.rank)
    first = owed(bound)
    assert any(value.any() for value in first.values())
    assert equal(owed(bound), first)  # asking twice commits once
    bound.begin()
    assert equal(owed(bound), first)  # a reduction without calls leaves nothing behind
    step(bound, 1, wire.rank)
    assert not equal(owed(bound), first)

    other, wire2 = bind(FEEDBACK)
    step(other, 0, wire2.rank)
    other.begin()  # commits too
    assert equal(owed(other), first)
    for each in (wire, wire2):
        each.close()


def test_error_memory_is_committed_by_begin_and_by_state_dict_and_once() -> None:
    run_ranks(committed_when, 2)


def rolled_back(names: Sequence[str] | None) -> None:
    """After a rollback the next means are those of a reducer that never saw that reduction."""
    bound, wire = bind(FEEDBACK)
    never, wire2 = bind(FEEDBACK)
    step(bound, 0, wire.rank)
    step(never, 0, wire.rank)
    before = owed(bound)
    step(bound, 1, wire.rank)
    bound.rollback(names)
    after = owed(bound)
    for slot in UNEVEN:
        key = f"residual.{slot.name}"
        if names is None or slot.name in names:
            assert equal({key: after[key]}, {key: before[key]}), slot.name
        elif slot.numel > 1:
            assert not equal({key: after[key]}, {key: before[key]}), slot.name
    mine, theirs = step(bound, 2, wire.rank), step(never, 2, wire.rank)
    for name in mine:
        same = equal({name: mine[name]}, {name: theirs[name]})
        assert same or (names is not None and name not in names), name
    bound.rollback()
    bound.rollback()  # again changes nothing
    assert names is not None or equal(owed(bound), after)
    for each in (wire, wire2):
        each.close()


@pytest.mark.parametrize("names", [None, ["layers.0.weight", "odd"]], ids=["all", "by name"])
def test_a_rollback_forgets_the_last_reduction_of_these_slots(names: Sequence[str] | None) -> None:
    run_ranks(rolled_back, 2, names)


def spoiled(reducer: Reducer, bad: float, slot: str, scatter: bool) -> None:
    """One rank's bad value in one slot: all slots of that reduction are rolled back, on all ranks."""
    wire = Wire()
    for settled_by_state_dict in (True, False):
        spoil(reducer, wire, bad, slot, scatter, settled_by_state_dict)
    wire.close()


def spoil(reducer: Reducer, wire: Wire, bad: float, slot: str, scatter: bool, settled_by_state_dict: bool) -> None:
    bound, never = reducer.bind(UNEVEN, wire), reducer.bind(UNEVEN, wire)
    for each in (bound, never):
        step(each, 0, wire.rank)
    before = owed(bound)
    assert any(value.any() for value in before.values())

    named = gradients(UNEVEN, 1, wire.rank)
    if wire.rank == wire.world_size - 1:
        named[slot].view(-1)[-1] = bad
    bound.begin()
    if scatter:
        places = Layout(UNEVEN, wire.world_size, 128).places
        out = {place.slot.name: torch.zeros(place.length(wire.rank)) for place in places}
        bound.reduce_scatter(named, out).wait()
    else:
        groups = [[name] for name in named] if settled_by_state_dict else [list(named)]
        for group in groups:
            bound.all_reduce({name: named[name] for name in group}).wait()
        assert not named[slot].isfinite().all()
    assert not bound.finite()
    assert not settled_by_state_dict or equal(owed(bound), before)
    for number in (2, 3):
        assert equal(step(bound, number, wire.rank), step(never, number, wire.rank))
    assert bound.finite()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_non_finite_mean_rolls_the_whole_reduction_back(bad: float) -> None:
    run_ranks(spoiled, 2, FEEDBACK, bad, "odd", False)


def test_a_non_finite_piece_that_one_owner_sees_rolls_back_on_all_ranks() -> None:
    run_ranks(spoiled, 3, FEEDBACK, float("nan"), "odd", True)


@pytest.mark.parametrize("slot", ["odd", "layers.0.weight"])
def test_a_non_finite_mean_in_one_route_rolls_the_other_back(slot: str) -> None:
    """The caller throws the whole step away, whichever slot spoiled it."""
    run_ranks(spoiled, 2, BIASES, float("inf"), slot, False)


def test_a_warm_up_with_error_memory_is_refused_since_nobody_would_send_it() -> None:
    with pytest.raises(ValueError, match="After's `before` keeps error memory"):
        bind(After(1, Quantized("bf16"), before=BIASES))


def test_one_rank_and_dense_have_nothing_to_roll_back() -> None:
    for reducer in (FEEDBACK, Dense(), BIASES):
        bound, _ = bind(reducer)
        mean = step(bound, 0, 0)
        assert equal(mean, plain(gradients(UNEVEN, 0, 0)))
        bound.rollback()
        assert all(not value.any() for value in residuals(bound).values())
