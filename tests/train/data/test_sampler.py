"""Every sample once per epoch, whoever asks for it and however often the run was interrupted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ranks import run_ranks
from thinwire.train.data.sampler import GlobalSampler


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
def test_an_epoch_holds_every_sample_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(GlobalSampler(n, seed).take(epoch * n, n)) == list(range(n))


def test_the_order_differs_between_epochs_and_seeds() -> None:
    sampler = GlobalSampler(1000, seed=0)
    orders = [sampler.take(0, 1000), sampler.take(1000, 1000), GlobalSampler(1000, seed=1).take(0, 1000)]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert sum(a == b for a, b in zip(order, range(1000))) < 10
        assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(order)) < 15


def test_the_order_is_the_same_with_every_release() -> None:
    assert GlobalSampler(1000, seed=7).take(995, 10) == [188, 32, 702, 445, 318, 302, 690, 189, 901, 924]


def test_every_sample_comes_first_about_equally_often() -> None:
    n, epochs = 7, 7000
    order = GlobalSampler(n, seed=3).take(0, epochs * n)
    for place in (0, n - 1):
        counts = Counter(order[place::n])
        assert all(850 < counts[sample] < 1150 for sample in range(n))


def test_a_huge_data_set_needs_no_memory() -> None:
    n = 10**15
    ids = GlobalSampler(n, seed=0).take(3 * n - 2, 1000)
    assert len(set(ids)) == 1000
    assert all(0 <= sample < n for sample in ids)
    assert max(ids) > n // 2


def test_taking_in_pieces_is_taking_at_once() -> None:
    sampler = GlobalSampler(50, seed=0)
    pieces = [sample for start in range(0, 120, 8) for sample in sampler.take(start, 8)]
    assert pieces == sampler.take(0, 120)
    assert sampler.take(5, 0) == []


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        GlobalSampler(0, seed=0)
    with pytest.raises(ValueError, match="position -1"):
        GlobalSampler(3, seed=0).take(-1, 2)


def consume(position: int, steps: int, micro: int, accumulation: int) -> list[list[int]]:
    """What this rank trains on: per step, its ids. Runs on every rank."""
    import torch.distributed as dist

    sampler, rank, world_size = GlobalSampler(500, seed=1), dist.get_rank(), dist.get_world_size()
    taken = []
    for _ in range(steps):
        ids: list[int] = []
        for _ in range(accumulation):
            ids += sampler.take(position + rank * micro, micro)
            position += world_size * micro
        taken.append(ids)
    return taken


def test_ranks_and_resumes_neither_repeat_nor_drop_a_sample() -> None:
    """One epoch of 500: 5 steps on 2 ranks, then on 4, then on 1 with accumulation; batches of 40."""
    steps: list[list[int]] = []
    position = 0
    for world_size, micro, accumulation, count in ((2, 20, 1, 5), (4, 5, 2, 4), (1, 10, 4, 3)):
        ranks = run_ranks(consume, world_size, position, count, micro, accumulation)
        steps += [[sample for rank in ranks for sample in rank[step]] for step in range(count)]
        position += count * 40
    straight = GlobalSampler(500, seed=1)
    assert [sorted(step) for step in steps] == [sorted(straight.take(40 * i, 40)) for i in range(12)]
    seen = [sample for step in steps for sample in step]
    assert len(seen) == len(set(seen)) == 480
