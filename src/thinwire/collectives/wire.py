"""The wire: one group of ranks, its process groups per phase, its worker and its ledger.

Collectives here move bytes (and, for the dense reducer, float32 sums); they know nothing of slots or
feedback. Each phase has a process group of its own, so that outstanding collectives of different phases
cannot meet, and each is used by the one worker thread alone, control traffic by the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.collectives.failures import CollectiveError, describe
from thinwire.collectives.ledger import CONTROL, Ledger, all_reduce_bytes
from thinwire.collectives.pipeline import Pending, Pipeline, Task


class Wire:
    """A group of ranks over which reducers average.

    `group` None is the default process group, or a world of one rank where none is initialised. `timeout`
    None is that of the group. Making a wire and asking for a phase are collective: all ranks of the group
    do both in the same order. `phases` are process groups that an earlier wire over the same group left (a
    process group costs threads and sockets until the program ends); this one adds its own to them. `ledger`
    (None: one of its own) counts this wire's bytes too.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        timeout: timedelta | None = None,
        scope: str = "world",
        phases: dict[str, dist.ProcessGroup] | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.scope = scope
        """What the ledger calls this group."""
        self.device = device or torch.device("cpu")
        """Where the tensors are that travel."""
        self.ledger = ledger or Ledger()
        self.keeps_memory = False
        """Whether a reducer on this wire keeps error memory, so that all of them watch for non-finite means."""
        self.rank, self.world_size = 0, 1
        self.ranks: list[int] = [0]
        """The ranks of the group in the world, by which people know them."""
        self._timeout = timeout
        self._phases = {} if phases is None else phases
        if dist.is_available() and dist.is_initialized():
            group = group if group is not None else dist.distributed_c10d._get_default_group()
            self.ranks = dist.get_process_group_ranks(group)
            self.rank, self.world_size = dist.get_rank(group), len(self.ranks)
            self._timeout = timeout or _group_timeout(group, self.device)
        self._pipeline = Pipeline(self.device, self._fail)
        self._seconds: list[Wire] = []
        if self.world_size > 1 and CONTROL not in self._phases:
            assert group is not None
            self._phases[CONTROL] = self._new_group(CONTROL, group)

    def phase(self, name: str) -> dist.ProcessGroup:
        """The process group of a phase, made at its first mention (then it is a collective call)."""
        if name not in self._phases:
            self._phases[name] = self._new_group(name, self._phases[CONTROL])
        return self._phases[name]

    def part(self, members: Sequence[int], scope: str, *, own_worker: bool = False) -> Wire:
        """The wire of some of these ranks, of which this one is one, by their numbers in this wire: with the same
        ledger, and the same worker unless it gets its own. All ranks of this wire call it, each with a part of
        its own."""
        part = copy.copy(self)
        if own_worker:
            part._pipeline = Pipeline(self.device, part._fail)
        part.scope, part._phases, part._seconds = scope, {}, []
        part.ranks = [self.ranks[member] for member in members]
        part.rank, part.world_size = members.index(self.rank), len(members)
        if self.world_size > 1:
            part._phases[CONTROL] = part._new_group(CONTROL, self._phases[CONTROL])
        return part

    def second(self) -> Wire:
        """A wire of the same ranks with a worker and process groups of its own, for collectives that begin when
        others are done. It is closed with this one, whose seconds include its own. Collective."""
        second = self.part(range(self.world_size), self.scope, own_worker=True)
        self._seconds.append(second)
        return second

    def _new_group(self, name: str, known: dist.ProcessGroup) -> dist.ProcessGroup:
        """A process group of this wire's ranks, made by all ranks of a group that is known, each for its wire.

        torch names a group after the number of those that its process is in. Where these numbers differ, as after
        a `new_group` of some ranks, ranks would wait for each other under different names; so whoever is in
        fewer makes groups of its own first.
        """
        own = dist.distributed_c10d._world.pg_names
        most = torch.tensor([len(own)], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=known)
        while len(own) < int(most):
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        new: dist.ProcessGroup = dist.new_group(
            self.ranks,
            timeout=self._timeout,
            use_local_synchronization=True,
            group_desc=f"thinwire {self.scope} {name}",
        )
        # Connect now: gloo's first collective on a group could otherwise outlast the timeout.
        dist.all_reduce(torch.zeros(1, device=self.device), group=new)
        return new

    @property
    def busy_seconds(self) -> float:
        """Seconds the worker spent computing (encode, decode, copy), waits excluded."""
        return self._pipeline.busy_seconds + sum(second.busy_seconds for second in self._seconds)

    @property
    def sending_seconds(self) -> float:
        """Seconds in which a collective of the worker was under way."""
        return self._pipeline.sending_seconds + sum(second.sending_seconds for second in self._seconds)

    @property
    def error(self) -> Exception | None:
        """What broke this wire, if anything did; nothing can be submitted after it."""
        return self._pipeline.error

    def submit(
        self, tasks: Sequence[Task], label: str, on_done: Callable[[], None] = lambda: None
    ) -> Future[None]:
        """Run `tasks` on the worker; `label` names the slots in errors."""
        return self._pipeline.submit(tasks, label, on_done)

    def lend(self, tensor: Tensor) -> Tensor:
        """Hand a tensor of the caller's to the worker: on CUDA it stays in memory until that is done with it."""
        return self._pipeline.lend(tensor)

    def all_to_all(self, out: Tensor, send: Tensor, *, counted_as: str = "scatter") -> Pending:
        """Start sending row i of `send`, uint8 (W-1, nbytes), to the i-th other rank, into the rows of `out`.

        Sends (W-1) nbytes, which the ledger counts as those of the phase `counted_as`; rows are the other ranks in
        rank order.
        """
        nbytes = send.shape[1]
        splits = [0 if rank == self.rank else nbytes for rank in range(self.world_size)]
        work = dist.all_to_all_single(
            out.view(-1), send.view(-1), splits, splits, group=self.phase("scatter"), async_op=True
        )
        self._record("all_to_all", counted_as, send.numel(), send.numel())
        return Pending("scatter", "all_to_all", work)

    def all_gather(self, out: Tensor, send: Tensor, *, counted_as: str = "gather") -> Pending:
        """Start gathering `send`, uint8 (nbytes,), of every rank into `out`, (W, nbytes).

        Sends (W-1) nbytes, which the ledger counts as those of the phase `counted_as`.
        """
        work = dist.all_gather_single(out.view(-1), send, group=self.phase("gather"), async_op=True)
        self._record("all_gather", counted_as, send.numel(), (self.world_size - 1) * send.numel())
        return Pending("gather", "all_gather", work)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Start summing `tensor` over the ranks in place. Sends 2 (W-1)/W of its bytes."""
        work = dist.all_reduce(tensor, group=self.phase("dense"), async_op=True)
        self._record("all_reduce", "dense", tensor.nbytes, all_reduce_bytes(tensor.nbytes, self.world_size))
        return Pending("dense", "all_reduce", work)

    def control_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce a small tensor over the ranks, in place and at once; counted as control traffic."""
        if self.world_size > 1:
            try:
                dist.all_reduce(tensor, op=op, group=self._phases[CONTROL])
            except RuntimeError as error:
                raise self._fail_control("all_reduce", error) from error
            sent = all_reduce_bytes(tensor.nbytes, self.world_size)
            self._record("all_reduce", CONTROL, tensor.nbytes, sent)
        return tensor

    def control_all_gather(self, tensor: Tensor) -> Tensor:
        """A small tensor of every rank, stacked, at once; counted as control traffic."""
        if self.world_size == 1:
            return tensor[None]
        out = tensor.new_empty((self.world_size, *tensor.shape))
        try:
            dist.all_gather_single(out.view(-1), tensor.view(-1), group=self._phases[CONTROL])
        except RuntimeError as error:
            raise self._fail_control("all_gather", error) from error
        self._record("all_gather", CONTROL, tensor.nbytes, (self.world_size - 1) * tensor.nbytes)
        return out

    def control_broadcast(self, tensor: Tensor) -> None:
        """Give all ranks what the first one has, in place and at once; counted as control traffic."""
        if self.world_size > 1:
            try:
                dist.broadcast(tensor, group_src=0, group=self._phases[CONTROL])
            except RuntimeError as error:
                raise self._fail_control("broadcast", error) from error
            self._record("broadcast", CONTROL, tensor.nbytes, tensor.nbytes if self.rank == 0 else 0)

    def close(self) -> None:
        """End the worker. The process groups live on, as torch's do, until destroy_process_group."""
        self._pipeline.close()
        for second in self._seconds:
            second.close()

    def release(self) -> None:
        """Let the worker end when it is idle, without waiting for it."""
        self._pipeline.release()
        for second in self._seconds:
            second.release()

    def _record(self, op: str, phase: str, payload: int, sent: int) -> None:
        self.ledger.record(op, phase=phase, scope=self.scope, payload_bytes=payload, sent_bytes=sent)

    def _fail_control(self, op: str, error: Exception) -> CollectiveError:
        """As `_fail`, for a collective that the worker does not see."""
        self._pipeline.error = failure = self._fail(op, "control values", error)
        return failure

    def _fail(self, op: str, label: str, error: Exception) -> CollectiveError:
        """The error that callers see. No phase of this wire is of use any more."""
        abort_nccl(self._phases.values(), self.device)
        name = self._phases[CONTROL].group_name if self.world_size > 1 else ""
        what = f"{op} of {label} failed"
        return CollectiveError(
            describe(what, error, rank=self.ranks[self.rank], ranks=self.ranks, group_name=name)
        )


def abort_nccl(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """Abort the NCCL communicators among `groups`: their kernels would wait for a missing rank for ever, and those
    of its peers for this one. (On gloo a collective ends with the connection or the timeout.)"""
    for group in groups:
        if group._get_backend(device).name() == "nccl":
            group.abort()


def _group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
