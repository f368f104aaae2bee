import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, run_ranks


def _sum() -> float:
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def _second_rank_raises() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no such luck")


def _second_rank_dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_talk_to_each_other() -> None:
    assert run_ranks(_sum, 3) == [6.0, 6.0, 6.0]


def test_an_exception_comes_back_with_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"rank 1: (.|\n)*no such luck"):
        run_ranks(_second_rank_raises, 2)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 1: died with exit code -9"):
        run_ranks(_second_rank_dies, 2)
