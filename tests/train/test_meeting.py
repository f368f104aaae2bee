"""Ranks meet under a name of their own, whatever earlier attempts left in the store."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from thinwire.collectives import CollectiveError
from thinwire.train.meeting import meet

LONG, SHORT = timedelta(seconds=20), timedelta(seconds=0.3)


def attempt(
    store: dist.Store, ranks: list[int], world_size: int, timeout: timedelta = LONG
) -> list[str | Exception]:
    """What each of these ranks gets; the later ones come later."""

    def one(place: int) -> str | Exception:
        time.sleep(0.03 * place)
        try:
            return meet(store, ranks[place], world_size, timeout)
        except CollectiveError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, range(len(ranks))))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_all_ranks_get_one_token_and_every_attempt_another(order: list[int]) -> None:
    store = dist.HashStore()
    tokens = [attempt(store, order, 3) for _ in range(3)]
    assert all(isinstance(found[0], str) and len(set(found)) == 1 for found in tokens)
    assert len({found[0] for found in tokens}) == 3


def test_what_an_attempt_left_that_never_came_together_does_not_count() -> None:
    store = dist.HashStore()
    attempt(store, [0, 2], 3, SHORT)
    attempt(store, [1, 2], 3, SHORT)
    found = attempt(store, [2, 0, 1], 3)
    assert isinstance(found[0], str)
    assert len(set(found)) == 1


def test_a_rank_that_met_an_old_rank_0_waits_for_the_new_one() -> None:
    store = dist.HashStore()
    found: list[str] = []
    rank_1 = threading.Thread(target=lambda: found.append(meet(store, 1, 3, LONG)))
    rank_1.start()
    with pytest.raises(CollectiveError, match="no answer from rank 2"):
        meet(store, 0, 3, SHORT)  # it has answered rank 1, and ends
    assert not found
    others = attempt(store, [0, 2], 3)
    rank_1.join(20)
    assert others == found * 2


def test_who_did_not_come_is_named_by_all() -> None:
    store = dist.HashStore()
    found = attempt(store, [0, 1, 3], 4, SHORT)
    assert all("no answer from rank 2: was it started" in str(error) for error in found)
    (alone,) = attempt(dist.HashStore(), [1], 2, SHORT)
    assert "rank 1: the ranks could not be connected within 0.3 s; no answer from rank 0: " in str(alone)


def test_a_world_of_one_meets_itself() -> None:
    assert meet(dist.HashStore(), 0, 1, SHORT)
