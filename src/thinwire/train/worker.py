"""One rank's process, from its environment to its exit code. Started by `launch.py` or by torchrun.

An exception ends the process at once, without waiting for peers or background saves: gloo's peers notice the
closed connections. The launcher learns the cause from the error file of torch's elastic launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.elastic.multiprocessing.errors import get_error_handler
from torch.distributed.rendezvous import rendezvous

import thinwire as tw
from thinwire.collectives.failures import is_of_a_collective
from thinwire.train.checkpoint.checkpointer import CheckpointError
from thinwire.train.config import ConfigError, TrainConfig, uses_cuda
from thinwire.train.data.samples import DataError
from thinwire.train.loop import Outcome, TrainingError, train
from thinwire.train.meeting import meet
from thinwire.train.output import OutputError, choose_output
from thinwire.train.run import RanksDiffer
from thinwire.train.snapshots import was_restarted
from thinwire.usage import first_line, one_line

logger = logging.getLogger(__name__)

USAGE_ERRORS = (ConfigError, DataError, OutputError)  # exit code 2
EXPECTED_ERRORS = (CheckpointError, TrainingError, RanksDiffer, tw.CollectiveError, OSError)  # 1, in one line
_WAIT_FOR_THE_CAUSE = 2.0  # seconds that a victim stays, so that the launcher sees the dead rank first


class StopRequest:
    """Whether this run was asked to stop: by a signal to this process or by its launcher."""

    def __init__(self, flag: Any = None) -> None:
        self._flag = flag  # shared memory byte of the launcher
        self._signalled = False
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def __call__(self) -> bool:
        return self._signalled or bool(self._flag is not None and self._flag.value)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True


class Ties(NamedTuple):
    """What the workers of one machine share with the launcher."""

    stop: Any  # a byte in shared memory: not 0 once the launcher was asked to stop
    pids: Any  # a number per worker in shared memory: its process, 0 before it begins and once it has finished
    life: Connection  # the end of a pipe whose other end only the launcher holds


def launched(config: TrainConfig, out: Path, ties: Ties, debug: bool) -> str:
    """The entry of a worker that `launch.py` started. Returns what happened; on an error it never returns."""
    own = int(os.environ["LOCAL_RANK"])
    ties.pids[own] = os.getpid()
    _end_with(ties.life)
    start_logging()
    happened = _guarded(lambda: _run(config, out, StopRequest(ties.stop)), debug=debug)
    ties.pids[own] = 0
    return happened


def under_torchrun(config: TrainConfig, debug: bool) -> int:
    """Run as the worker that torchrun started: rank and addresses are in the environment."""
    start_logging()
    if was_restarted(config):
        config = replace(config, resume=True)
    _guarded(lambda: _run(config, None, StopRequest()), debug=debug, speak=True)
    return 0


def start_logging() -> None:
    """Warnings and errors of every rank go to stderr, a line each."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.WARNING, format=f"thinwire: rank {rank}: %(message)s", force=True)
    transformers.utils.logging.disable_progress_bar()


def from_rank(rank: int | str, text: str) -> str:
    """The text with the rank that it comes from, unless it says so itself."""
    return text if text.startswith(f"rank {rank}:") else f"rank {rank}: {text}"


def is_expected(error: BaseException) -> bool:
    """Whether one line says all there is to say: a known kind, or raised on purpose by thinwire itself."""
    if isinstance(error, USAGE_ERRORS + EXPECTED_ERRORS) or _is_of_a_peer(error):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(tw.__file__).parent)
    return isinstance(error, RuntimeError | ValueError) and bool(frames) and frames[-1].filename.startswith(own)


def _run(config: TrainConfig, out: Path | None, stop: StopRequest) -> str:
    device = _set_up_device(config)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    start_process_group(backend, timedelta(seconds=config.timeout))
    with _same_output(config) if out is None else nullcontext(out) as directory:
        outcome: Outcome = train(config, directory, device, stop=stop)
    dist.destroy_process_group()
    return "finished" if outcome.finished else f"stopped at step {outcome.step}"


def start_process_group(backend: str, timeout: timedelta) -> None:
    """Connect all ranks. Raises CollectiveError naming those that did not come in time."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    token = meet(store, rank, world_size, timeout)
    try:
        dist.init_process_group(
            backend, store=PrefixStore(token, store), rank=rank, world_size=world_size, timeout=timeout
        )
    except (RuntimeError, dist.DistError) as error:
        within = f"within {timeout.total_seconds():g} s"
        raise tw.CollectiveError(
            f"rank {rank}: the ranks could not be connected {within}: {first_line(error)}"
        ) from error


def _set_up_device(config: TrainConfig) -> torch.device:
    local_rank = int(os.environ["LOCAL_RANK"])
    workers_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // workers_here)
    torch.set_num_threads(threads)
    if not uses_cuda(config):
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(f"workers: {workers_here} on a machine with {torch.cuda.device_count()} CUDA devices")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def _same_output(config: TrainConfig) -> Iterator[Path]:
    """Rank 0 chooses the directory of the run and holds it; its error, if any, is everyone's."""
    with ExitStack() as held:
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [held.enter_context(choose_output(config))]
            except OutputError as error:
                answer = [error]
        dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], OutputError):
            raise answer[0]
        yield answer[0]


def _guarded(body: Callable[[], str], *, debug: bool, speak: bool = False) -> str:
    """Run a worker's body. Any exception is recorded for the launcher and ends the process."""
    try:
        return body()
    except BaseException as error:
        rank = os.environ.get("RANK", "0")
        get_error_handler().record_exception(error)
        if debug or not is_expected(error):
            traceback.print_exc()
        if speak and (rank == "0" or not isinstance(error, USAGE_ERRORS)):
            sys.stderr.write(f"thinwire train: {from_rank(rank, one_line(error))}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        if _is_of_a_peer(error):
            time.sleep(_WAIT_FOR_THE_CAUSE)
        os._exit(2 if isinstance(error, USAGE_ERRORS) else 1)


def _is_of_a_peer(error: BaseException) -> bool:
    """Whether communication failed, so that the cause may be another rank's end."""
    return isinstance(error, tw.CollectiveError) or is_of_a_collective(error)


def _end_with(life: Connection) -> None:
    """End this process when the launcher's end of the pipe closes, which even a SIGKILL of it does.

    A worker that outlived its launcher would meet the resumed run in the same directory.
    """

    def watch() -> None:
        life.poll(None)  # nothing is ever sent: only the end of the pipe is heard
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
