"""The end of workers that go on when another has died.

Most end by themselves, as their connections break. One that is stopped, or far from its next collective, hears of
it too late, and torch's launcher would wait for it for half a minute.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress


@contextmanager
def stragglers_killed(pids: Sequence[int], *, grace: float) -> Iterator[None]:
    """While active, kill these processes `grace` seconds after the first of them has ended.

    `pids` may change meanwhile: 0 stands for a process that has not begun, or that has done its work and may end.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if not all(_alive(pid) for pid in pids if pid):
                if not over.wait(grace):
                    _kill(pids)
                return

    watcher = threading.Thread(target=watch, name="stragglers")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
