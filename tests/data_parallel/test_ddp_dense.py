"""With Dense() a training run has the bits of plain DDP, and detach() gives plain DDP back."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import FP8, MANY_BUCKETS, bits, images, toy, train, trained
from tests.support.ranks import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "many buckets": {},
    "one bucket": {"bucket_cap_mb": 25},
    "bucket views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "search for unused parameters": {"find_unused_parameters": True},
}

IDENTICAL = [(world_size, "many buckets") for world_size in (1, 2, 4)] + [(3, options) for options in OPTIONS]


def _runs() -> dict[str, Any]:
    found: dict[str, Any] = {
        options: (trained(tw.Dense(), **OPTIONS[options]), trained(None, **OPTIONS[options]))
        for world_size, options in IDENTICAL
        if world_size == dist.get_world_size()
    }
    found["attached and detached"] = _attached_and_detached(), trained(None, steps=8)
    found["calls"] = _calls_per_step()
    found["large"] = [
        _large(r, t) for r, t in ((tw.Quantized("fp16"), torch.float32), (tw.Dense(), torch.float16))
    ]
    found["bfloat16"] = _rounded_once(tw.Dense()), _rounded_once(None)
    found["fp8"] = _identity_and_bytes(FP8)
    if dist.get_world_size() == 4:
        found["subgroups"] = _in_a_subgroup()
    return found


def _in_a_subgroup() -> tuple[str, str, str]:
    """Ranks 0 and 2, and ranks 1 and 3, train a model each: with Dense, plain, and with a lossy reducer."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    dense, plain, lossy = (trained(reducer, process_group=group) for reducer in (tw.Dense(), None, FP8))
    return dense, plain, lossy


def _attached_and_detached() -> str:
    """Dense, plain, Dense, plain: two steps each, the first attached before DDP rebuilds its buckets."""
    ddp = DDP(toy(), bucket_cap_mb=MANY_BUCKETS)
    optimizer = None
    for first in (0, 4):
        link = tw.attach(ddp, tw.Dense())
        optimizer = train(ddp, range(first, first + 2), optimizer=optimizer)
        link.detach()
        train(ddp, range(first + 2, first + 4), optimizer=optimizer)
    return bits(ddp.module)


def _calls_per_step() -> list[int]:
    ddp = DDP(toy(), bucket_cap_mb=MANY_BUCKETS)
    link = tw.attach(ddp, tw.Dense())
    counts = [0]
    for step in range(3):
        ddp(images(step)).square().mean().backward()
        counts.append(sum(row.calls for row in link.ledger.rows() if row.phase == "dense"))
    return [after - before for before, after in itertools.pairwise(counts)]


class Weight(nn.Module):
    """One parameter, whose gradient is the input."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def _large(reducer: tw.Dense | tw.Quantized, dtype: torch.dtype) -> float:
    """The mean of gradients that overflow in half precision when they are added before they are divided."""
    ddp = DDP(Weight(40, dtype))
    tw.attach(ddp, reducer)
    ddp(torch.full((40,), 6e4, dtype=dtype)).sum().backward()
    gradient = ddp.module.weight.grad
    return float((gradient.float() - 6e4).abs().max())


def _rounded_once(reducer: tw.Dense | None) -> float:
    """Of bfloat16 gradients, how many means are the exact one, rounded."""
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    ddp = DDP(Weight(5000, torch.bfloat16))
    if reducer is not None:
        tw.attach(ddp, reducer)
    ddp(gradient).sum().backward()
    exact = gradient.double()
    dist.all_reduce(exact)
    exact /= dist.get_world_size()
    return float((ddp.module.weight.grad == exact.bfloat16()).float().mean())


def _identity_and_bytes(reducer: tw.Quantized) -> tuple[bool, int]:
    """Whether a lossy reducer left gradients alone, and the bytes it sent."""
    ddp = DDP(toy())
    link = tw.attach(ddp, reducer)
    train(ddp, 3)
    return bits(ddp.module) == trained(None, steps=3), link.ledger.sent_bytes()


@functools.cache
def runs_on(world_size: int) -> list[dict[str, Any]]:
    return run_ranks(_runs, world_size, timeout=120)


@pytest.fixture(params=[1, 2, 3, 4], ids=lambda world_size: f"{world_size} ranks")
def runs(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return runs_on(request.param)


@pytest.mark.parametrize(("world_size", "options"), IDENTICAL)
def test_dense_trains_bit_for_bit_as_plain_ddp(world_size: int, options: str) -> None:
    for rank in runs_on(world_size):
        dense, plain = rank[options]
        assert dense == plain


def test_detach_gives_plain_ddp_back_and_a_link_can_be_attached_again(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        attached, plain = rank["attached and detached"]
        assert attached == plain


def test_the_toy_has_one_bucket_at_first_and_several_after_ddp_rebuilt_them(runs: list[dict[str, Any]]) -> None:
    assert all(rank["calls"] == ([1, 3, 3] if len(runs) > 1 else [0, 0, 0]) for rank in runs)


def test_gradients_near_the_largest_half_stay_finite(runs: list[dict[str, Any]]) -> None:
    spacing = 32.0
    assert all(error <= spacing for rank in runs for error in rank["large"])


def test_means_of_bfloat16_gradients_are_rounded_once_where_plain_ddp_rounds_every_sum(
    runs: list[dict[str, Any]],
) -> None:
    for rank in runs:
        dense, plain = rank["bfloat16"]
        assert dense > 0.98  # the rest are ties
        assert plain < 0.95 or len(runs) < 3


def test_a_lossy_reducer_on_one_rank_changes_and_sends_nothing(runs: list[dict[str, Any]]) -> None:
    for rank in runs:
        assert rank["fp8"] == (True, 0) if len(runs) == 1 else rank["fp8"][1] > 0


def test_a_ddp_model_of_some_ranks_averages_over_those() -> None:
    ranks = [rank["subgroups"] for rank in runs_on(4)]
    assert all(dense == plain != lossy for dense, plain, lossy in ranks)
    assert len({dense for dense, _, _ in ranks}) > 1
