"""The ranks that hold the same weights: what they check, start from, average and compute for each other."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from thinwire.collectives import Wire
from thinwire.collectives.pipeline import Task

Replicate: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""The ranks that hold the same weights; None: the default process group, or a world of one."""


class Replicas:
    """A wire and what goes over it. Making one is collective: the ranks compare their parameters, and get the
    values of the first rank's."""

    def __init__(
        self, who: str, parameters: Mapping[str, Tensor], replicate: Replicate, timeout: timedelta | None
    ):
        self._who = who
        self._parameters = parameters
        self._compared = False
        device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.wire = Wire(group_of(replicate, who), device=device, timeout=timeout)
        if self.wire.world_size > 1:
            self.wire.phase("gather")
        self._check_same_parameters()
        self._start_equal()

    def have_gradients(self) -> set[str]:
        """Names of the parameters that have a gradient on any rank; on the others it becomes zeros.
        Control traffic: an all-reduce of a byte per parameter."""
        flags = torch.tensor([p.grad is not None for p in self._parameters.values()], dtype=torch.uint8)
        found = self.wire.control_all_reduce(flags.to(self.wire.device), dist.ReduceOp.MAX).tolist()
        used = {name for name, flag in zip(self._parameters, found) if flag}
        for name in used:
            if self._parameters[name].grad is None:
                self._parameters[name].grad = torch.zeros_like(self._parameters[name])
        return used

    def compare_gradients(self, *, averaged_here: bool) -> None:
        """In the first step: the gradients of ranks with different data are equal where, and only where, somebody
        else averaged them. Control traffic: 16 bytes to each rank. Raises RuntimeError on every rank."""
        if self._compared or self.wire.world_size == 1:
            return
        self._compared = True
        sums = torch.zeros(2, dtype=torch.float64, device=self.wire.device)
        for gradient in (p.grad for p in self._parameters.values()):
            if gradient is not None and gradient.numel():
                sums += torch.stack([gradient.double().sum(), gradient.double().abs().sum()])
        everywhere = self.wire.control_all_gather(sums)
        equal = bool((everywhere == everywhere[0]).all())
        if averaged_here and equal and bool(everywhere.any()):
            raise RuntimeError(
                f"{self._who}: the gradients of all ranks are equal before they were averaged: DDP averages them "
                "already (attach tw.Local() to the model first), or all ranks read the same data"
            )
        if not averaged_here and not equal and bool(everywhere.isfinite().all()):
            raise RuntimeError(
                f"{self._who}: the gradients of the ranks differ: give reducer=tw.Dense(), or let "
                "DistributedDataParallel or tw.attach average them; under tw.local_update every rank is alone: "
                "give replicate=dist.new_group([rank], use_local_synchronization=True)"
            )

    def compute_for_each_other(
        self, shapes: Sequence[tuple[int, int]], compute: Callable[[list[int]], list[Tensor]], dtype: torch.dtype
    ) -> list[Tensor]:
        """A matrix of each of `shapes`, in `dtype`: every rank computes its share, `compute(indices)`, and all get
        all. Sends (W-1) x the elements of the largest share, of all matrices a W-th or little more. No reduction
        may be under way: it would use the same process group."""
        wire = self.wire
        if wire.world_size == 1 or not shapes:
            return compute(list(range(len(shapes))))
        shares = deal([rows * columns for rows, columns in shapes], wire.world_size)
        room = max(sum(shapes[i][0] * shapes[i][1] for i in share) for share in shares)
        own = torch.zeros(room, dtype=dtype, device=wire.device)
        at = 0
        for matrix in compute(shares[wire.rank]):
            own[at : at + matrix.numel()].view(matrix.shape).copy_(matrix)
            at += matrix.numel()
        everybody = own.new_empty(wire.world_size, room)

        def gather() -> Task:
            yield wire.all_gather(everybody.view(torch.uint8), own.view(torch.uint8))

        wire.lend(own)
        wire.lend(everybody)
        wire.submit([gather()], f"updates of {len(shapes)} matrices").wait()
        found: dict[int, Tensor] = {}
        for share, row in zip(shares, everybody):
            sizes = [shapes[i][0] * shapes[i][1] for i in share]
            pieces = row[: sum(sizes)].split(sizes)
            found.update({i: piece.view(shapes[i]) for i, piece in zip(share, pieces)})
        return [found[i] for i in range(len(shapes))]

    def _check_same_parameters(self) -> None:
        lines = [f"{name} {p.dtype} {tuple(p.shape)}" for name, p in self._parameters.items()]
        counts = (
            self.wire.control_all_gather(torch.tensor([len(lines)], device=self.wire.device)).flatten().tolist()
        )
        if len(set(counts)) > 1:
            raise ValueError(f"{self._who}: ranks optimize different numbers of parameters: {counts}, by rank")
        if not lines:
            return
        hashes = torch.tensor([list(hashlib.sha256(line.encode()).digest()[:8]) for line in lines])
        everywhere = self.wire.control_all_gather(hashes.to(torch.uint8).to(self.wire.device))
        for line, equal in zip(lines, (everywhere == everywhere[0]).all(0).all(-1).tolist()):
            if not equal:
                raise ValueError(
                    f"{self._who}: ranks optimize different parameters: here {line}, elsewhere another; build the "
                    "same model and groups on every rank"
                )

    @torch.no_grad()
    def _start_equal(self) -> None:
        """All ranks start from the parameters of the first, as under DDP."""
        for parameter in self._parameters.values() if self.wire.world_size > 1 else ():
            whole = parameter.detach().contiguous()
            self.wire.control_broadcast(whole)
            parameter.copy_(whole)


def deal(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices for each rank: the largest first, each to whoever has least."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = load.index(min(load))
        shares[rank].append(index)
        load[rank] += sizes[index]
    return shares


def group_of(replicate: Replicate, who: str) -> dist.ProcessGroup | None:
    """The process group. Raises TypeError or ValueError for what is none, or several."""
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ValueError(f"{who}: replicate must be one dimension of a mesh, such as mesh['replicate']")
        return replicate.get_group()
    if replicate is not None and not isinstance(replicate, dist.ProcessGroup):
        raise TypeError(
            f"{who}: replicate must be a process group or a mesh that this rank is in, got {replicate!r:.200}"
        )
    return replicate
