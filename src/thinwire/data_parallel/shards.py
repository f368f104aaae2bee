"""FSDP2: a reducer in place of the reduce-scatter that gives each rank the gradients of its shards.

    fully_shard(model)
    attach(model, reducer)

FSDP2 hands over the gradients of one FSDP module as one flat buffer, (W, S): row w has, for one parameter after
the other, the rows of its gradient that rank w keeps, torch.chunk's w-th part, zero-padded to the size of the
first. So a parameter's columns, (W, piece), are the gradient itself and some zeros; its rows are units that no
owner shares. FSDP2 goes on when the call returns, so nothing is hidden behind the backward pass.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.collectives import Ledger, Slot, Wire
from thinwire.data_parallel.agreement import check_same_model, check_same_reducer
from thinwire.data_parallel.fsdp import BackwardPasses, not_sharded, param_groups_of
from thinwire.data_parallel.inputs import InputWatch
from thinwire.data_parallel.link import Link
from thinwire.data_parallel.parameters import (
    check_parameters,
    device_of,
    named_parameters,
    plain_name,
    trained_parameters,
)
from thinwire.geometry import Observer
from thinwire.reducers import Reducer


def attach_shards(
    called: nn.Module, model: nn.Module, reducer: Reducer, timeout: timedelta | None, ledger: Ledger | None
) -> Link:
    """Reduce and scatter the gradients of an FSDP2 model through `reducer`. `called`: what the user calls, `model`
    or what torch.compile made of it."""
    parameters = named_parameters(model)
    check_parameters(model, parameters)
    modules = dict(model.named_modules())
    groups = param_groups_of(model)
    _check(groups, trained_parameters(parameters), {id(p): name for name, p in parameters.items()})
    names = {id(p): name for name, p in parameters.items()}
    shards = {name: [_shard(p, names, group) for p in group.fsdp_params] for name, group in groups.items()}
    trained = {name: [shard for shard in mine if shard is not None] for name, mine in shards.items()}
    slots = [shard.slot for mine in trained.values() for shard in mine]
    group = next(iter(groups.values()))._reduce_scatter_process_group
    wire = Wire(group, device=device_of(parameters), timeout=timeout, ledger=ledger)
    try:
        check_same_model(wire, slots)
        check_same_reducer(wire, reducer)
        bound = reducer.bind(slots, wire)
    except BaseException:
        wire.close()
        raise
    native = {name: group._reduce_scatter_comm for name, group in groups.items()}

    def give_back() -> None:
        for name, comm in native.items():
            cast(Any, modules[name]).set_custom_reduce_scatter(comm)

    reference = weakref.ref(called)  # the model keeps its link, not the other way round

    def watch(observers: Callable[[], Mapping[str, Observer]]) -> InputWatch:
        return InputWatch(cast(nn.Module, reference()), observers, prefix="")

    link = Link({}, slots, bound, wire, on_detach=give_back, watch=watch)  # no two ranks hold the same
    passes = BackwardPasses(link)
    for name, mine in trained.items():
        if mine:
            comm = ReduceScatter(name or "the root module", mine, groups[name], passes)
            cast(Any, modules[name]).set_custom_reduce_scatter(comm)
    return link


@dataclass(frozen=True)
class _Shard:
    """One parameter in the flat buffer of its module."""

    slot: Slot
    """Of the whole parameter."""
    piece: int
    """Elements of a padded shard."""
    length: int
    """Elements of this rank's shard."""


class ReduceScatter:
    """FSDP2's interface of a custom reduce-scatter, for one FSDP module."""

    def __init__(self, module: str, shards: Sequence[_Shard], group: Any, passes: BackwardPasses) -> None:
        self._module = module
        self._shards = shards
        self._group = group
        self._passes = passes

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the flat buffers of gradients and of shards."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """input (W x S,) to output (S,): this rank's shards of what `op` makes of all ranks' gradients."""
        world_size = group.size()
        rows = input_tensor.view(world_size, -1)  # (W, S)
        pieces = [shard.piece for shard in self._shards]
        if rows.shape[1] != sum(pieces):
            names = ", ".join(shard.slot.name for shard in self._shards)
            raise ValueError(
                f"a parameter of {self._module} got no gradient in this backward pass, of {names}: which one "
                "FSDP2 does not say; freeze it, use it, or call model.set_reduce_scatter_unused_params(True)"
            )
        link = self._passes.link_of_this_pass()
        started = time.perf_counter()
        out = torch.zeros(rows.shape[1], device=rows.device)
        gradients, means = {}, {}
        for shard, columns, piece in zip(self._shards, rows.split(pieces, dim=1), out.split(pieces)):
            slot = shard.slot
            gradients[slot.name] = columns.reshape(-1)[: slot.numel].view(slot.shape)
            means[slot.name] = piece[: shard.length]
        link.reducer.reduce_scatter(gradients, means).wait()
        output_tensor.copy_(out.mul_(self._of_the_mean(op, world_size)))
        link.expose(since=started)

    def _of_the_mean(self, op: dist.ReduceOp.RedOpType, world_size: int) -> float:
        """What FSDP2 asks for, as a multiple of the mean."""
        if op == dist.ReduceOp.AVG:
            return 1.0
        if op == dist.ReduceOp.SUM:
            return float(world_size)
        return world_size / float(self._group.gradient_divide_factor)  # a sum of gradients divided before


def _shard(parameter: Any, names: Mapping[int, str], group: Any) -> _Shard | None:
    """None for a frozen parameter."""
    sharded = parameter.sharded_param
    if not sharded.requires_grad:
        return None
    shape = tuple(parameter._orig_size)
    policy = group.mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype or sharded.dtype
    row = max(1, parameter._orig_size.numel() // max(1, shape[0]))
    slot = Slot(names[id(sharded)], shape, dtype, unit=row)
    return _Shard(slot, parameter.padded_sharded_param_size.numel(), parameter.sharded_size.numel())


def _check(groups: Mapping[str, Any], trained: Mapping[str, nn.Parameter], names: Mapping[int, str]) -> None:
    held = {id(p.sharded_param) for group in groups.values() for p in group.fsdp_params}
    for name, parameter in trained.items():
        if id(parameter) not in held:
            raise not_sharded(name)
    ranks = {tuple(dist.get_process_group_ranks(g._reduce_scatter_process_group)) for g in groups.values()}
    if len(ranks) > 1:
        raise ValueError("attach: the model's parts are sharded over different ranks: shard all over one mesh")
    for group in groups.values():
        if isinstance(group._reduce_scatter_comm, ReduceScatter):
            raise ValueError(
                "this model has a link already: call its detach(), or close() of what tw.local_update returned, "
                "before attaching another reducer"
            )
        for parameter in group.fsdp_params:
            if parameter.fsdp_placement.dim != 0:
                name = plain_name(names[id(parameter.sharded_param)])
                raise ValueError(
                    f"{name!r} is sharded along dimension {parameter.fsdp_placement.dim}: only the first "
                    "one can be sharded under a reducer"
                )
