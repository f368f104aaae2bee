"""SlowMo (arXiv 1910.00643): means of weights, with a slow momentum in units of the inner learning rate.

Every `every` steps, with x the weights agreed on last, x_r those of rank r now and g the inner learning rate:

    u <- b u + (x - mean of x_r) / g        x <- x - a g u

That is SGD with momentum on x - mean of x_r, learning rate a, whose momentum is b g / (g of the round before).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from torch.optim import SGD

from thinwire.local_update.method import Moment, Plan, check_outer
from thinwire.reducers import Dense, Reducer


@dataclass(frozen=True)
class SlowMo:
    """Sends what `reducer` sends of one float32 number per parameter every `every` steps. The inner learning rate
    is that of the first parameters of the (first) inner optimizer at the end of the round: of all ranks the
    largest."""

    every: int = 12
    """Inner steps of a round (tau)."""
    slow_lr: float = 1.0
    """Alpha."""
    slow_momentum: float = 0.7
    """Beta."""
    reducer: Reducer = field(default_factory=Dense)
    """How what the ranks' steps come to is averaged."""

    def __post_init__(self) -> None:
        self.plan()

    def plan(self, total_steps: int | None = None) -> Plan:
        check_outer("slow", self.slow_lr, self.slow_momentum)
        make = partial(SGD, lr=self.slow_lr, momentum=self.slow_momentum)
        return Plan(self.every, self.reducer, make, settings=self._settings)

    def _settings(self, moment: Moment) -> Mapping[str, float]:
        grown = moment.inner_lr / moment.last_inner_lr if moment.last_inner_lr else 1.0
        return {"lr": self.slow_lr, "momentum": self.slow_momentum * grown}
