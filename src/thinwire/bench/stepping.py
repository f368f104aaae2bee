"""One rank of a benchmark's job: train with one method, validate now and then, time the steps."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

import thinwire as tw
from thinwire.bench import char
from thinwire.bench.averaging import interface_bytes
from thinwire.bench.jobs import Job, Trained
from thinwire.bench.methods import Hooked, attach_method, optimizer_of
from thinwire.train.config import ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from thinwire.train.data.samples import DataConfig
from thinwire.train.loop import training_step, validate
from thinwire.train.model import build_model
from thinwire.train.progress import Progress
from thinwire.train.run import assemble

WARM_UP = 3
"""Steps before the clock starts."""


def main() -> None:
    """Run as one rank; rank 0 writes what the job gave to stdout."""
    job, store = Job(**json.loads(sys.argv[1])), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=600),
    )
    trained = train(job, config_of(job))
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        sys.stdout.write(json.dumps(asdict(trained)))


def config_of(job: Job) -> TrainConfig:
    """The job as `thinwire train` would have it; its recipe is not the job's method."""
    return TrainConfig(
        seed=job.seed,
        steps=job.horizon,
        batch_size=job.batch_size,
        data=DataConfig(sequence_length=job.sequence_length),
        model=ModelConfig(name=job.model),
        optimizer=OptimizerConfig(name=optimizer_of(job.method), lr=job.lr),
        schedule=ScheduleConfig(warmup_steps=job.warmup_steps),
    )


def train(job: Job, config: TrainConfig) -> Trained:
    """`job.steps` steps as configured, but with the job's method. Every rank calls this."""
    build = char.build if job.model == char.NAME else build_model
    run = assemble(config, torch.device("cpu"), attach_method(job.method), build)
    progress = Progress()
    losses: list[tuple[int, float]] = []
    clock: list[float] = []
    sent = 0
    while progress.step < job.steps:
        before, begin = _sent(run.link), time.perf_counter()
        step = training_step(run, progress, lambda: False)
        assert step is not None
        progress.step += 1
        progress.position += config.batch_size
        clock.append((clock[-1] if clock else 0.0) + time.perf_counter() - begin)
        if progress.step > WARM_UP:
            sent += _sent(run.link) - before
        last = progress.step == job.steps
        if job.validate_every and (last or progress.step % job.validate_every == 0):
            losses.append((progress.step, validate(run)))
    timed = job.steps - WARM_UP
    busiest, *slowest = (max(column) for column in zip(*run.table([float(sent), *clock])))
    step_seconds = (slowest[-1] - slowest[WARM_UP - 1]) / timed
    return Trained(step_seconds, int(busiest) // timed, losses, slowest)


def _sent(link: tw.Link) -> int:
    """Bytes that this rank has sent."""
    counted = interface_bytes()
    if counted is not None:
        return counted
    return 0 if isinstance(link, Hooked) else link.ledger.sent_bytes()


if __name__ == "__main__":
    main()
