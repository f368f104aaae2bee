"""One rank of `thinwire bench recipes --rate`: train with one method, validate now and then, time the steps.

A method is a recipe of thinwire, or one of torch's own communication hooks on the same DDP model.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import recipes
from thinwire.bench.averaging import interface_bytes
from thinwire.train.config import TrainConfig
from thinwire.train.loop import training_step, validate
from thinwire.train.progress import Progress
from thinwire.train.run import assemble, attach_recipe

Attach = Callable[[DistributedDataParallel, TrainConfig], tw.Link]

WARM_UP = 3
"""Steps before the clock starts."""


@dataclass(frozen=True)
class Job:
    """What all ranks do."""

    method: str
    seed: int
    steps: int
    horizon: int
    """Steps that the learning rate is planned for."""
    validate_every: int
    """0: never."""
    lr: float
    store: str
    """Path of the file through which ranks meet."""


@dataclass(frozen=True)
class Trained:
    """What one job gave."""

    step_seconds: float
    """Mean over the steps after the first WARM_UP, validation left out; of the slowest rank."""
    sent_bytes: int
    """Per rank and step: by the interface's counter where there is one of its own, else by the ledger."""
    losses: list[tuple[int, float]]
    """(step, validation loss), nats per byte."""


class Hooked:
    """What the training step asks of a link, for a DDP model with a hook of torch's."""

    def control_all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def rollback(self) -> None:
        raise RuntimeError("a gradient is not finite, and torch's hooks cannot undo what they keep")


def _fp16(ddp: DistributedDataParallel, config: TrainConfig) -> tw.Link:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return cast(tw.Link, Hooked())


def _powersgd(ddp: DistributedDataParallel, config: TrainConfig, rank: int = 4) -> tw.Link:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    # It starts collectives in callbacks: those of two buckets would mix differently on each rank.
    ddp.register_comm_hook(state, lambda state, bucket: _waited(powerSGD_hook.powerSGD_hook(state, bucket)))
    return cast(tw.Link, Hooked())


def _waited(future: Future[Tensor]) -> Future[Tensor]:
    future.wait()
    return future


TORCH_HOOKS: dict[str, Attach] = {"torch-fp16": _fp16, "torch-powersgd": _powersgd}
"""fp16 compression; PowerSGD of rank 4 with error feedback and warm start, from step 3 on."""


def names() -> list[str]:
    """All methods."""
    return [*recipes.names(), *TORCH_HOOKS]


def main() -> None:
    """Run as one rank; rank 0 writes what the job gave to stdout."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=600),
    )
    config = TrainConfig(seed=job.seed, steps=job.horizon)
    trained = train(job, replace(config, optimizer=replace(config.optimizer, lr=job.lr)))
    dist.barrier()
    dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        sys.stdout.write(json.dumps(asdict(trained)))


def train(job: Job, config: TrainConfig) -> Trained:
    """`job.steps` steps as configured, but with the job's method. Every rank calls this."""
    hook = TORCH_HOOKS.get(job.method)
    if hook is None:
        config = replace(config, recipe=job.method)
    run = assemble(config, torch.device("cpu"), hook or attach_recipe)
    progress = Progress()
    losses: list[tuple[int, float]] = []
    seconds, sent = 0.0, 0
    while progress.step < job.steps:
        before, begin = _sent(run.link), time.perf_counter()
        step = training_step(run, progress, lambda: False)
        assert step is not None
        progress.step += 1
        progress.position += config.batch_size
        if progress.step > WARM_UP:
            seconds += time.perf_counter() - begin
            sent += _sent(run.link) - before
        if job.validate_every and progress.step % job.validate_every == 0:
            losses.append((progress.step, validate(run)))
    timed = job.steps - WARM_UP
    worst = max(row[0] for row in run.table([seconds]))
    return Trained(worst / timed, sent // timed, losses)


def _sent(link: tw.Link) -> int:
    """Bytes that this rank has sent."""
    counted = interface_bytes()
    if counted is not None:
        return counted
    return 0 if isinstance(link, Hooked) else link.ledger.sent_bytes()


if __name__ == "__main__":
    main()
