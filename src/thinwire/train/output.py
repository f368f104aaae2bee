"""The directory of a run: a fresh one, or that of the run to continue. Two runs never share one.

OUT/config.toml  summary.json  metrics.jsonl  tensorboard/  checkpoints/  .lock
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinwire.train.checkpoint.manifest import checkpoints_in
from thinwire.train.config import ConfigError, TrainConfig
from thinwire.train.metrics import METRICS

logger = logging.getLogger(__name__)

CONFIG = "config.toml"
LOCK = ".lock"
_NO_LOCKS_HERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class OutputError(ConfigError):
    """The directory cannot be used; names `out` or `resume`."""


@contextmanager
def choose_output(config: TrainConfig) -> Iterator[Path]:
    """The directory of this run, created if it is a new one, and this process's alone while in the context.

    Enter it in one process of the run only, the one that all others end with.
    """
    out = _directory(config)
    with _held(out):
        if not config.resume and checkpoints_in(checkpoints(out)):
            raise OutputError(
                f"out: {out} holds a run already; --resume continues it, another --out starts a new one"
            )
        yield out


def started(out: Path) -> bool:
    """Whether a run has begun in this directory, even if it has no checkpoint yet."""
    try:
        return (out / METRICS).exists() or bool(checkpoints_in(checkpoints(out)))
    except OSError as error:
        raise OutputError(f"out: cannot read {out}: {error.strerror or error}") from error


def checkpoints(out: Path) -> Path:
    """Where the checkpoints of a run are."""
    return out / "checkpoints"


def resuming(out: Path) -> str:
    """How a run that ended early goes on, for messages."""
    return f"`{shlex.join(['thinwire', 'train', '--resume', '--out', str(out)])}` continues"


def _directory(config: TrainConfig) -> Path:
    out = config.out
    if config.resume:
        if out is None:
            raise OutputError("resume: needs --out DIR, the directory of the run to continue")
        if not started(out):
            raise OutputError(f"resume: there is no run in {out} to continue; start one without --resume")
        return out
    if out is None:
        return _first_free(Path("runs"), config.recipe)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"out: cannot make the directory {out}: {error.strerror or error}") from error
    return out


def _first_free(parent: Path, name: str) -> Path:
    """Make the first of parent/name-1, parent/name-2, ... that is not there."""
    number = 1
    while True:
        candidate = parent / f"{name}-{number}"
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
        except OSError as error:
            raise OutputError(f"out: cannot make the directory {candidate}: {error.strerror or error}") from error


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """Hold OUT/.lock, or refuse and name the process that holds it.

    The lock is the open file's: the system frees it with the last process that has it open. Python's files are
    closed on exec, so neither the fork server nor its workers are among those, and a SIGKILL of this one frees it.
    """
    try:
        descriptor = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OutputError(f"out: cannot write in {out}: {error.strerror or error}") from error
    try:
        _lock(descriptor, out)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, out: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 400, 0).decode(errors="replace") or "another process"
        raise OutputError(f"out: {out} is in use by {holder}; wait for it, or choose another --out") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise OutputError(f"out: cannot write in {out}: {error.strerror or error}") from error
        logger.warning("%s has no file locks (%s): a second run in it would not be noticed", out, error.strerror)
