"""memory_bytes is measured, not stated."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from tests.reducers.gradients import bind, gradients, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire
from thinwire.reducers import Dense, Local, Quantized, Reducer, Routed

SLOTS = (Slot("embed.weight", (64, 64)), Slot("block.weight", (70, 60)), Slot("block.bias", (60,)))
FP8 = Quantized("fp8_e5m2")
SCALARS = 64
"""Bytes of a few numbers that nobody counts."""


def memory(reducer: Reducer) -> tuple[int, int]:
    """What the reducer says it holds and the tensors that have come into the world since it was bound."""

    def storages() -> dict[int, int]:
        gc.collect()
        found = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return found

    def new_bytes() -> int:
        return sum(nbytes for start, nbytes in storages().items() if start not in before)

    wire = Wire()
    before = storages()
    bound = reducer.bind(SLOTS, wire)
    for number in range(2):
        reduce(bound, gradients(SLOTS, number, wire.rank))
    deadline = time.monotonic() + 5
    while (held := new_bytes()) > bound.memory_bytes() + SCALARS:
        if time.monotonic() > deadline:  # until then the worker may be about to let go of the last call
            break
        time.sleep(0.02)
    wire.close()
    return bound.memory_bytes(), held


@pytest.mark.parametrize(
    "reducer",
    [
        Quantized("fp8_e4m3", feedback="error"),
        Routed(Quantized("fp8_e4m3", feedback="error")),
        Routed(FP8),
        Dense(),
        Local(),
    ],
    ids=repr,
)
def test_memory_bytes_is_what_the_tensors_take(reducer: Reducer) -> None:
    for said, measured in run_ranks(memory, 2, reducer):
        assert said <= measured <= said + SCALARS


def elements(feedback: Any) -> int:
    slots = [Slot("w", (512, 512))]
    bound, wire = bind(Quantized("fp8_e4m3", feedback=feedback), slots)
    bytes_at_rest = bound.memory_bytes()
    wire.close()
    return bytes_at_rest


@pytest.mark.parametrize(("feedback", "expected"), [("none", 4), ("error", 8)])
def test_memory_is_4_bytes_per_element_and_8_with_feedback(feedback: str, expected: int) -> None:
    assert run_ranks(elements, 2, feedback) == [expected * 512 * 512] * 2
