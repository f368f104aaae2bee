"""Workers meet in the store of their launcher before they connect.

When torchrun starts workers again, they find in the same store what those before them wrote: gloo would dial dead
addresses. How often a node was started again tells nothing, since nodes count for themselves. So the ranks agree
on a name under which nobody has written yet:

    1. rank r writes hello/r, a number of its own
    2. rank 0 answers every hello with that and a token of its own, in answer/r, until
    3. rank r, which has seen its own number there, has repeated the answer in heard/r
    4. once all have, rank 0 writes go/token

What a worker of an earlier attempt wrote holds another number or token, and counts for nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.collectives import CollectiveError

_POLL_SECONDS = 0.01
_PREFIX = "thinwire/meeting"


def meet(store: Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A token that all ranks of this attempt get, and no earlier attempt got.

    Raises CollectiveError naming the ranks that did not come within the timeout.
    """
    own = uuid.uuid4().hex
    return _gather(store, world_size, own, timeout) if rank == 0 else _join(store, rank, world_size, own, timeout)


def _gather(store: Store, world_size: int, token: str, timeout: timedelta) -> str:
    """On rank 0."""
    absent = set(range(1, world_size))

    def all_are_here() -> bool:
        for rank in sorted(absent):
            hello = _read(store, f"hello/{rank}")
            if hello:
                _write(store, f"answer/{rank}", hello + token)
                if _read(store, f"heard/{rank}") == hello + token:
                    absent.discard(rank)
        return not absent

    if not _becomes_true(all_are_here, timeout):
        raise _nobody_came(0, absent, timeout)
    _write(store, f"go/{token}", "go")
    return token


def _join(store: Store, rank: int, world_size: int, own: str, timeout: timedelta) -> str:
    """On any other rank."""
    _write(store, f"hello/{rank}", own)
    token = ""

    def rank_0_says_go() -> bool:
        nonlocal token
        answer = _read(store, f"answer/{rank}")
        if answer.startswith(own) and answer != own + token:
            token = answer.removeprefix(own)
            _write(store, f"heard/{rank}", answer)
        return bool(token) and bool(_read(store, f"go/{token}"))

    if not _becomes_true(rank_0_says_go, timeout):
        others = set(range(1, world_size)) - {rank}
        absent = {other for other in others if not _read(store, f"heard/{other}").endswith(token)}
        raise _nobody_came(rank, absent if token else {0}, timeout)
    return token


def _nobody_came(rank: int, absent: set[int], timeout: timedelta) -> CollectiveError:
    ranks = ", ".join(map(str, sorted(absent)))
    who = f"; no answer from rank {ranks}: was it started, and does it reach MASTER_ADDR?" if absent else ""
    seconds = timeout.total_seconds()
    return CollectiveError(f"rank {rank}: the ranks could not be connected within {seconds:g} s{who}")


def _becomes_true(condition: Callable[[], bool], timeout: timedelta) -> bool:
    deadline = time.monotonic() + timeout.total_seconds()
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _write(store: Store, key: str, value: str) -> None:
    store.set(f"{_PREFIX}/{key}", value)


def _read(store: Store, key: str) -> str:
    """What is there; empty if nothing is."""
    key = f"{_PREFIX}/{key}"
    found: bytes = store.get(key) if store.check([key]) else b""
    return found.decode()
