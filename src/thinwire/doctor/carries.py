"""Which dtypes each collective of a backend carries here: tried, not recited.

Every collective moves or sums a small tensor of known content on all ranks of a group; "carried"
means that the right bytes arrived. A backend refuses a dtype before it sends anything, so ranks stay in step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
)
ELEMENTS = 16

# What a training job issues; without these it cannot run. (Narrow floats travel as uint8.)
NEEDED = (
    ("all_reduce", "float32"),
    ("all_reduce", "float64"),
    ("all_to_all", "uint8"),
    ("all_gather", "uint8"),
    ("broadcast", "uint8"),
)


@dataclass(frozen=True)
class Trial:
    """A group, this rank's place in it, and what it tries to send."""

    group: dist.ProcessGroup
    rank: int
    world: int
    dtype: torch.dtype
    device: torch.device

    def content(self, rank: int) -> Tensor:
        """What tells the ranks apart; zeros and ones, so that every dtype holds them and their sum."""
        pattern = (torch.arange(ELEMENTS) // (rank + 1)) % 2
        return pattern.to(torch.float32).to(self.dtype).to(self.device)

    def empty(self) -> Tensor:
        return torch.empty(ELEMENTS, dtype=self.dtype, device=self.device)

    def total(self) -> Tensor:
        """The sum of all ranks' content."""
        parts = [self.content(rank) for rank in range(self.world)]
        if self.dtype == torch.bool:
            return torch.stack(parts).any(0)
        wide = torch.complex64 if self.dtype.is_complex else torch.float32
        return torch.stack([part.to(wide) for part in parts]).sum(0).to(self.dtype)


Collective = Callable[[Trial], bool]


def carried_dtypes(group: dist.ProcessGroup, device: torch.device) -> dict[str, dict[str, str]]:
    """collective -> dtype -> "yes", or why not. All ranks of the group must call this."""
    found: dict[str, dict[str, str]] = {}
    for name, collective in COLLECTIVES.items():
        for dtype in DTYPES:
            trial = Trial(group, group.rank(), group.size(), dtype, device)
            found.setdefault(name, {})[str(dtype).removeprefix("torch.")] = _attempt(collective, trial)
    return found


def _attempt(collective: Collective, trial: Trial) -> str:
    try:
        arrived = collective(trial)
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return "yes" if arrived else "wrong bytes arrive"


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _all_reduce(trial: Trial) -> bool:
    tensor = trial.content(trial.rank)
    dist.all_reduce(tensor, group=trial.group)
    return _same(tensor, trial.total())


def _reduce_scatter(trial: Trial) -> bool:
    piece = trial.empty()
    dist.reduce_scatter_single(piece, trial.content(trial.rank).repeat(trial.world), group=trial.group)
    return _same(piece, trial.total())


def _all_to_all(trial: Trial) -> bool:
    sent = trial.content(trial.rank).repeat(trial.world)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=trial.group)
    return all(_same(part, trial.content(rank)) for rank, part in enumerate(received.split(ELEMENTS)))


def _all_gather(trial: Trial) -> bool:
    received = [trial.empty() for _ in range(trial.world)]
    dist.all_gather(received, trial.content(trial.rank), group=trial.group)
    return all(_same(part, trial.content(rank)) for rank, part in enumerate(received))


def _broadcast(trial: Trial) -> bool:
    tensor = trial.content(trial.rank)
    dist.broadcast(tensor, group=trial.group, group_src=0)
    return _same(tensor, trial.content(0))


def _send_recv(trial: Trial) -> bool:
    if trial.world == 1:
        raise ValueError("needs two ranks")
    received = trial.empty()
    to, source = (trial.rank + 1) % trial.world, (trial.rank - 1) % trial.world
    operations = [
        dist.P2POp(dist.isend, trial.content(trial.rank), group=trial.group, group_peer=to),
        dist.P2POp(dist.irecv, received, group=trial.group, group_peer=source),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return _same(received, trial.content(source))


COLLECTIVES: dict[str, Collective] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
