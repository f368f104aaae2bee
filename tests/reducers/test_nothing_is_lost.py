"""Error feedback keeps what encodings leave out, at both stages:

sum of applied means + sum over ranks of residuals = sum of the exact means, to float32 rounding.
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist

from tests.reducers.gradients import UNEVEN, bind, exact_mean, gradients, reduce, residuals, sum_over_ranks
from tests.support.ranks import run_ranks
from thinwire.collectives import Layout, Slot
from thinwire.formats import BlockScaled, Format, get
from thinwire.reducers import BoundReducer, Quantized, Routed

REDUCTIONS = 22
Stage = Literal["all_reduce", "reduce_scatter", "mixed"]
FORMATS: tuple[str | Format, ...] = (
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_e5m2_pow2",
    "fp8_e4m3_span",
    "bf16",
    BlockScaled("e5m2", block=48),
)
LOSS_SCALES = (1.0, 1024.0, 65536.0, 2.0**-3, 3.7)


def scatter(
    bound: BoundReducer, named: dict[str, torch.Tensor], block: int, weight: float
) -> dict[str, torch.Tensor]:
    """reduce_scatter, and the pieces of all ranks put together again."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    places = Layout(UNEVEN, world_size, block).places
    pieces = {place.slot.name: torch.full((place.length(rank),), 7.0) for place in places}
    bound.begin()
    bound.reduce_scatter(named, pieces, weight=weight).wait()
    means = {}
    for place in places:
        mean = torch.zeros(place.slot.numel)
        start = rank * place.piece
        mean[start : start + place.length(rank)] = pieces[place.slot.name]
        dist.all_reduce(mean)
        means[place.slot.name] = mean.view(place.slot.shape)
    return means


def largest_errors(
    format: str | Format, stage: Stage, feedback: Literal["none", "error"] = "error"
) -> tuple[float, float]:
    """Over all slots, relative to the sum of the means' magnitudes: what is lost, and what the residuals hold."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = [1.0] * world_size
    bound, wire = bind(Quantized(format, feedback=feedback))
    exact = {slot.name: torch.zeros(slot.shape, dtype=torch.float64) for slot in UNEVEN}
    applied = {name: total.clone() for name, total in exact.items()}
    sizes = dict.fromkeys(exact, 0.0)
    for step in range(REDUCTIONS):
        loss_scale = LOSS_SCALES[step % len(LOSS_SCALES)]
        if step >= REDUCTIONS // 2:  # ranks that saw fewer tokens count less
            weights = [1.5 if r == 0 else (world_size - 1.5) / (world_size - 1) for r in range(world_size)]
        bound.set_loss_scale(loss_scale)
        named = {name: g * loss_scale for name, g in gradients(UNEVEN, step, rank).items()}
        if stage == "all_reduce" or (stage == "mixed" and step % 3):
            means = dict(reduce(bound, named, weight=weights[rank]))
        else:
            means = scatter(bound, named, get(format).block, weights[rank])
        for slot in UNEVEN:
            mean = exact_mean(slot, step, world_size, weights)
            exact[slot.name] += mean
            applied[slot.name] += means[slot.name].double() / loss_scale
            sizes[slot.name] += float(mean.abs().max()) if slot.numel else 0.0
    owed = residuals(bound)
    lost, kept = [0.0], [0.0]
    for slot in UNEVEN:
        if slot.numel:
            size = sizes[slot.name]
            left = sum_over_ranks(owed.get(slot.name, torch.zeros(slot.shape)))
            lost.append(float((exact[slot.name] - applied[slot.name] - left).abs().max() / size))
            kept.append(float(left.abs().max() / size))
    wire.close()
    return max(lost), max(kept)


def every_format(stage: Stage) -> dict[str, tuple[float, float]]:
    return {str(format): largest_errors(format, stage) for format in FORMATS}


@pytest.mark.parametrize(
    ("world_size", "stage"),
    [(2, "all_reduce"), (3, "all_reduce"), (4, "all_reduce"), (2, "reduce_scatter"), (3, "mixed")],
)
def test_means_and_residuals_add_up_to_the_exact_means(world_size: int, stage: Stage) -> None:
    """With uneven shapes, weights and changing loss scales."""
    for results in run_ranks(every_format, world_size, stage):
        for name, (lost, kept) in results.items():
            assert lost < 5e-7, name
            assert kept > 1e-5, f"{name} left nothing out: the identity says nothing"


def without_feedback() -> dict[str, tuple[float, float]]:
    return {str(format): largest_errors(format, "all_reduce", "none") for format in FORMATS}


def test_without_feedback_something_is_lost() -> None:
    """The check above is able to fail."""
    for results in run_ranks(without_feedback, 2):
        assert all(lost > 1e-4 for lost, _ in results.values())


SMALL = Slot("w", (1024,))


def constant_gradient(feedback: Literal["none", "error"]) -> tuple[float, float]:
    """Largest relative error of the sum over 40 reductions, of small and of large coordinates."""
    bound, wire = bind(Quantized("fp8_e4m3", feedback=feedback), [SMALL])
    gradient = torch.full((1024,), 1e-6)
    gradient[::128] = 1.0  # one in each block, a million times the others
    total = torch.zeros(1024)
    for _ in range(40):
        total += reduce(bound, {"w": gradient.clone()})["w"]
    error = (total / (40 * gradient) - 1).abs()
    large = torch.arange(1024) % 128 == 0
    wire.close()
    return float(error[~large].max()), float(error[large].max())


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_constant_gradients_small_coordinates_are_not_lost_with_feedback(world_size: int) -> None:
    """1e-6 lies below half of E4M3's smallest step in its block, 2.2e-6: each single encoding drops it."""
    for small, large in run_ranks(constant_gradient, world_size, "error"):
        assert small < 0.15
        assert large < 0.01
    for small, _ in run_ranks(constant_gradient, world_size, "none"):
        assert small == 1.0


def routed_identity() -> float:
    """The same through Routed, where small slots go through Dense."""
    bound, wire = bind(Routed(Quantized("fp8_e5m2", feedback="error")))
    exact = {slot.name: torch.zeros(slot.shape, dtype=torch.float64) for slot in UNEVEN}
    for step in range(5):
        means = reduce(bound, gradients(UNEVEN, step, wire.rank))
        for slot in UNEVEN:
            exact[slot.name] += exact_mean(slot, step, wire.world_size) - means[slot.name].double()
    state = bound.state_dict()
    errors = []
    for slot in UNEVEN:
        if slot.numel:
            left = state.get(f"matched.residual.{slot.name}", torch.zeros(slot.shape))
            errors.append(float((exact[slot.name] - sum_over_ranks(left)).abs().max()))
    wire.close()
    return max(errors)


def test_nothing_is_lost_through_routes() -> None:
    assert max(run_ranks(routed_identity, 2)) < 1e-3  # of gradients up to some thousands
