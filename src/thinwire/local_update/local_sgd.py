"""Local SGD (arXiv 1805.09767) and post-local SGD (arXiv 1808.07217): plain means of weights.

The mean of weights is the outer step of DiLoCo with a learning rate of 1 and no momentum, to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch.optim import SGD

from thinwire.local_update.method import Plan, is_number
from thinwire.reducers import Dense, Reducer

_to_the_mean = partial(SGD, lr=1.0)


@dataclass(frozen=True)
class LocalSGD:
    """All ranks take the mean of their weights every `every` steps.

    Sends what `reducer` sends of one float32 number per parameter and round.
    """

    every: int = 8
    """Inner steps of a round (H)."""
    reducer: Reducer = field(default_factory=Dense)
    """How what the ranks' steps come to is averaged."""

    def __post_init__(self) -> None:
        self.plan()

    def plan(self, total_steps: int | None = None) -> Plan:
        return Plan(self.every, self.reducer, _to_the_mean, rounds=0)


@dataclass(frozen=True)
class PostLocalSGD:
    """Data parallelism up to `start`, then local SGD, whose ranks may average gradients in groups.

    Sends what `inner` sends of the gradients, in each step until then over all ranks, later over those of a group,
    and what `reducer` sends every `every` steps from then on.
    """

    start: int | float = 0.5
    """Steps of data parallelism, or (a float) a fraction of the run's; in the paper's runs until the learning rate
    first falls."""
    every: int = 8
    """Inner steps of a round (H)."""
    groups: int | None = None
    """Groups of consecutive ranks that average gradients in every step; None: every rank is alone."""
    reducer: Reducer = field(default_factory=Dense)
    """How what the ranks' steps come to is averaged."""
    inner: Reducer = field(default_factory=Dense)
    """How gradients are averaged."""

    def __post_init__(self) -> None:
        self.plan(1)

    def plan(self, total_steps: int | None = None) -> Plan:
        start = self.start
        if not is_number(start) or not start >= 0 or (isinstance(start, float) and start > 1):
            raise ValueError(f"start must be a number of steps, or a fraction of the run's, got {start!r}")
        if isinstance(start, float):
            if total_steps is None:
                raise ValueError("start is a fraction of the run: pass total_steps to local_update")
            start = round(start * total_steps)
        return Plan(
            self.every, self.reducer, _to_the_mean, alike=start, groups=self.groups, inner=self.inner, rounds=0
        )
