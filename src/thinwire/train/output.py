"""The directory of a run: a fresh one, or that of the run to continue. Two runs never share one.

OUT/config.toml  summary.json  metrics.jsonl  tensorboard/  checkpoints/
"""

from __future__ import annotations

from pathlib import Path

from thinwire.train.checkpoint.manifest import checkpoints_in
from thinwire.train.config import ConfigError, TrainConfig
from thinwire.train.metrics import METRICS

CONFIG = "config.toml"


class OutputError(ConfigError):
    """The directory cannot be used; names `out` or `resume`."""


def choose_output(config: TrainConfig) -> Path:
    """The directory of this run, created if it is a new one. Call on one rank only."""
    if config.resume:
        if config.out is None:
            raise OutputError("resume: needs --out DIR, the directory of the run to continue")
        if not started(config.out):
            raise OutputError(f"resume: there is no run in {config.out} to continue; start one without --resume")
        return config.out
    if config.out is None:
        return _first_free(Path("runs"), config.recipe)
    out = config.out
    if checkpoints_in(checkpoints(out)):
        raise OutputError(f"out: {out} holds a run already; --resume continues it, another --out starts a new one")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"out: cannot make the directory {out}: {error.strerror or error}") from error
    return out


def started(out: Path) -> bool:
    """Whether a run has begun in this directory, even if it has no checkpoint yet."""
    return (out / METRICS).exists() or bool(checkpoints_in(checkpoints(out)))


def checkpoints(out: Path) -> Path:
    """Where the checkpoints of a run are."""
    return out / "checkpoints"


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
