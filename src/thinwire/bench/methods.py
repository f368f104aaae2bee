"""What a benchmark can train with: a recipe, one of torch's own communication hooks, or a cell of the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from thinwire import recipes
from thinwire.geometry import Geometry
from thinwire.reducers import Reducer
from thinwire.reducers.quantized import Feedback
from thinwire.train.averaging import Attach, Averaging, attach_recipe
from thinwire.train.config import TrainConfig

GEOMETRIES: dict[str, Geometry | None] = {"euclidean": None, "hadamard": tw.Hadamard(), "gift": tw.GIFT()}
FEEDBACKS: tuple[Feedback, ...] = ("none", "error")


class Hooked:
    """What the training step asks of a link, for a DDP model with a hook of torch's."""

    def control_all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def rollback(self) -> None:
        raise RuntimeError("a gradient is not finite, and torch's hooks cannot undo what they keep")


def _fp16(ddp: DistributedDataParallel, optimizers: Sequence[Optimizer], config: TrainConfig) -> Averaging:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Averaging(cast(tw.Link, Hooked()))


def _powersgd(
    ddp: DistributedDataParallel, optimizers: Sequence[Optimizer], config: TrainConfig, rank: int = 4
) -> Averaging:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    # It starts collectives in callbacks: those of two buckets would mix differently on each rank.
    ddp.register_comm_hook(state, lambda state, bucket: _waited(powerSGD_hook.powerSGD_hook(state, bucket)))
    return Averaging(cast(tw.Link, Hooked()))


def _waited(future: Future[Tensor]) -> Future[Tensor]:
    future.wait()
    return future


TORCH_HOOKS: dict[str, Attach] = {"torch-fp16": _fp16, "torch-powersgd": _powersgd}
"""fp16 compression; PowerSGD of rank 4 with error feedback and warm start, from step 3 on."""


def cell(format: str, geometry: str, feedback: str) -> str:
    """The name of a cell of the ablation, a key of GEOMETRIES and one of FEEDBACKS."""
    return f"{format}-{geometry}-{feedback}"


def cell_reducer(name: str) -> Reducer:
    """The reducer of a cell."""
    format, geometry, feedback = name.split("-")
    return tw.Routed(tw.Quantized(format, feedback=cast(Feedback, feedback), geometry=GEOMETRIES[geometry]))


def description(method: str) -> str:
    """All of its configuration."""
    if method in TORCH_HOOKS:
        return method
    if method in recipes.names():
        recipe = recipes.get(method)
        return repr(recipe.reducer if recipe.method is None else recipe.method)
    return repr(cell_reducer(method))


def attach_method(method: str) -> Attach:
    """How a method is attached to a DDP model."""
    if method in TORCH_HOOKS:
        return TORCH_HOOKS[method]
    if method in recipes.names():
        return lambda ddp, optimizers, config: attach_recipe(ddp, optimizers, replace(config, recipe=method))
    reducer = cell_reducer(method)
    return lambda ddp, optimizers, config: Averaging(
        tw.attach(ddp, reducer, timeout=timedelta(seconds=config.timeout))
    )
