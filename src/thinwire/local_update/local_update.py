"""`local_update`: a script whose ranks train on their own and average now and then."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from thinwire.collectives import Slot, Wire
from thinwire.data_parallel import attach
from thinwire.data_parallel.agreement import check_same_method, check_same_model, ranks_that_differ
from thinwire.data_parallel.fsdp import group_along, is_fsdp2, replicate_group, reshard, shard_groups
from thinwire.data_parallel.parameters import (
    check_parameters,
    device_of,
    is_sharded,
    local_part,
    named_parameters,
    plain_name,
    slots_of,
    trained_parameters,
)
from thinwire.local_update.anchors import Anchors
from thinwire.local_update.buffers import Buffers
from thinwire.local_update.engine import LocalUpdate
from thinwire.local_update.fragments import cut
from thinwire.local_update.inner import Averaged, Inner, InnerMean, members_of_group
from thinwire.local_update.method import Method, Plan
from thinwire.local_update.weights import Weights, wide
from thinwire.reducers.reducer import is_configuration

logger = logging.getLogger(__name__)


def local_update(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    method: Method,
    *,
    total_steps: int | None = None,
    group: dist.ProcessGroup | None = None,
    replicate: DeviceMesh | None = None,
    sync_buffers: bool = True,
    timeout: timedelta | None = None,
) -> LocalUpdate:
    """Let every rank train `model` with `optimizer` on its own data, and average as `method` says.

    `model` is a bare module, which then gets the parameters and buffers of the first rank, or a
    DistributedDataParallel model, whose own averaging of gradients and buffers stops until `close()`, or a
    sharded one (FSDP2, tensor parallel), of which every rank averages its own shards with the ranks along the mesh
    dimension `replicate`, and gets those of the first among them. `group` (None: DDP's, or the default one) are
    the ranks that average whole parameters; without torch.distributed a world of one. Several optimizers, such as
    Muon and AdamW, are given as a list.

    Where the method averages gradients in every step, that happens in the backward pass of a DDP or FSDP2 model,
    and of any other when the first optimizer takes its step, after the script has clipped each rank's own.

    With `sync_buffers` the ranks take the mean of floating point buffers and the largest of integer ones at the
    end of every round (where they are equal, 8 bytes are sent); otherwise each keeps its own.

    Collective: call it on all ranks at the same point. `timeout` ends a collective that hangs (None: that of the
    group). With `total_steps`, the steps of the run, a warning says if they are too few rounds for an outer
    optimizer; some methods need it.

    Raises ValueError for parameters that cannot be averaged, an optimizer of other parameters, ranks with
    different models or methods, a sharded model without `replicate`; TypeError for FSDP1.
    """
    if not is_configuration(method, Method):
        raise TypeError(f"local_update needs a method such as tw.DiLoCo(), got {method!r:.200}")
    if not isinstance(sync_buffers, bool):
        raise TypeError(f"local_update: sync_buffers must be True or False, got {sync_buffers!r}")
    if total_steps is not None and (not isinstance(total_steps, int) or total_steps < 1):
        raise ValueError(f"total_steps must be the steps of the run, got {total_steps!r}")
    plan = method.plan(total_steps)
    target = _Target.of(model, group, replicate, plan)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    refusal = _refusal(optimizers, target.module)
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first and total_steps is not None and total_steps < plan.rounds * plan.every:
        logger.warning(
            "%d steps are %d rounds of %d: outer momentum and its schedules need some %d, and with fewer a run "
            "ends above plain averaging",
            *(total_steps, total_steps // plan.every, plan.every, plan.rounds),
        )
    sizes = {name: p.numel() * wide(p).itemsize for name, p in target.trained.items()}  # the same on all ranks
    fragments = cut(sizes, plan.fragments, plan.order)
    with ExitStack() as stack:
        wire = _closing(stack, Wire(target.group, device=device_of(target.parameters), timeout=timeout))
        check_same_model(wire, [*slots_of(target.parameters), *_started_equal(target)])
        check_same_method(wire, method)
        _check_same_arguments(wire, refusal, total_steps=total_steps or 0, sync_buffers=sync_buffers)
        _start_equal(target, wire)
        inner = _average_gradients(target, plan, optimizers, wire, stack, timeout)
        weights, across = _share(target, plan, wire, stack, timeout)
        return LocalUpdate(
            weights=weights,
            anchors=Anchors(weights, plan.outer, device=wire.device, offload=plan.offload),
            buffers=Buffers(lambda: target.buffers, wire) if sync_buffers else None,
            plan=plan,
            fragments=fragments,
            reducer=plan.reducer.bind(weights.slots(), across),
            wire=wire,
            across=across,
            optimizers=optimizers,
            total_steps=total_steps,
            inner=inner,
            frozen={name: p for name, p in target.parameters.items() if not p.requires_grad},
            resources=stack.pop_all(),
            method=type(method).__name__,
        )


@dataclass(frozen=True)
class _Target:
    """The model, and who holds what of it."""

    called: nn.Module
    """What the script calls: perhaps compiled."""
    module: nn.Module
    """Without DDP."""
    ddp: DistributedDataParallel | None
    group: dist.ProcessGroup | None
    """The ranks that average."""
    replicate: DeviceMesh | None
    parameters: Mapping[str, nn.Parameter]

    @classmethod
    def of(
        cls, called: nn.Module, group: dist.ProcessGroup | None, replicate: DeviceMesh | None, plan: Plan
    ) -> _Target:
        bare = getattr(called, "_orig_mod", called)
        if not isinstance(bare, nn.Module):
            raise TypeError(f"local_update needs a model, an nn.Module, got {type(called).__name__}")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"local_update: group must be a process group that this rank is in, got {group!r:.200}"
            )
        reshard(bare)
        ddp = bare if isinstance(bare, DistributedDataParallel) else None
        if ddp is not None:
            if replicate is not None:
                raise ValueError(
                    "local_update: replicate is for sharded models; DDP averages over its process group"
                )
            if group not in (None, ddp.process_group):
                raise ValueError("local_update: DDP averages over its own process group: leave group out")
            group = ddp.process_group
        if group is not None and replicate is not None:
            raise ValueError("local_update: replicate says which ranks average: leave group out")
        if is_sharded(bare):
            group = replicate_group(bare, replicate, "local_update")
            if plan.groups is not None:
                raise ValueError(
                    "groups: those of a sharded model are the ranks that share its shards; leave the number out"
                )
        elif replicate is not None:
            group = group_along(replicate, "local_update")
        if plan.share_anchors and plan.groups is None:
            raise ValueError("shard_reference shares anchors among the ranks of a group: say how many groups")
        module = ddp.module if ddp is not None else bare
        parameters = named_parameters(module, ignored=ddp.parameters_to_ignore if ddp is not None else ())
        check_parameters(module, parameters)
        if not trained_parameters(parameters):
            raise ValueError("local_update: the model has no parameters that take gradients")
        return cls(called, module, ddp, group, replicate, parameters)

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return trained_parameters(self.parameters)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """By plain name, without those that DDP was told to ignore."""
        ignored = self.ddp.parameters_to_ignore if self.ddp is not None else ()
        return {plain_name(name): b for name, b in self.module.named_buffers() if name not in ignored}


def _average_gradients(
    target: _Target,
    plan: Plan,
    optimizers: Sequence[Optimizer],
    wire: Wire,
    stack: ExitStack,
    timeout: timedelta | None,
) -> Inner | None:
    """What averages gradients between the rounds, if anything is to; DDP's own averaging ends in any case."""
    mean = InnerMean(plan.inner, plan.groups, alike=plan.alike > 0)
    averages = plan.alike > 0 or plan.groups is not None
    if target.ddp is not None:
        stack.callback(setattr, target.ddp, "broadcast_buffers", target.ddp.broadcast_buffers)
        target.ddp.broadcast_buffers = False
    if target.ddp is not None or (averages and is_fsdp2(target.module)):
        link = attach(target.called, mean, replicate=target.replicate, timeout=timeout, ledger=wire.ledger)
        stack.callback(link.detach)
        return link
    if not averages:
        return None
    own = _closing(stack, Wire(target.group, device=wire.device, timeout=timeout, ledger=wire.ledger))
    bound = mean.bind(slots_of(target.parameters), own)
    held = {name: p for name, p in target.trained.items() if local_part(p).numel()}
    averaged = Averaged(optimizers, held, bound)
    stack.callback(averaged.detach)
    return averaged


def _share(
    target: _Target, plan: Plan, wire: Wire, stack: ExitStack, timeout: timedelta | None
) -> tuple[Weights, Wire]:
    """What of the weights this rank averages, and with whom."""
    if not plan.share_anchors or plan.groups is None or wire.world_size == 1:
        shards = [
            _closing(stack, Wire(group, device=wire.device, timeout=timeout, scope="shards", ledger=wire.ledger))
            for group in shard_groups(target.parameters.values())
        ]
        return Weights(target.trained, shards=shards, open_=partial(reshard, target.module)), wire
    members = members_of_group(plan.groups, wire)
    size, place = len(members), wire.rank - members[0]
    # With a worker of its own: when a rank of another group is gone, the group still has to go back.
    group = _closing(stack, wire.part(members, "group", own_worker=True))
    group.phase("gather")
    across = wire.part(range(place, wire.world_size, size), "between groups")
    return Weights(target.trained, group), across


def _closing(stack: ExitStack, wire: Wire) -> Wire:
    stack.callback(wire.close)
    return wire


def _refusal(optimizers: Sequence[Optimizer], module: nn.Module) -> Exception | None:
    """What is wrong with the optimizers, perhaps on this rank alone."""
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, Optimizer) for each in optimizers):
        kind = type(optimizers).__name__
        return TypeError(f"local_update needs the optimizer that trains the model, or a list of some, got {kind}")
    if not optimizers:
        return ValueError("local_update needs the optimizer that trains the model, got none")
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if foreign := [parameter for parameter in optimized if id(parameter) not in known]:
            return ValueError(
                f"local_update: the optimizer has {len(foreign)} of {len(optimized)} parameters that are not the "
                "model's: build it from model.parameters() after the model is where it trains"
            )
    return None


def _check_same_arguments(wire: Wire, refusal: Exception | None, **arguments: int) -> None:
    """Raise on every rank what one of them refuses, or ValueError for an argument in which they differ."""
    own = torch.tensor([refusal is not None, *arguments.values()], device=wire.device)
    refused, *given = wire.control_all_gather(own).t().tolist()
    if refusal is not None:
        raise refusal
    if any(refused):
        raise ValueError(
            f"local_update: rank {wire.ranks[refused.index(1)]} has an optimizer that does not fit; its own error "
            "says why"
        )
    for key, values in zip(arguments, given):
        if unlike := [rank for rank, value in zip(wire.ranks, values) if value != values[0]]:
            raise ValueError(
                f"local_update: {key} differs between rank {wire.ranks[0]} and rank {unlike[0]}: use the same on "
                "every rank"
            )


def _started_equal(target: _Target) -> list[Slot]:
    """What `_start_equal` sends."""
    return [Slot(n, tuple(local_part(t).shape), t.dtype) for n, t in _to_start_equal(target).items()]


def _to_start_equal(target: _Target) -> dict[str, Tensor]:
    """Parameters, and buffers of a model without DDP, which has its own rules for them."""
    named: dict[str, Tensor] = {f"parameter {name}": p for name, p in target.parameters.items()}
    if target.ddp is None:
        named |= {f"buffer {name}": buffer for name, buffer in target.buffers.items()}
    return named


@torch.no_grad()
def _start_equal(target: _Target, wire: Wire) -> None:
    """All ranks start from the parameters and buffers of the first, as under DDP; a DDP model as well, which
    earlier local updates may have left different on each rank."""
    named = _to_start_equal(target)
    if (
        target.ddp is not None
        and ranks_that_differ(wire, [p for p in named.values() if p.numel()])
        and wire.rank == 0
    ):
        logger.warning(
            "the ranks of this DDP model hold different weights, and start from the first's: load a checkpoint "
            "after tw.local_update, not before"
        )
    for tensor in map(local_part, named.values()):
        if tensor.numel():
            whole = tensor.contiguous()
            wire.control_broadcast(whole)
            tensor.copy_(whole)
