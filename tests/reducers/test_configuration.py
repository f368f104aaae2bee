"""Reducers as configuration: frozen values that can be printed, compared and shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from torch import nn

from thinwire import attach, recipes
from thinwire.collectives import Slot, Wire
from thinwire.formats import NVFP4
from thinwire.geometry import GIFT
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


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: Quantized("nvfp4", geometry="gift"), ValueError, r"such as tw\.GIFT\(\), got 'gift'"),
        (lambda: Quantized("nvfp4", geometry=GIFT), ValueError, "Quantized geometry must be None or a geometry"),
        (
            lambda: Quantized("nvfp4", geometry=Dense()),
            ValueError,
            "Quantized geometry must be None or a geometry",
        ),
        (lambda: Quantized(None), ValueError, "Quantized format must be a name or a Format, got None"),
        (lambda: Quantized(NVFP4), ValueError, "Quantized format must be a name or a Format"),
        (lambda: Routed(GIFT()), TypeError, "Routed needs a reducer such as"),
        (lambda: Routed(Quantized), TypeError, "Routed needs a reducer such as"),
        (lambda: After(3, Dense(), before=None), TypeError, "After before needs a reducer such as"),
        (lambda: attach(nn.Linear(2, 2), GIFT()), TypeError, "attach needs a reducer such as"),
        (
            lambda: attach(nn.Linear(2, 2), recipes.get("gift-nvfp4")),
            TypeError,
            r"Recipe\(.*: pass its \.reducer$",
        ),
    ],
)
def test_what_is_no_part_of_that_kind_is_refused_where_it_is_given(
    make: Callable[[], object], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        make()
