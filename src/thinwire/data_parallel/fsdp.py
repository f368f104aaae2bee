"""FSDP2: what it has reduced over the shards of a model is averaged over the model's replicas, shard by shard.

    mesh = init_device_mesh(..., mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    attach(model, reducer, replicate=mesh["replicate"])

FSDP2 reduces the gradients of one FSDP module as one flat buffer and calls an all-reduce hook with what the
reduce-scatter left on this rank: the padded shards of the module's parameters, one after the other. The hook is
called once per module and backward pass that synchronises, in the order in which the backward pass reaches them,
and FSDP2 goes on when it returns.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from thinwire.collectives import Ledger, Slot, Wire
from thinwire.data_parallel.agreement import check_same_model, check_same_reducer
from thinwire.data_parallel.link import Link
from thinwire.data_parallel.parameters import (
    check_parameters,
    device_of,
    local_part,
    named_parameters,
    trained_parameters,
)
from thinwire.reducers import Reducer

_LINE = 'fully_shard(model, mesh=mesh["shard"]) and replicate=mesh["replicate"]'


def is_fsdp2(model: nn.Module) -> bool:
    """Whether `fully_shard` was called on the model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def reshard(model: nn.Module) -> None:
    """Have the parameters of an FSDP2 model be the shards again, and what it gathered of them for a forward pass
    without a backward pass, as an evaluation is, be gathered anew."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_groups(parameters: Iterable[nn.Parameter]) -> list[dist.ProcessGroup]:
    """The ranks over which a DTensor among these is sharded, per dimension of their meshes."""
    found = {}
    for parameter in parameters:
        for dim, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                group = parameter.device_mesh.get_group(dim)  # type: ignore[attr-defined]
                found[group.group_name] = group
    return [group for group in found.values() if group.size() > 1]


def group_along(replicate: object, who: str) -> dist.ProcessGroup:
    """The ranks along `replicate`. Raises ValueError unless it is one dimension of a mesh."""
    if not isinstance(replicate, DeviceMesh) or replicate.ndim != 1:
        raise ValueError(
            f'{who}: replicate is one dimension of a mesh, such as mesh["replicate"], got {replicate!r}'
        )
    return replicate.get_group()


def replicate_group(model: nn.Module, replicate: DeviceMesh | None, who: str) -> dist.ProcessGroup:
    """The ranks that hold the same shards. Raises ValueError or TypeError with the line to write."""
    if any(hasattr(parameter, "_is_flat_param") for parameter in model.parameters()):
        raise TypeError(f"{who} does not know FullyShardedDataParallel: shard with fully_shard (FSDP2)")
    if replicate is None:
        raise ValueError(
            f"{who}: the parameters of {type(model).__name__} are sharded; say which ranks hold the same shards: "
            f"{_LINE}, of a mesh with both dimensions (over shards alone FSDP2 averages itself)"
        )
    along = group_along(replicate, who)
    check_mesh(model, who)
    parameters = named_parameters(model)
    for name, parameter in parameters.items():
        if is_fsdp2(model) and parameter.requires_grad and not hasattr(parameter, "placements"):
            raise not_sharded(name)
    ranks = set(dist.get_process_group_ranks(along))
    for shards in shard_groups(parameters.values()):
        if len(ranks.intersection(dist.get_process_group_ranks(shards))) > 1:
            raise ValueError(
                f"{who}: the ranks along replicate hold different shards of {type(model).__name__}: write {_LINE}"
            )
    return along


def check_mesh(model: nn.Module, who: str) -> None:
    """Raise ValueError with the line to write where FSDP2 averages over replicas itself."""
    for name, group in param_groups_of(model).items():
        if "HSDP" in type(group.mesh_info).__name__:
            raise ValueError(
                f"{who}: {name or 'the model'} is sharded over a mesh of two dimensions, so FSDP2 averages "
                f"over the replicas itself: write {_LINE}"
            )


def attach_fsdp(
    model: nn.Module,
    reducer: Reducer,
    group: dist.ProcessGroup,
    timeout: timedelta | None,
    ledger: Ledger | None = None,
) -> Link:
    """Average the shards' gradients of an FSDP2 model over `group`."""
    parameters = named_parameters(model)
    check_parameters(model, parameters)
    names = {id(parameter): name for name, parameter in parameters.items()}
    shards = {
        module: {names[id(p.sharded_param)]: p for p in group.fsdp_params if p.sharded_param.requires_grad}
        for module, group in param_groups_of(model).items()
    }
    if any(group._all_reduce_hook is not None for group in param_groups_of(model).values()):
        raise ValueError(
            "this model has an all-reduce hook already: detach the link that it has, or leave yours out"
        )
    trained, held = trained_parameters(parameters), {name for module in shards.values() for name in module}
    if plain := [name for name in trained if name not in held]:
        raise not_sharded(plain[0])
    slots = [
        Slot(name, (p.padded_sharded_param_size.numel(),), trained[name].dtype)
        for module in shards.values()
        for name, p in module.items()
    ]
    wire = Wire(group, device=device_of(parameters), timeout=timeout, ledger=ledger)
    try:
        check_same_model(wire, slots)
        check_same_reducer(wire, reducer)
        bound = reducer.bind(slots, wire)
    except BaseException:
        wire.close()
        raise
    modules = {name: module for name, module in model.named_modules() if name in shards}

    def give_back() -> None:
        for module in modules.values():
            module.set_all_reduce_hook(None)

    local = {name: local_part(parameter) for name, parameter in parameters.items()}
    link = Link(local, slots, bound, wire, on_detach=give_back)
    hooks = _Hooks(link)
    for name, module in modules.items():
        lengths = {slot.name: slot.numel for slot in slots if slot.name in shards[name]}
        module.set_all_reduce_hook(partial(hooks.average, name or "the root module", lengths))
    return link


class BackwardPasses:
    """Opens a reduction at the first call of each backward pass."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._backward: int | None = None  # the backward pass of the open reduction

    def link_of_this_pass(self) -> Link:
        """The link, with the reduction of this backward pass open."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self._link.begin()
        return self._link


class _Hooks:
    """The all-reduce hooks of a model's modules."""

    def __init__(self, link: Link) -> None:
        self._passes = BackwardPasses(link)

    @torch.no_grad()
    def average(self, module: str, lengths: Mapping[str, int], flat: Tensor) -> None:
        """Replace the shards of one module's gradients, in one flat buffer, by their means."""
        if flat.numel() != sum(lengths.values()):
            raise ValueError(
                f"a parameter of {module} got no gradient in this backward pass, of {', '.join(lengths)}: which "
                "one FSDP2 does not say; freeze it, or use it"
            )
        link = self._passes.link_of_this_pass()
        started = time.perf_counter()
        named = dict(zip(lengths, flat.split(list(lengths.values()))))
        link.reducer.all_reduce(named).wait()
        link.expose(since=started)


def not_sharded(name: str) -> ValueError:
    return ValueError(f"{name!r} is not sharded by FSDP2: call fully_shard on the root module too")


def param_groups_of(model: nn.Module) -> dict[str, Any]:
    """FSDP2's own record of the parameters of each module that has some, by the module's name."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
            found[name] = group
    return found
