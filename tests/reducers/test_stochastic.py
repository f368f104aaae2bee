"""Stochastic rounding in a reducer: right on average, with other draws in every reduction, rank and owner."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from tests.reducers.gradients import bind, equal, plain, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot
from thinwire.formats import BlockScaled
from thinwire.reducers import Quantized

SLOT = Slot("w", (64, 128))


def gradient(rank: int) -> torch.Tensor:
    return torch.randn(SLOT.shape, generator=torch.Generator().manual_seed(rank))


def averaged(rounding: Literal["nearest", "stochastic"]) -> tuple[float, float]:
    """The relative error of one mean, and of the average over 50 reductions of the same gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bound, wire = bind(Quantized(BlockScaled("int4", rounding=rounding)), [SLOT])
    exact = torch.stack([gradient(r) for r in range(world_size)]).mean(0)
    total = torch.zeros(SLOT.shape)
    errors = []
    for _ in range(50):
        mean = reduce(bound, {"w": gradient(rank)})["w"]
        errors.append(float((mean - exact).norm() / exact.norm()))
        total += mean
    wire.close()
    return errors[0], float((total / 50 - exact).norm() / exact.norm())


def test_the_average_over_reductions_is_the_exact_mean() -> None:
    for one, average in run_ranks(averaged, 3, "stochastic"):
        assert average < 1.2 * one / 50**0.5
    for one, average in run_ranks(averaged, 3, "nearest"):
        assert abs(average - one) < 1e-3 * one


def twice(seeds: tuple[int, int]) -> bool:
    """Whether two reducers with these seeds give the same means."""
    runs = []
    for seed in seeds:
        bound, wire = bind(Quantized(BlockScaled("int4", rounding="stochastic"), seed=seed), [SLOT])
        runs.append(plain(reduce(bound, {"w": gradient(dist.get_rank())})))
        wire.close()
    return equal(*runs)


def test_the_seed_decides_the_draws() -> None:
    assert run_ranks(twice, 2, (3, 3)) == [True, True]
    assert run_ranks(twice, 2, (3, 4)) == [False, False]
