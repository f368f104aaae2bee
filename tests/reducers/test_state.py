"""State is plain tensors by slot name; restored, a reducer goes on bit for bit, under any grouping of calls."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.reducers.gradients import UNEVEN, bind, equal, gradients, plain, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import CHUNK, Slot, Wire
from thinwire.formats import NVFP4
from thinwire.geometry import GIFT, Hadamard
from thinwire.reducers import After, BoundReducer, Dense, Local, LowRank, Quantized, Reducer, Routed

REDUCERS: tuple[Reducer, ...] = (
    Dense(),
    Local(),
    Quantized("fp8_e5m2"),
    Quantized("fp8_e4m3", feedback="error"),
    Quantized("bf16", feedback="error"),
    Routed(
        Quantized("fp8_e5m2", feedback="error"),
        "*weight",
        otherwise=Routed(Quantized("bf16", feedback="error"), "o*"),
    ),
    After(3, Quantized("fp8_e5m2", feedback="error")),
    After(1, Routed(Quantized("fp8_e4m3_span", feedback="error"))),
    Quantized("nvfp4", feedback="error", geometry=GIFT(rank=8, sides="right")),
    Routed(Quantized("int4", feedback="error", geometry=GIFT(rank=4, sides="both", refresh_every=2))),
    Quantized("int4_span", feedback="error", geometry=Hadamard(32)),
    Quantized(NVFP4(rounding="stochastic")),
    LowRank(2),
    Routed(LowRank(2, factors=Quantized("fp8_e4m3"), warm_start=False)),
)


def steps(bound: BoundReducer, numbers: Sequence[int], rank: int) -> list[dict[str, Any]]:
    return [plain(reduce(bound, gradients(UNEVEN, number, rank))) for number in numbers]


def saved_and_restored(reducer: Reducer) -> None:
    wire = Wire()
    bound = reducer.bind(UNEVEN, wire)
    steps(bound, range(3), wire.rank)
    file = io.BytesIO()
    torch.save(bound.state_dict(), file)
    straight = steps(bound, range(3, 6), wire.rank)

    resumed = reducer.bind(UNEVEN, wire)
    steps(resumed, [99], wire.rank)  # what it held before must not matter
    file.seek(0)
    state = torch.load(file, weights_only=True)  # nothing in it is code
    resumed.load_state_dict(state)
    again = resumed.state_dict()
    assert again.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(again[key], value) if isinstance(value, torch.Tensor) else again[key] == value, key
    assert all(equal(a, b) for a, b in zip(straight, steps(resumed, range(3, 6), wire.rank)))
    wire.close()


def every_reducer() -> None:
    for reducer in REDUCERS:
        saved_and_restored(reducer)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_restored_reducer_goes_on_bit_for_bit(world_size: int) -> None:
    run_ranks(every_reducer, world_size)


def described(reducer: Reducer) -> dict[str, Any]:
    bound, wire = bind(reducer)
    steps(bound, range(2), wire.rank)
    state = bound.state_dict()
    wire.close()
    return {
        key: (value.dtype, tuple(value.shape), value.requires_grad) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_state_is_keyed_by_name_and_shaped_as_the_slots_without_padding(world_size: int) -> None:
    expected = {f"residual.{slot.name}": (torch.float32, slot.shape, False) for slot in UNEVEN}
    chunk = {"chunk": CHUNK} if world_size > 1 else {}
    for state in run_ranks(described, world_size, Quantized("fp8_e4m3", feedback="error")):
        assert state == {"format_version": 1, "reductions": 2, **chunk, **expected}


def test_without_feedback_only_numbers_are_state() -> None:
    for reducer in (Dense(), Local(), Quantized("fp8_e4m3")):
        chunk = {"chunk": CHUNK} if isinstance(reducer, Quantized) else {}
        assert run_ranks(described, 2, reducer) == [{"format_version": 1, "reductions": 2, **chunk}] * 2


NAMES = [slot.name for slot in UNEVEN]
GROUPINGS: dict[str, list[list[list[str]]]] = {
    "one by one": [[[name] for name in NAMES]] * 6,
    "all together": [[NAMES]] * 6,
    "reversed": [[NAMES[::-1]]] * 6,
    "regrouped midway": [[NAMES]] * 2 + [[NAMES[:3], NAMES[3:]]] * 2 + [[NAMES[4:], NAMES[1:4], NAMES[:1]]] * 2,
    "there and back": [[NAMES], [[name] for name in NAMES], [NAMES[:4], NAMES[4:]]] * 2,
}
SOME_SLOTS: dict[str, list[list[list[str]]]] = {
    "one by one": [[[name] for name in names] for names in (NAMES, NAMES[:1], NAMES, NAMES[1:3], NAMES)],
    "together": [[NAMES], [NAMES[:1]], [NAMES], [NAMES[1:3]], [NAMES]],
}
"""Reductions that leave some slots out, as do models with parameters that are not always used."""


def grouped(groupings: dict[str, list[list[list[str]]]]) -> None:
    wire = Wire()
    for config in (Quantized("fp8_e4m3", feedback="error"), Quantized("fp8_e5m2_span", feedback="error")):
        reference: list[dict[str, Any]] | None = None
        state: dict[str, Any] = {}
        for name, grouping in groupings.items():
            bound = config.bind(UNEVEN, wire)
            means = []
            for number, groups in enumerate(grouping):
                named = gradients(UNEVEN, number, wire.rank)
                bound.begin()
                futures = [bound.all_reduce({slot: named[slot] for slot in group}) for group in groups]
                for future in futures:
                    future.wait()
                means.append(plain(named))
            if reference is None:
                reference, state = means, plain_state(bound)
            assert all(equal(a, b) for a, b in zip(reference, means)), name
            assert equal(plain_state(bound), state), name
    wire.close()


def plain_state(bound: BoundReducer) -> dict[str, Any]:
    return plain({k: v for k, v in bound.state_dict().items() if isinstance(v, torch.Tensor)})


@pytest.mark.parametrize(("world_size", "groupings"), [(2, GROUPINGS), (3, GROUPINGS), (2, SOME_SLOTS)])
def test_means_and_state_do_not_depend_on_how_slots_are_grouped_into_calls(
    world_size: int, groupings: dict[str, list[list[list[str]]]]
) -> None:
    """DDP rebuilds its buckets after the first step; bucket sizes are a matter of speed alone."""
    run_ranks(grouped, world_size, groupings)


def restored_under_other_groups() -> None:
    wire = Wire()
    config = Quantized("fp8_e4m3", feedback="error")
    bound, resumed = config.bind(UNEVEN, wire), config.bind(UNEVEN, wire)
    steps(bound, range(3), wire.rank)
    resumed.load_state_dict(bound.state_dict())
    straight = steps(bound, [3], wire.rank)
    named = gradients(UNEVEN, 3, wire.rank)
    resumed.begin()
    for name in NAMES:
        resumed.all_reduce({name: named[name]}).wait()
    assert equal(straight[0], plain(named))
    wire.close()


def test_state_saved_under_one_grouping_is_restored_under_another() -> None:
    run_ranks(restored_under_other_groups, 2)


def misfits() -> None:
    slots = [Slot("w", (4, 3)), Slot("b", (3,))]
    wire = Wire()
    bound = Quantized("fp8_e4m3", feedback="error").bind(slots, wire)
    good = bound.state_dict()
    for change, sentence in [
        ({"format_version": 7}, "format_version 7, this version reads 1"),
        ({"residual.w": torch.zeros(3, 4)}, r"residual of 'w' has shape \(3, 4\), expected \(4, 3\)"),
        ({"residual.w": [0.0]}, "residual of 'w' is of type list, expected a tensor"),
        ({"reductions": None}, "None for its number of reductions"),
        ({"reductions": -1}, "-1 for its number of reductions"),
        ({"residual.stranger": torch.zeros(3)}, "a residual of 'stranger', which this reducer does not keep"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            bound.load_state_dict({**good, **change})
    with pytest.raises(ValueError, match="the reducer state has no residual of 'b'"):
        bound.load_state_dict({key: value for key, value in good.items() if key != "residual.b"})
    for other in (Quantized("fp8_e4m3"), Dense(), Local()):
        with pytest.raises(ValueError, match="a residual of 'w', which this reducer does not keep"):
            other.bind(slots, wire).load_state_dict(good)
    wire.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_that_does_not_fit_is_refused_by_name(world_size: int) -> None:
    run_ranks(misfits, world_size)


def in_other_coordinates() -> None:
    """A residual in the coordinates of one geometry is something else in those of another."""
    wire = Wire()
    slots = [Slot("w", (40, 40)), Slot("b", (3,))]
    geometries = (
        None,
        Hadamard(32),
        Hadamard(16),
        Hadamard(32, seed=1),
        GIFT(rank=15),
        GIFT(rank=31, sides="right"),  # of as many numbers as the one before
        GIFT(rank=15, power=1.0),
    )
    reducers = [Quantized("int4", feedback="error", geometry=geometry) for geometry in geometries]
    for saved in reducers:
        bound = saved.bind(slots, wire)
        for step in range(2):
            reduce(bound, gradients(slots, step, wire.rank))
        state = bound.state_dict()
        for other in reducers:
            if other is saved:
                other.bind(slots, wire).load_state_dict(state)
                continue
            with pytest.raises(ValueError, match="the reducer state is in coordinates of geometry"):
                other.bind(slots, wire).load_state_dict(state)
    elsewhere = {"power": 1, "refresh_every": 7, "decay": 0.1, "statistic": "gradient", "statistics_of": "ranks"}
    later = Quantized("int4", feedback="error", geometry=GIFT(rank=15, freeze_after=3, **elsewhere))
    later.bind(slots, wire).load_state_dict(state)
    wire.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_state_in_coordinates_of_another_geometry_is_refused(world_size: int) -> None:
    run_ranks(in_other_coordinates, world_size)


def averaged_parameters() -> None:
    """Leaves that require gradients may be averaged in grad mode; the reducer takes no part in autograd."""
    bound, wire = bind(Quantized("fp8_e4m3", feedback="error"), [Slot("w", (300,))])
    for _ in range(2):
        parameter = torch.nn.Parameter(torch.linspace(0, 1, 300) * (wire.rank + 1))
        (parameter * 2).sum().backward()
        reduce(bound, {"w": parameter})
        assert parameter.is_leaf
        assert parameter.grad_fn is None
    assert not bound.state_dict()["residual.w"].requires_grad
    wire.close()


def test_averaging_parameters_leaves_no_trace_in_autograd() -> None:
    run_ranks(averaged_parameters, 2)
