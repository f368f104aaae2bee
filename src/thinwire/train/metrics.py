"""What a run tells: a progress display, metrics.jsonl, TensorBoard events and summary.json. Rank 0 only.

`metrics.jsonl` has one line per logged step and never two for one step: a resumed run first drops the lines
after the step that it continues from.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import nn

from thinwire.geometry import Fidelity
from thinwire.streams import Lasting
from thinwire.train import files
from thinwire.train.config import LoggingConfig
from thinwire.train.parallel import whole

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class StepMetrics:
    """One logged step. `loss` is the mean over the tokens of all ranks in nats per token."""

    step: int  # completed steps, so the first is 1
    loss: float
    lr: float
    gradient_norm: float  # of the averaged gradient, before clipping
    sent_bytes: int  # by rank 0 in this step, control traffic apart
    step_seconds: float
    comm_seconds: float  # of this step that the backward pass waited for communication
    tokens_per_second: float  # of all ranks, since the previous line
    tokens: int  # so far
    skipped_steps: int  # so far
    val_loss: float | None = None  # nats per byte


@dataclass(frozen=True)
class Baseline:
    """What plain DDP or FSDP2 would send of gradients per rank and step, to compare with."""

    float32_bytes: float
    own_dtype: str  # bfloat16 under autocast, as if DDP had its bf16_compress_hook
    of_whom: str  # DDP, FSDP2

    @staticmethod
    def of(parameters: int, world_size: int, precision: str, parallel: str = "ddp") -> Baseline:
        """A reduce-scatter sends (W-1)/W elements for each parameter, a ring all-reduce twice as many."""
        scattered = 4 * (world_size - 1) / world_size * parameters
        if parallel == "fsdp":
            return Baseline(scattered, precision, "FSDP2")
        return Baseline(2 * scattered, precision, "DDP")

    def compared(self, sent_bytes: float) -> str:
        """ "0.83 MB/step, 3.97x less than DDP float32" """
        if not sent_bytes or not self.float32_bytes:
            return f"{_megabytes(sent_bytes)}/step"
        less = f"{self.float32_bytes / sent_bytes:.2f}x less than {self.of_whom} float32"
        if self.own_dtype != "float32":
            less += f", {self.float32_bytes / 2 / sent_bytes:.2f}x less than {self.of_whom} {self.own_dtype}"
        return f"{_megabytes(sent_bytes)}/step, {less}"


class RunLog:
    """Writes the files of a run and shows its progress."""

    def __init__(
        self, out: Path, config: LoggingConfig, baseline: Baseline, *, first_step: int, steps: int
    ) -> None:
        self._out, self._config, self._baseline, self._steps = out, config, baseline, steps
        keep_lines_until(out / METRICS, first_step)
        self._lines = (out / METRICS).open("a", encoding="utf-8")
        self._console = Console(file=cast(IO[str], Lasting(sys.stdout)), soft_wrap=True, highlight=False)
        self._events = _events(out / "tensorboard", first_step) if config.tensorboard else None
        self._measured: Mapping[str, Fidelity] = {}
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if config.progress and self._console.is_terminal:
            self._bar, self._task = _progress_bar(self._console, first_step, steps)

    def step(self, metrics: StepMetrics) -> None:
        """A logged step: a line in every place."""
        values = {key: _plain(value) for key, value in asdict(metrics).items()}
        if metrics.val_loss is None:
            del values["val_loss"]
        self._lines.write(json.dumps(values) + "\n")
        self._lines.flush()
        if self._events is not None:
            for key, value in values.items():
                if key != "step" and value is not None:
                    self._events.add_scalar(key, value, metrics.step)
        text = f"loss {metrics.loss:.3f}, {metrics.tokens_per_second:,.0f} tokens/s, "
        text += self._baseline.compared(metrics.sent_bytes)
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, text=text)
        elif self._config.progress:
            self._console.print(f"step {metrics.step}/{self._steps}: {text}")
        if metrics.val_loss is not None and self._config.progress:
            self.say(f"step {metrics.step}: validation loss {metrics.val_loss:.4f} nats/byte")

    def fidelity(self, step: int, measured: Mapping[str, Fidelity]) -> None:
        """What encoding leaves of each layer's gradient, to TensorBoard, whenever it was measured anew."""
        if self._events is None or measured == self._measured:
            return
        self._measured = dict(measured)
        for layer, values in measured.items():
            for key, value in asdict(values).items():
                self._events.add_scalar(f"fidelity_{key}/{layer}", value, step)

    def say(self, text: str) -> None:
        """A line for the person at the terminal. The console's markup would take `[...]` out of a path."""
        self._console.print(text, markup=False)

    def finish(self, summary: dict[str, Any], ddp_bytes: float) -> None:
        """The last word: summary.json, and what it says in short. `ddp_bytes`: plain DDP's, over the whole run."""
        write_json(self._out / SUMMARY, summary)
        steps = max(1, summary["steps"])
        whole_run = replace(self._baseline, float32_bytes=ddp_bytes / steps)
        self.say(
            f"done: validation loss {summary['val_loss']:.4f} nats/byte after {summary['steps']} steps and "
            f"{summary['tokens']:,} tokens in {summary['wall_seconds']:.0f} s; "
            f"sent {whole_run.compared(summary['sent_bytes_per_rank'] / steps)}; {self._out / SUMMARY}"
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._lines.close()
        if self._events is not None:
            self._events.close()


def keep_lines_until(path: Path, step: int) -> None:
    """Drop the lines of later steps (they are going to be replayed), and any that a kill or the disk spoiled."""
    if not path.exists():
        return
    kept = []
    for data in path.read_bytes().splitlines():
        try:
            line = data.decode()
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            logger.warning("%s: dropped a line that is not complete", path)
    files.replace(path, "".join(kept))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is either the old one or the whole new one."""
    files.replace(path, json.dumps(value, indent=2) + "\n")


def parameter_hash(model: nn.Module) -> str:
    """sha256 over the bytes of all parameters in the order of their names; a collective call for one in shards."""
    digest = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        flat = whole(parameter.detach()).cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def _events(directory: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(directory), purge_step=first_step + 1)


def _progress_bar(console: Console, first_step: int, steps: int) -> tuple[Progress, TaskID]:
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.fields[text]}"), console=console)
    bar.start()
    return bar, bar.add_task("train", total=steps, completed=first_step, text="")
