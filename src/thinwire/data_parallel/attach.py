"""`attach`: two lines added to a script, and its gradients are averaged by a reducer."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Slot, Wire
from thinwire.data_parallel.ddp import check_module, trampoline_of
from thinwire.data_parallel.link import Link
from thinwire.reducers import Reducer


def attach(model: nn.Module, reducer: Reducer, *, timeout: timedelta | None = None) -> Link:
    """Average the gradients of `model` through `reducer` from the next backward pass on.

    `model` is a DistributedDataParallel model; in a world of one rank any module will do, and nothing
    happens to its gradients. Collective: call it on all ranks at the same point. `timeout` ends a
    collective that hangs (None: that of DDP's process group); the error names rank, op and slots.

    Raises ValueError for a parameter that cannot be averaged, ranks with different models, a model that
    has a link or another communication hook already; TypeError for other kinds of models.
    """
    if not isinstance(reducer, Reducer):
        raise TypeError(f"attach needs a reducer such as tw.Quantized('fp8_e5m2'), got {reducer!r}")
    if isinstance(model, DistributedDataParallel):
        return _attach_ddp(model, reducer, timeout)
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        raise TypeError(
            f"attach needs a DistributedDataParallel model in a world of {world_size} ranks, "
            f"got {type(model).__name__}: wrap it first, DistributedDataParallel(model)"
        )
    check_module(model)
    wire, slots = Wire(), _slots(model)
    return Link(model, reducer.bind(slots, wire), wire, slots, on_detach=lambda: None)


def _attach_ddp(ddp: DistributedDataParallel, reducer: Reducer, timeout: timedelta | None) -> Link:
    check_module(ddp.module)
    trampoline = trampoline_of(ddp)
    if trampoline.link is not None:
        raise ValueError("this model has a link already: call its detach() before attaching another reducer")
    slots = _slots(ddp.module)
    wire = Wire(ddp.process_group, device=next(ddp.module.parameters()).device, timeout=timeout)

    def detach() -> None:
        trampoline.link = None

    trampoline.link = Link(ddp.module, reducer.bind(slots, wire), wire, slots, on_detach=detach)
    return trampoline.link


def _slots(module: nn.Module) -> list[Slot]:
    return [
        Slot(name, tuple(parameter.shape), parameter.dtype)
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.numel()
    ]
