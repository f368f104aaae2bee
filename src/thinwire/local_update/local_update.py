"""`local_update`: a script whose ranks train on their own and average now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.collectives import Slot, Wire
from thinwire.data_parallel import attach
from thinwire.data_parallel.agreement import check_same_method, check_same_model
from thinwire.data_parallel.parameters import (
    check_parameters,
    device_of,
    is_sharded,
    named_parameters,
    slots_of,
    trained_parameters,
)
from thinwire.local_update.engine import LocalUpdate
from thinwire.local_update.fragments import cut
from thinwire.local_update.method import Method
from thinwire.reducers import Local
from thinwire.reducers.reducer import is_configuration

logger = logging.getLogger(__name__)

FEW_ROUNDS = 50


def local_update(
    model: nn.Module,
    optimizer: Optimizer,
    method: Method,
    *,
    total_steps: int | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> LocalUpdate:
    """Let every rank train `model` with `optimizer` on its own data, and average as `method` says.

    `model` is a bare module, which then gets the parameters and buffers of rank 0, or a DistributedDataParallel
    model, whose own averaging of gradients and buffers stops until `close()`. `group` (None: DDP's, or the
    default one) are the ranks that average; without torch.distributed a world of one. Collective: call it on all
    ranks at the same point. `timeout` ends a collective that hangs (None: that of the group). With `total_steps`,
    the steps of the run, a warning says if they are too few rounds for an outer optimizer.

    Raises ValueError for parameters that cannot be averaged, an optimizer of other parameters, ranks with
    different models or methods; TypeError for sharded models.
    """
    if not is_configuration(method, Method):
        raise TypeError(f"local_update needs a method such as tw.DiLoCo(), got {method!r:.200}")
    bare = getattr(model, "_orig_mod", model)
    if is_sharded(bare):
        raise TypeError(f"local_update averages whole parameters, and those of {type(bare).__name__} are sharded")
    ddp = bare if isinstance(bare, DistributedDataParallel) else None
    module = ddp.module if ddp is not None else bare
    parameters = named_parameters(module, ignored=ddp.parameters_to_ignore if ddp is not None else ())
    check_parameters(module, parameters)
    _check_optimizer(optimizer, module)
    device = device_of(parameters)
    trained = trained_parameters(parameters)
    if not trained:
        raise ValueError("local_update: the model has no parameters that take gradients")
    plan = method.plan()
    sizes = {name: p.numel() * _wide(p).itemsize for name, p in trained.items()}
    fragments = cut(sizes, plan.fragments, plan.order)
    if total_steps is not None and total_steps < FEW_ROUNDS * plan.every:
        logger.warning(
            "%d steps are %d rounds of %d: the momentum of an outer optimizer takes some %d to pay",
            *(total_steps, total_steps // plan.every, plan.every, FEW_ROUNDS),
        )
    wire = Wire(ddp.process_group if ddp is not None else group, device=device, timeout=timeout)
    try:
        check_same_model(wire, slots_of(parameters))
        check_same_method(wire, method)
        reducer = plan.reducer.bind([Slot(name, tuple(p.shape), _wide(p)) for name, p in trained.items()], wire)
        if ddp is None:
            _start_equal(module, wire)
        anchors = {name: p.detach().to(_wide(p), copy=True) for name, p in trained.items()}
        outer = plan.outer(list(anchors.values()))
        release = _take_over(model, ddp, timeout) if ddp is not None else lambda: None
    except BaseException:
        wire.close()
        raise
    return LocalUpdate(trained, plan, fragments, anchors, outer, reducer, wire, release)


def _wide(parameter: nn.Parameter) -> torch.dtype:
    """Of an anchor: what a narrow parameter rounds away must not be lost from round to round."""
    return torch.promote_types(parameter.dtype, torch.float32)


def _check_optimizer(optimizer: Optimizer, module: nn.Module) -> None:
    known = {id(parameter) for parameter in module.parameters()}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in optimized if id(parameter) not in known]:
        raise ValueError(
            f"local_update: the optimizer has {len(foreign)} of {len(optimized)} parameters that are not the "
            "model's: build it from model.parameters() after the model is where it trains"
        )


@torch.no_grad()
def _start_equal(module: nn.Module, wire: Wire) -> None:
    """All ranks start from the parameters and buffers of the first, as under DDP."""
    for tensor in [*module.parameters(), *module.buffers()]:
        whole = tensor.detach().contiguous()
        wire.control_broadcast(whole)
        tensor.copy_(whole)


def _take_over(called: nn.Module, ddp: DistributedDataParallel, timeout: timedelta | None) -> Callable[[], None]:
    """Stop DDP from averaging gradients and copying buffers; what gives both back to it."""
    link = attach(called, Local(), timeout=timeout)
    broadcasts, ddp.broadcast_buffers = ddp.broadcast_buffers, False

    def give_back() -> None:
        ddp.broadcast_buffers = broadcasts
        link.detach()

    return give_back
