"""What a benchmark can train with: a recipe, one of torch's own communication hooks, or a cell of the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Literal, cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import thinwire as tw
from thinwire import recipes
from thinwire.geometry import Geometry
from thinwire.local_update import Method
from thinwire.local_update.pier import SMOOTH_LR, SMOOTH_MOMENTUM
from thinwire.reducers import Reducer
from thinwire.reducers.feedback import Feedback
from thinwire.train.averaging import Attach, Averaging, attach_recipe, average_now_and_then
from thinwire.train.config import OptimizerConfig, TrainConfig

GEOMETRIES: dict[str, Geometry | None] = {"euclidean": None, "hadamard": tw.Hadamard(), "gift": tw.GIFT()}
FEEDBACKS: dict[str, Feedback] = {"none": "none", "error": "error", "loco": tw.LoCo()}


class Hooked:
    """What the training step asks of a link, for a DDP model with a hook of torch's."""

    def control_all_reduce(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def rollback(self) -> None:
        raise RuntimeError("a gradient is not finite, and torch's hooks cannot undo what they keep")


def _fp16(ddp: nn.Module, optimizers: Sequence[Optimizer], config: TrainConfig) -> Averaging:
    assert isinstance(ddp, DistributedDataParallel)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Averaging(cast(tw.Link, Hooked()))


def _powersgd(ddp: nn.Module, optimizers: Sequence[Optimizer], config: TrainConfig, rank: int = 4) -> Averaging:
    assert isinstance(ddp, DistributedDataParallel)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    # It starts collectives in callbacks: those of two buckets would mix differently on each rank.
    ddp.register_comm_hook(state, lambda state, bucket: _waited(powerSGD_hook.powerSGD_hook(state, bucket)))
    return Averaging(cast(tw.Link, Hooked()))


def _waited(future: Future[Tensor]) -> Future[Tensor]:
    future.wait()
    return future


TORCH_HOOKS: dict[str, Attach] = {"torch-fp16": _fp16, "torch-powersgd": _powersgd}
"""fp16 compression; PowerSGD of rank 4 with error feedback and warm start, from step 3 on."""


LOCAL_UPDATES: dict[str, Method] = {
    "local-sgd": tw.LocalSGD(every=20),
    "slowmo": tw.SlowMo(every=20),
    "post-local-sgd": tw.PostLocalSGD(start=0.5, every=20),
    "diloco-0.7-0.9": tw.DiLoCo(every=20, outer_lr=0.7, outer_momentum=0.9),
    "diloco-0.9-0.8": tw.DiLoCo(every=20, outer_lr=0.9, outer_momentum=0.8),
    "diloco-int8": tw.DiLoCo(every=20, outer_lr=0.9, outer_momentum=0.8, reducer=tw.Quantized("int8")),
    "diloco-int4": tw.DiLoCo(every=20, outer_lr=0.9, outer_momentum=0.8, reducer=tw.Quantized("int4")),
    "streaming-diloco": tw.StreamingDiLoCo(every=20, fragments=4, delay=1, merge=0.5),
    "streaming-diloco-0.9-0.8": tw.StreamingDiLoCo(
        every=20, fragments=4, delay=1, merge=0.5, outer_lr=0.9, outer_momentum=0.8
    ),
    "streaming-diloco-2-fp8": tw.StreamingDiLoCo(
        every=20,
        fragments=2,
        delay=1,
        merge=0.0,
        outer_lr=0.9,
        outer_momentum=0.8,
        reducer=tw.Quantized("fp8_e4m3", feedback="error"),
    ),
    "warm-up-then-diloco": tw.Pier(every=20, outer_lr=((0.0, 0.7),), outer_momentum=((0.0, 0.9),)),
    "pier": tw.Pier(every=20),
    "pier-smooth": tw.Pier(every=20, outer_lr=SMOOTH_LR, outer_momentum=SMOOTH_MOMENTUM),
    "pier-pairs": tw.Pier(every=20, groups=2),
    "pier-pairs-fp8": tw.Pier(every=20, groups=2, reducer=tw.Quantized("fp8_e4m3", feedback="error")),
}
"""What `thinwire bench local-updates` compares: rounds of 20 steps."""


def cell(format: str, geometry: str, feedback: str) -> str:
    """The name of a cell of the ablation, a key of GEOMETRIES and one of FEEDBACKS."""
    return f"{format}-{geometry}-{feedback}"


def cell_reducer(name: str) -> Reducer:
    """The reducer of a cell."""
    format, geometry, feedback = name.split("-")
    return tw.Routed(tw.Quantized(format, feedback=FEEDBACKS[feedback], geometry=GEOMETRIES[geometry]))


def description(method: str) -> str:
    """All of its configuration."""
    if method in TORCH_HOOKS:
        return method
    if method in LOCAL_UPDATES:
        return repr(LOCAL_UPDATES[method])
    if method in recipes.names():
        recipe = recipes.get(method)
        return repr(recipe.reducer if recipe.method is None else recipe.method)
    return repr(cell_reducer(method))


def optimizer_of(method: str) -> Literal["adamw", "muon"]:
    """The optimizer that the method is made for."""
    recipe = recipes.get(method) if method in recipes.names() else None
    return (recipe and recipe.optimizer) or OptimizerConfig.name


def attach_method(method: str) -> Attach:
    """How a method is attached to a DDP model."""
    if method in TORCH_HOOKS:
        return TORCH_HOOKS[method]
    if method in LOCAL_UPDATES:
        return partial(average_now_and_then, LOCAL_UPDATES[method])
    if method in recipes.names():
        return lambda ddp, optimizers, config: attach_recipe(ddp, optimizers, replace(config, recipe=method))
    reducer = cell_reducer(method)
    return lambda ddp, optimizers, config: Averaging(
        tw.attach(ddp, reducer, timeout=timedelta(seconds=config.timeout))
    )
