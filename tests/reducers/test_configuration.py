"""Reducers as configuration: frozen values that can be printed, compared and shared."""

from __future__ import annotations

import dataclasses

import pytest

from thinwire.collectives import Slot, Wire
from thinwire.reducers import After, BoundReducer, Dense, Local, Quantized, Reducer, Routed

REDUCERS: tuple[Reducer, ...] = (
    Dense(),
    Local(),
    Quantized("fp8_e5m2", feedback="error"),
    Routed(Quantized("bf16"), "embed*", otherwise=Local()),
    After(100, Quantized("fp8_e4m3"), before=Quantized("bf16")),
)


@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda reducer: type(reducer).__name__)
def test_a_reducer_is_a_frozen_value(reducer: Reducer) -> None:
    assert isinstance(reducer, Reducer)
    assert dataclasses.replace(reducer) == reducer  # type: ignore[type-var]
    assert hash(dataclasses.replace(reducer)) == hash(reducer)  # type: ignore[type-var]
    assert eval(repr(reducer)) == reducer
    for field in dataclasses.fields(reducer):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(reducer, field.name, None)


def test_one_configuration_may_be_bound_many_times_without_shared_state() -> None:
    slots = [Slot("w", (4, 4))]
    for reducer in REDUCERS:
        first, second = reducer.bind(slots, Wire()), reducer.bind(slots, Wire())
        first.begin()
        assert first.state_dict()["reductions"] == 1
        assert second.state_dict()["reductions"] == 0


@pytest.mark.parametrize("reducer", REDUCERS, ids=lambda reducer: type(reducer).__name__)
def test_bound_reducers_offer_the_whole_protocol(reducer: Reducer) -> None:
    bound = reducer.bind([Slot("w", (4, 4))], Wire())
    for name in vars(BoundReducer):
        assert name.startswith("_") or hasattr(bound, name), name
