"""`attach`: two lines added to a script, and its gradients are averaged by a reducer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from thinwire.collectives import Ledger, Wire
from thinwire.data_parallel.agreement import check_same_model, check_same_reducer
from thinwire.data_parallel.ddp import trampoline_of
from thinwire.data_parallel.fsdp import attach_fsdp, check_mesh, is_fsdp2, replicate_group, reshard
from thinwire.data_parallel.inputs import InputWatch
from thinwire.data_parallel.link import Link
from thinwire.data_parallel.parameters import check_parameters, device_of, is_sharded, named_parameters, slots_of
from thinwire.data_parallel.shards import attach_shards
from thinwire.geometry import Observer
from thinwire.reducers import Reducer
from thinwire.reducers.reducer import check_reducer


def attach(
    model: nn.Module,
    reducer: Reducer,
    *,
    replicate: DeviceMesh | None = None,
    timeout: timedelta | None = None,
    ledger: Ledger | None = None,
) -> Link:
    """Average the gradients of `model` through `reducer` from the next backward pass on.

    `model` is a DistributedDataParallel model, compiled or not, or one that FSDP2 shards: then the reducer takes
    the place of its reduce-scatter, or, with `replicate`, a dimension of its mesh, each rank averages what FSDP2
    has reduced for its shards with the ranks along that dimension. In a world of one rank any module will do, and
    nothing happens to its gradients. Collective: call it on all ranks at the same point. `timeout` ends a
    collective that hangs (None: that of the process group); the error names rank, op and slots. `ledger`: where
    bytes are counted (None: in one of the link's own).

    Of an FSDP2 model all parameters must get gradients, and FSDP2 waits for the mean of each module; with
    `replicate` layer inputs are not observed (no GIFT). Raises ValueError for a parameter that cannot be
    averaged, ranks with different models or reducers, a model that has a link or another communication hook
    already, one sharded over a mesh of two dimensions; TypeError for other kinds of models.
    """
    check_reducer(reducer, "attach")
    called, model = model, getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        if replicate is not None:
            raise ValueError("attach: replicate is for sharded models; DDP averages over its process group")
        return _attach_ddp(model, reducer, timeout, ledger, called)
    reshard(model)
    if is_fsdp2(model) and replicate is None:
        check_mesh(model, "attach")
        return attach_shards(called, model, reducer, timeout, ledger)
    if is_sharded(model):
        group = replicate_group(model, replicate, "attach")
        if not is_fsdp2(model):
            raise TypeError(
                f"attach has no place to average gradients in a backward pass of {type(model).__name__}, which is "
                "tensor-parallel alone: wrap it with fully_shard, or use tw.local_update"
            )
        return attach_fsdp(model, reducer, group, timeout, ledger)
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world_size > 1:
        raise TypeError(
            f"attach needs a DistributedDataParallel model in a world of {world_size} ranks, "
            f"got {type(model).__name__}: wrap it first, DistributedDataParallel(model)"
        )
    parameters = named_parameters(model)
    check_parameters(model, parameters)
    wire, slots = Wire(device=device_of(parameters), ledger=ledger), slots_of(parameters)
    return Link(parameters, slots, reducer.bind(slots, wire), wire, on_detach=lambda: None)


def _attach_ddp(
    ddp: DistributedDataParallel,
    reducer: Reducer,
    timeout: timedelta | None,
    ledger: Ledger | None,
    called: nn.Module,
) -> Link:
    """`called`: the module that the user calls, `ddp` or what torch.compile made of it."""
    parameters = named_parameters(ddp.module, ignored=ddp.parameters_to_ignore)
    check_parameters(ddp.module, parameters)
    trampoline = trampoline_of(ddp, parameters)
    if trampoline.link is not None:
        raise ValueError(
            "this model has a link already: call its detach(), or close() of what tw.local_update returned, "
            "before attaching another reducer"
        )
    slots = slots_of(parameters)
    phases = trampoline.phases.setdefault(timeout, {})
    device = device_of(parameters)
    wire = Wire(ddp.process_group, device=device, timeout=timeout, phases=phases, ledger=ledger)

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
