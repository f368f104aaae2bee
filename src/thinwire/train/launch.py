"""Start the workers of a job on this machine and turn how they end into an exit code.

torch's elastic launcher starts, watches and stops them (c10d rendezvous on a local port, no restarts). Workers
are forked from a fork server that has imported everything and computed nothing, so they start in a second.

A signal to this process is not passed to the workers one by one: it sets a byte that they share and carry in
the control all-reduce of their next step, so all of them checkpoint the same step. A second one kills them.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import elastic_launch

from thinwire.streams import Lasting, end_progress_bar
from thinwire.train import worker
from thinwire.train.config import ConfigError, TrainConfig, uses_cuda
from thinwire.train.local import local_launch, quiet_launcher, use_loopback
from thinwire.train.output import OutputError, resuming
from thinwire.train.stragglers import stragglers_killed

logger = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_GRACE = 5.0  # seconds in which workers may end by themselves once one of them has died
_PRELOAD = ["torch", "torch._dynamo", "thinwire.train.worker", "thinwire.train.warm"]


def launch(config: TrainConfig, out: Path, *, debug: bool = False) -> int:
    """Run the job in `config.workers` processes; the command's exit code."""
    if uses_cuda(config) and config.workers > (devices := torch.cuda.device_count()):
        raise ConfigError(
            f"workers: {config.workers} on a machine with {devices} CUDA devices; each needs its own, "
            "or set device to cpu"
        )
    port = free_port(config.port)
    use_loopback()
    quiet_launcher(logging.WARNING if debug else logging.CRITICAL)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    _start_fork_server()
    stdout = Lasting(sys.stdout)
    stdout.write(f"starting {config.workers} worker{'s' if config.workers > 1 else ''}\n")
    stdout.flush()
    life, held = context.Pipe(duplex=False)  # workers end when `held` closes, however this process ends
    ties = worker.Ties(context.RawValue("b", 0), context.RawArray("i", config.workers), life)
    forward = _ForwardSignals(ties.stop)
    with life, held, _scratch(out) as scratch:
        elastic = local_launch(
            config.workers,
            run_id=uuid.uuid4().hex,
            start_method="forkserver",
            logs=DefaultLogsSpecs(log_dir=str(scratch)),
            port=port,
            signals="SIGQUIT",  # the others are handled here
        )
        try:
            with forward, stragglers_killed(ties.pids, grace=_GRACE):
                elastic_launch(elastic, worker.launched)(config, out, ties, debug)
        except ChildFailedError as error:
            end_progress_bar(sys.stdout)  # of rank 0
            rank, failure = error.get_first_failure()
            ended = f"killed; {resuming(out)}" if forward.killed else describe(rank, failure)
            sys.stderr.write(f"thinwire train: {ended}\n")
            return 2 if failure.exitcode == 2 else 1
    return 0


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """Where the workers put their error files, in the directory of the run; a killed launcher left its own."""
    place = out / ".workers"
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise OutputError(f"out: cannot write in {out}: {error.strerror or error}") from error
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def describe(rank: int, failure: ProcessFailure) -> str:
    """One line: which rank ended, of what."""
    if failure.exitcode < 0:
        return f"rank {rank} was killed by {failure.signal_name()} (process {failure.pid}); all ranks have stopped"
    recorded: Any = failure.message  # what the worker wrote before it ended: "Kind: text"
    message = recorded["message"] if isinstance(recorded, dict) else recorded
    kind, _, text = " ".join(str(message).split()).partition(": ")
    if failure.exitcode == 2:
        return text  # the same on every rank
    if not text or "enable traceback" in kind:
        return (
            f"rank {rank} ended with exit code {failure.exitcode} (process {failure.pid}); all ranks have stopped"
        )
    return worker.from_rank(rank, text if kind in _PLAIN else f"{kind}: {text}")


_PLAIN = {kind.__name__ for kind in worker.EXPECTED_ERRORS}


def free_port(port: int) -> int:
    """The port for the rendezvous: the given one if nobody has it, any free one for 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            why = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise ConfigError(
                f"port: {port} {why} on this machine; choose another, or 0 for a free one"
            ) from error
        found: int = probe.getsockname()[1]
        return found


class _ForwardSignals:
    """While active, the first SIGTERM, SIGINT or SIGHUP asks the workers to stop, the second kills them."""

    def __init__(self, flag: Any) -> None:
        self.killed = False
        self._flag = flag
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        for number in _STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._flag.value:
            self.killed = True
            workers = multiprocessing.active_children()
            for process in workers:
                process.kill()
            if not workers:
                raise KeyboardInterrupt  # else torch's launcher sees how they ended and cleans up
        self._flag.value = 1


def _start_fork_server() -> None:
    """Deaf to the signals that ask a job to stop, as workers then are until they carry them as a flag: a terminal,
    `timeout` or systemd sends them to the whole process group, and the fork server must outlive its workers."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
