"""What a benchmark can train with: a recipe, one of torch's own communication hooks, or a cell of the ablation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire import recipes
from thinwire.geometry import Geometry
from thinwire.reducers import Reducer
from thinwire.reducers.quantized import Feedback
from thinwire.train.config import TrainConfig

Attach: TypeAlias = Callable[[DistributedDataParallel, TrainConfig], tw.Link]

GEOMETRIES: dict[str, Geometry | None] = {"euclidean": None, "hadamard": tw.Hadamard(), "gift": tw.GIFT()}
FEEDBACKS: tuple[Feedback, ...] = ("none", "error")


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


def cell(format: str, geometry: str, feedback: str) -> str:
    """The name of a cell of the ablation, a key of GEOMETRIES and one of FEEDBACKS."""
    return f"{format}-{geometry}-{feedback}"


def reducer_of(method: str) -> Reducer:
    """The reducer of a recipe or of a cell."""
    if method in recipes.names():
        return recipes.get(method).reducer
    format, geometry, feedback = method.split("-")
    return tw.Routed(tw.Quantized(format, feedback=cast(Feedback, feedback), geometry=GEOMETRIES[geometry]))


def description(method: str) -> str:
    """All of its configuration."""
    return method if method in TORCH_HOOKS else repr(reducer_of(method))


def attach_method(method: str) -> Attach:
    """How a method is attached to a DDP model."""
    if method in TORCH_HOOKS:
        return TORCH_HOOKS[method]
    reducer = reducer_of(method)
    return lambda ddp, config: tw.attach(ddp, reducer, timeout=timedelta(seconds=config.timeout))
