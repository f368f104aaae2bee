"""Processes that go on when one of them has died."""

from __future__ import annotations

import signal
import subprocess

from thinwire.train.stragglers import stragglers_killed


def test_a_process_that_cannot_end_is_killed_when_another_has_died() -> None:
    stopped, dead = (subprocess.Popen(["sleep", "600"]) for _ in range(2))
    stopped.send_signal(signal.SIGSTOP)
    with stragglers_killed([0, stopped.pid, dead.pid], grace=0.1):
        dead.kill()
        assert dead.wait() == -signal.SIGKILL  # and is reaped, as the fork server does it
        assert stopped.wait(timeout=60) == -signal.SIGKILL


def test_a_process_that_has_done_its_work_is_no_straggler_and_none_is_waited_for() -> None:
    with subprocess.Popen(["sleep", "600"]) as busy, subprocess.Popen(["true"]) as done:
        pids = [done.pid, busy.pid]
        pids[0] = 0
        done.wait()
        with stragglers_killed(pids, grace=0.0):
            assert busy.poll() is None
        assert busy.poll() is None
        busy.kill()
