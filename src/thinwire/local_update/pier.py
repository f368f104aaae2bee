"""Pier (arXiv 2511.17849): DiLoCo whose ranks first train alike, gathering momentum, and then in groups.

In the first tenth of a run all ranks average their gradients in every step, as under data parallelism, and the
outer momentum M grows with what each round moves, without acting on the weights. From then on gradients are
averaged within groups of ranks only, and every `every` steps all ranks average their pseudo-gradients d:

    M <- m(p) M + d        w <- w - lr(p) (d + m(p) M)        p: the steps so far / those of the run

The stepped schedules are those of the authors' scripts; the smooth ones those of a later version of their code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch.optim import SGD

from thinwire.local_update.method import Moment, Plan, is_number
from thinwire.local_update.schedule import Schedule, check_schedule, value_at
from thinwire.reducers import Dense, Reducer

STEPPED_LR: Schedule = ((0.10, 0.0, 1.0), (0.20, 1.1), (0.80, 0.9))
STEPPED_MOMENTUM: Schedule = ((0.0, 0.9), (0.10, 0.99), (0.15, 0.95), (0.20, 0.9))
SMOOTH_LR: Schedule = ((0.10, 0.0, 1.1), (0.20, 1.1, 0.9, "cosine"))
SMOOTH_MOMENTUM: Schedule = ((0.0, 0.9), (0.10, 0.99, 0.9, "cosine"))


@dataclass(frozen=True)
class Pier:
    """Needs `total_steps`, of which its schedules are fractions.

    Sends what `inner` sends of the gradients in every step, at first over all ranks, later over those of a group,
    and what `reducer` sends of one float32 number per parameter every `every` steps: 8 (W-1)/W / every bytes per
    parameter, step and rank for Dense.
    """

    every: int = 50
    """Inner steps of a round (H)."""
    groups: int | None = None
    """Groups of consecutive ranks that average gradients in every step (m); None: every rank is a group."""
    warmup: float = 0.10
    """The fraction of the run in which all ranks average gradients."""
    outer_lr: Schedule = STEPPED_LR
    """Of the outer SGD, by the fraction of the run; `pier.SMOOTH_LR` is the other one."""
    outer_momentum: Schedule = STEPPED_MOMENTUM
    """Of the outer SGD; the first stretch is that of the warm-up."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""
    reducer: Reducer = field(default_factory=Dense)
    """How pseudo-gradients are averaged over all ranks."""
    inner: Reducer = field(default_factory=Dense)
    """How gradients are averaged."""
    shard_reference: bool = False
    """Whether the ranks of a group share the anchors and the outer momentum: each keeps a part, averages it with
    those who keep the same part in the other groups, and sends the others of its group the result."""
    offload: bool = False
    """Whether anchors and outer momentum stay in the memory of the host."""

    def __post_init__(self) -> None:
        check_schedule("outer_lr", self.outer_lr)
        check_schedule("outer_momentum", self.outer_momentum, below=1.0)
        if not is_number(self.warmup) or not 0 <= self.warmup < 1:
            raise ValueError(f"warmup must be from 0 to less than 1, a fraction of the run, got {self.warmup!r}")
        if self.warmup < self.outer_lr[0][0]:
            raise ValueError(
                f"warmup {self.warmup} ends before outer_lr starts, at {self.outer_lr[0][0]} of the run: rounds "
                "in between would be thrown away; make the warm-up longer, or let outer_lr start earlier"
            )
        self.plan(1)

    def plan(self, total_steps: int | None = None) -> Plan:
        if total_steps is None:
            raise ValueError("Pier's schedules are fractions of the run: pass total_steps to local_update")
        return Plan(
            self.every,
            self.reducer,
            partial(SGD, lr=0.0, momentum=0.9, nesterov=self.nesterov),  # until the schedules set both
            settings=self._settings,
            alike=int(self.warmup * total_steps + 1e-9),
            groups=self.groups,
            inner=self.inner,
            share_anchors=self.shard_reference,
            offload=self.offload,
        )

    def _settings(self, moment: Moment) -> Mapping[str, float]:
        assert moment.progress is not None
        if moment.alike:
            return {"lr": 0.0, "momentum": value_at(self.outer_momentum, 0.0)}
        at = moment.progress
        return {"lr": value_at(self.outer_lr, at), "momentum": value_at(self.outer_momentum, at)}
