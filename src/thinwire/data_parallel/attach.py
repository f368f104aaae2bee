"""`attach`: two lines added to a script, and its gradients are averaged by a reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Slot, Wire
from thinwire.data_parallel.agreement import check_same_model, check_same_reducer
from thinwire.data_parallel.ddp import trampoline_of
from thinwire.data_parallel.inputs import InputWatch
from thinwire.data_parallel.link import Link
from thinwire.data_parallel.names import plain_name
from thinwire.geometry import Observer
from thinwire.reducers import Reducer


def attach(model: nn.Module, reducer: Reducer, *, timeout: timedelta | None = None) -> Link:
    """Average the gradients of `model` through `reducer` from the next backward pass on.

    `model` is a DistributedDataParallel model, compiled or not; in a world of one rank any module will do,
    and nothing happens to its gradients. Collective: call it on all ranks at the same point. `timeout` ends a
    collective that hangs (None: that of DDP's process group); the error names rank, op and slots.

    Raises ValueError for a parameter that cannot be averaged, ranks with different models or reducers, a model
    that has a link or another communication hook already; TypeError for other kinds of models.
    """
    if not isinstance(reducer, Reducer):
        raise TypeError(f"attach needs a reducer such as tw.Quantized('fp8_e5m2'), got {reducer!r}")
    called, model = model, getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        return _attach_ddp(model, reducer, timeout, called)
    if _is_sharded(model):
        raise TypeError(
            f"attach averages whole parameters, and those of {type(model).__name__} are sharded: "
            "use DistributedDataParallel(model) instead of sharding it"
        )
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        raise TypeError(
            f"attach needs a DistributedDataParallel model in a world of {world_size} ranks, "
            f"got {type(model).__name__}: wrap it first, DistributedDataParallel(model)"
        )
    parameters = _parameters(model)
    _check(model, parameters)
    wire, slots = Wire(device=_device(parameters)), _slots(parameters)
    return Link(parameters, slots, reducer.bind(slots, wire), wire, on_detach=lambda: None)


def _attach_ddp(
    ddp: DistributedDataParallel, reducer: Reducer, timeout: timedelta | None, called: nn.Module
) -> Link:
    """`called`: the module that the user calls, `ddp` or what torch.compile made of it."""
    parameters = _parameters(ddp.module, ignored=ddp.parameters_to_ignore)
    _check(ddp.module, parameters)
    trampoline = trampoline_of(ddp, parameters)
    if trampoline.link is not None:
        raise ValueError("this model has a link already: call its detach() before attaching another reducer")
    slots = _slots(parameters)
    phases = trampoline.phases.setdefault(timeout, {})
    wire = Wire(ddp.process_group, device=_device(parameters), timeout=timeout, phases=phases)

    def give_back() -> None:
        """To plain DDP; a later link must not use process groups whose connections are closed."""
        trampoline.link = None
        if wire.error is not None:
            trampoline.phases.clear()

    try:
        check_same_model(wire, slots)
        check_same_reducer(wire, reducer)
        bound = reducer.bind(slots, wire)
    except BaseException:
        give_back()
        raise
    trampoline.averaged = frozenset(slot.name for slot in slots)
    reference = weakref.ref(called)  # the model keeps its link, not the other way round

    def watch(observers: Callable[[], Mapping[str, Observer]]) -> InputWatch:
        return InputWatch(cast(nn.Module, reference()), observers, prefix="module.")

    trampoline.link = Link(parameters, slots, bound, wire, on_detach=give_back, watch=watch)
    return trampoline.link


def _parameters(module: nn.Module, *, ignored: Collection[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters that data parallelism keeps equal, by name."""
    named = module.named_parameters()
    return {plain_name(name): parameter for name, parameter in named if name not in ignored}


def _slots(parameters: dict[str, nn.Parameter]) -> list[Slot]:
    return [
        Slot(name, tuple(parameter.shape), parameter.dtype)
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.numel()
    ]


def _check(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    """Refuse by name what cannot be averaged."""
    names = {id(parameter): name for name, parameter in parameters.items() if parameter.requires_grad}
    for submodule in module.modules():
        sparse = isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
        if sparse and (name := names.get(id(submodule.weight))):
            raise ValueError(
                f"{name!r} belongs to an embedding with sparse=True, whose gradient is not a dense tensor: "
                "build it with sparse=False"
            )
    for name, parameter in parameters.items():
        if parameter.requires_grad and not parameter.dtype.is_floating_point:
            raise ValueError(f"{name!r} is {parameter.dtype}: only real floating point parameters are averaged")


def _device(parameters: dict[str, nn.Parameter]) -> torch.device:
    """The one device of all parameters."""
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        where = " and ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"attach needs a model on one device per rank, got {where}")
    return next(iter(devices), torch.device("cpu"))


def _is_sharded(model: nn.Module) -> bool:
    """Whether FSDP or tensor parallelism cut the parameters into DTensors or flat shards."""
    return any(
        hasattr(parameter, "placements") or hasattr(parameter, "_is_flat_param")
        for parameter in model.parameters()
    )
