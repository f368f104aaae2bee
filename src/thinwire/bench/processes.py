"""Run one process per rank and wait for all of them; when one fails, the rest are stopped and it is named."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

POLL_SECONDS = 0.05
GRACE_SECONDS = 1.0  # after a failure: time for its peers to fail too, so that all are named


class RankFailed(RuntimeError):
    """A rank's process failed or took too long; the message holds the last line it wrote."""


def run_processes(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    *,
    timeout: float,
) -> list[str]:
    """Run `commands[r]` with `environments[r]` for every rank r at once; return what each wrote to stdout.

    No process outlives this call, whichever way it ends; on SIGTERM and SIGHUP by SystemExit.
    """
    with (
        signals_become_exceptions(),
        tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder,
        ExitStack() as stack,
    ):
        outputs = [Path(folder, f"{rank}.out") for rank in range(len(commands))]
        errors = [Path(folder, f"{rank}.err") for rank in range(len(commands))]
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_stop, processes)
        for command, environment, output, error in zip(commands, environments, outputs, errors):
            with output.open("wb") as stdout, error.open("wb") as stderr:
                processes.append(
                    subprocess.Popen(
                        command, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
                    )
                )
        _wait(processes, errors, timeout)
        return [output.read_text() for output in outputs]


def _wait(processes: Sequence[subprocess.Popen[bytes]], errors: Sequence[Path], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(GRACE_SECONDS)
            break
        if time.monotonic() > deadline:
            waiting = [str(rank) for rank, process in enumerate(processes) if process.poll() is None]
            raise RankFailed(f"rank {', '.join(waiting)} did not finish within {timeout:.0f} s")
        time.sleep(POLL_SECONDS)
    failed = {rank: process.poll() for rank, process in enumerate(processes) if process.poll()}
    if failed:
        lines = [f"rank {rank} (exit code {code}): {_last_line(errors[rank])}" for rank, code in failed.items()]
        raise RankFailed("; ".join(lines))


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "wrote nothing"


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
    for process in processes:
        process.wait()


@contextmanager
def signals_become_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process by an exception (as SIGINT does), so that `finally` blocks run."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = {
        number: signal.signal(number, _exit_on)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) == signal.SIG_DFL
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit_on(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
