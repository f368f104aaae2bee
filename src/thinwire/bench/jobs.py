"""Training jobs of benchmarks: each is run once, and what it gave is kept in a file of its own."""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from thinwire.bench.methods import description
from thinwire.bench.network import Host
from thinwire.bench.processes import run_processes
from thinwire.train.config import ModelConfig, TrainConfig
from thinwire.train.data.samples import DataConfig

BASELINE = "ddp"
"""What every method is compared with."""
LEAST_STEPS = 10
"""Of a job that is timed: the first few do not count."""
STARTING_SECONDS = 300.0


@dataclass(frozen=True)
class Job:
    """What all ranks do."""

    method: str
    """As `methods.py` knows it."""
    seed: int
    steps: int
    horizon: int
    """Steps that the learning rate is planned for."""
    validate_every: int
    """0: never."""
    lr: float
    batch_size: int = TrainConfig.batch_size
    """Sequences per step over all ranks."""
    model: str = ModelConfig.name
    """A preset, or `char.NAME`."""
    sequence_length: int = DataConfig.sequence_length
    warmup_steps: int | None = None

    @property
    def name(self) -> str:
        """Tells apart whatever could make a difference: what a recipe is today, too."""
        size = f"batch{self.batch_size}-steps{self.steps}of{self.horizon}"
        return f"{self.method}-{size}-lr{self.lr:g}-seed{self.seed}-{fingerprint(self.method, repr(self))}"


def fingerprint(method: str, *more: str) -> str:
    """A short hash of how the method is configured in this version of thinwire, and of more."""
    parts = [version("thinwire"), description(method), *more]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Trained:
    """What a job gave."""

    step_seconds: float
    """Mean over the steps after the first few, validation left out; of the slowest rank."""
    sent_bytes: int
    """Per step, of the rank that sends most: by the interface's counter where there is one of its own, else by the
    ledger."""
    losses: list[tuple[int, float]]
    """(step, validation loss), nats per byte."""
    clock: list[float] = field(default_factory=list)
    """Seconds since the start after each step, validation left out; of the slowest rank."""


def run_job(job: Job, out: Path, network: str, ranks: int, hosts: Sequence[Host] | None = None) -> Trained:
    """What the job gave on a network of that name, from its file in `out` if it was run before.

    `hosts`: where its ranks run, each limited to one thread; None: right here. Raises RankFailed.
    """
    file = out / f"{job.name}-ranks{ranks}-{network}.json"
    if not file.exists():
        print(f"running {file.stem}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
            command = [sys.executable, "-m", "thinwire.bench.stepping", json.dumps(asdict(job)), f"{folder}/store"]
            commands = [host.command(command) for host in hosts] if hosts else [command] * ranks
            environments = [host.environment() for host in hosts] if hosts else [dict(os.environ)] * ranks
            settings = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            outputs = run_processes(
                commands,
                [{**env, **settings, "RANK": str(rank)} for rank, env in enumerate(environments)],
                timeout=STARTING_SECONDS + 60.0 * job.steps,
            )
        out.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(outputs[0])
        partial.replace(file)
    return Trained(**json.loads(file.read_text()))


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None where there is one."""
    return statistics.stdev(values) if len(values) > 1 else None


def plus_minus(spread: float | None) -> str:
    """ " ± 0.0012", as wide without a number."""
    return " " * 9 if spread is None else f" ± {spread:.4f}"
