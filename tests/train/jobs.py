"""Small training jobs for tests: a text of words, short sequences, the smallest preset."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thinwire.train import loop
from thinwire.train.config import CheckpointConfig, LoggingConfig, ModelConfig, OptimizerConfig, TrainConfig
from thinwire.train.data.samples import DataConfig
from thinwire.train.loop import Outcome, train

CPU = torch.device("cpu")


def write_text(directory: Path, files: int = 24, words: int = 120) -> Path:
    """Files of seeded words; a directory that `data.files` takes."""
    directory.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(7)
    vocabulary = ["thin", "wire", "gradient", "rank", "mean", "of", "the", "a", "sends", "byte", "\n"]
    for number in range(files):
        text = " ".join(chooser.choice(vocabulary) for _ in range(words + 7 * number))
        (directory / f"part-{number:02}.txt").write_text(text)
    return directory


def job(tmp_path: Path, **changes: Any) -> TrainConfig:
    """A job of six steps on that text; `changes` are top-level settings, `data_*` and others nested ones."""
    text = write_text(tmp_path / "text")
    config = TrainConfig(
        recipe="ddp",
        steps=6,
        batch_size=6,
        timeout=20.0,
        verify_every=2,
        validation_every=0,
        data=DataConfig(files=(str(text),), sequence_length=24, validation_fraction=0.2, validation_sequences=5),
        model=ModelConfig(),
        optimizer=OptimizerConfig(lr=1e-3),
        checkpoint=CheckpointConfig(every=0),
        logging=LoggingConfig(every=1, tensorboard=False, progress=False),
    )
    nested: dict[str, dict[str, Any]] = {}
    for key in list(changes):
        part, _, name = key.partition("_")
        if part in ("data", "model", "optimizer", "schedule", "checkpoint", "logging") and name:
            nested.setdefault(part, {})[name] = changes.pop(key)
    parts = {part: replace(getattr(config, part), **values) for part, values in nested.items()}
    return replace(config, **parts, **changes)


def lines(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run_job(config: TrainConfig, out: Path) -> dict[str, Any]:
    """Train in the process group that is up; the summary."""
    outcome = train(config, out, CPU)
    assert outcome.finished
    assert outcome.summary is not None
    return outcome.summary


def run_job_until(config: TrainConfig, out: Path, step: int, asked: int) -> Outcome:
    """Train, and be asked to stop before this step on rank `asked` only."""
    import torch.distributed as dist

    calls = iter(range(10**6))
    return train(config, out, CPU, stop=lambda: dist.get_rank() == asked and next(calls) >= step)


def listen(function: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a function returns, and what this rank said meanwhile."""
    with redirect_stdout(io.StringIO()) as said:
        return function(*args), said.getvalue()


def run_job_with_bad_loss(
    config: TrainConfig, out: Path, rank: int, steps: tuple[int, ...], factor: float = float("nan")
) -> dict[str, Any]:
    """Train with the loss times `factor` on one rank in these steps (from 0, one micro-batch each)."""
    import torch.distributed as dist

    original, calls = loop.summed_loss, iter(range(10**6))

    def summed_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        loss = original(model, batch)
        if not model.training:
            return loss
        return loss * factor if next(calls) in steps and dist.get_rank() == rank else loss

    loop.summed_loss = summed_loss
    return run_job(config, out)
