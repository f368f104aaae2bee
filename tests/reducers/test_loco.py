"""LoCo: a moving average of what encodings leave out, kept in few bytes, that starts anew now and then.

e <- beta e + (1 - beta) (c - C(c))         sum of sent = sum of contributions - e / (1 - beta)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

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
from thinwire.collectives import Slot, Wire
from thinwire.reducers import LoCo, Quantized
from thinwire.reducers.feedback import Storage

BETA, STEPS = 0.8, 24
NAMES = [slot.name for slot in UNEVEN]
EXACT = LoCo(beta=BETA, reset=None, storage="float32")


def unaccounted(feedback: LoCo) -> dict[str, float]:
    """What is missing from the sum of means + owed / (1 - beta) since the last reset, relative to their sizes."""
    world_size = dist.get_world_size()
    bound, wire = bind(Quantized("int4", feedback=feedback))
    missing = {slot.name: torch.zeros(slot.shape, dtype=torch.float64) for slot in UNEVEN}
    sizes = dict.fromkeys(missing, 1e-30)
    held: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        means = reduce(bound, gradients(UNEVEN, step, dist.get_rank()))
        held = residuals(bound)
        for slot in UNEVEN:
            mean = exact_mean(slot, step, world_size)
            missing[slot.name] += mean - means[slot.name].double()
            sizes[slot.name] += float(mean.abs().max()) if slot.numel else 0.0
        for name in feedback.forgotten(NAMES, step + 1):
            assert not held[name].any()
            missing[name].zero_()
    owed = {name: sum_over_ranks(value) / (1 - feedback.beta) for name, value in held.items()}
    wire.close()
    return {
        name: float((missing[name] - owed[name]).abs().max() / sizes[name]) if owed[name].numel() else 0.0
        for name in NAMES
    }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "feedback",
    [EXACT, LoCo(beta=0.0, reset=None, storage="float32"), LoCo(beta=BETA, reset=7, storage="float32")],
    ids=["average", "classic", "with resets"],
)
def test_means_and_what_is_owed_add_up_to_the_exact_means(world_size: int, feedback: LoCo) -> None:
    """From the last reset on."""
    for found in run_ranks(unaccounted, world_size, feedback):
        assert max(found.values()) < 2e-6, found


@pytest.mark.parametrize(("storage", "least", "most"), [("bfloat16", 1e-6, 3e-3), ("int8", 1e-6, 1e-2)])
def test_narrow_storage_loses_its_rounding_errors_alone(storage: Storage, least: float, most: float) -> None:
    for found in run_ranks(unaccounted, 2, LoCo(beta=BETA, reset=None, storage=storage)):
        assert least < max(found.values()) < most


def runs(feedbacks: dict[str, Any]) -> dict[str, Any]:
    """Means of the last step, and residuals after the first and the last."""
    results = {}
    for key, feedback in feedbacks.items():
        bound, wire = bind(Quantized("int4", feedback=feedback))
        first: dict[str, Any] = {}
        for step in range(6):
            means = reduce(bound, gradients(UNEVEN, step, dist.get_rank()))
            first = first or plain(residuals(bound))
        results[key] = (plain(means), first, plain(residuals(bound)), bound.memory_bytes())
        wire.close()
    return results


def test_without_averaging_and_resets_it_is_error_feedback_bit_for_bit() -> None:
    classic = LoCo(beta=0.0, reset=None, storage="float32")
    for found in run_ranks(runs, 3, {"loco": classic, "error": "error"}):
        for own, other in zip(found["loco"][:3], found["error"][:3]):
            assert equal(own, other)


def test_the_memory_is_a_moving_average() -> None:
    for found in run_ranks(runs, 2, {"loco": EXACT, "error": "error"}):
        averaged, whole = found["loco"][1], found["error"][1]
        for name in NAMES:  # after one step from nothing: (1 - beta) of what was left out
            torch.testing.assert_close(torch.tensor(averaged[name]), torch.tensor(whole[name]) * (1 - BETA))


def test_int8_takes_a_byte_where_float32_takes_four() -> None:
    def memory(storage: Storage) -> int:
        reducer = Quantized("int4", feedback=LoCo(storage=storage))
        return run_ranks(memory_of, 2, reducer)[0]  # type: ignore[no-any-return]

    assert memory("float32") == 8 * 2**20
    assert memory("bfloat16") == 6 * 2**20
    assert memory("int8") == pytest.approx((5 + 4 / 128) * 2**20, rel=1e-4)


def memory_of(reducer: Quantized) -> int:
    bound, wire = bind(reducer, [Slot("w", (1024, 1024))])
    held = bound.memory_bytes()
    wire.close()
    return held


def resumed() -> tuple[dict[str, Any], dict[str, Any]]:
    """The last means of a run, and of one that was saved and loaded in the middle of a period."""
    reducer, rank = Quantized("int4", feedback=LoCo(reset=4)), dist.get_rank()
    straight, wire = bind(reducer)
    again, other = bind(reducer)
    for step in range(9):
        means = reduce(straight, gradients(UNEVEN, step, rank))
        if step == 5:
            again.load_state_dict(straight.state_dict())
        if step > 5:
            reloaded = reduce(again, gradients(UNEVEN, step, rank))
    wire.close()
    other.close()
    return plain(means), plain(reloaded)


def test_a_run_that_is_saved_within_a_period_goes_on_bit_for_bit() -> None:
    for straight, again in run_ranks(resumed, 2):
        assert equal(straight, again)


def test_slots_are_forgotten_at_even_distances_or_all_at_once() -> None:
    names = ["a", "b", "c"]
    staggered, together = LoCo(reset=6), LoCo(reset=6, stagger=False)
    assert [staggered.forgotten(names, step) for step in range(1, 7)] == [[], ["c"], [], ["b"], [], ["a"]]
    assert [together.forgotten(names, step) for step in range(1, 7)] == [[], [], [], [], [], names]
    assert all(sum(name in LoCo(reset=2).forgotten(names, step) for step in (1, 2)) == 1 for name in names)
    assert LoCo(reset=None).forgotten(names, 1024) == []


def test_one_rank_pays_back_what_was_owed() -> None:
    """A run that goes on alone: a residual e stands for e / (1 - beta)."""
    bound = Quantized("int4", feedback=tw.LoCo(beta=0.75)).bind([Slot("w", (4,))], Wire())
    bound.load_state_dict({**bound.state_dict(), "residual.w": torch.full((4,), 0.5)})
    assert torch.equal(bound.state_dict()["residual.w"], torch.full((4,), 0.5))
    assert torch.equal(reduce(bound, {"w": torch.ones(4)})["w"], torch.full((4,), 3.0))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta": 1.0}, "LoCo beta must be from 0 to less than 1, got 1.0"),
        ({"reset": 0}, "LoCo reset must be a number of reductions or None, got 0"),
        ({"storage": "int4"}, "LoCo storage must be one of float32, bfloat16, int8, got 'int4'"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LoCo(**settings)


def test_int8_memory_needs_blocks() -> None:
    with pytest.raises(ValueError, match="blocks of a multiple of 16, bf16 has 8: use storage='bfloat16'"):
        Quantized("bf16", feedback=LoCo())
    Quantized("bf16", feedback=LoCo(storage="bfloat16"))
