"""DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512).

Ranks start from common weights w and take steps of their own, to w_r. Their mean distance, the *pseudo-gradient*
mean of (w - w_r), is what an outer optimizer takes a step with; all ranks go on from where that leads. Inner
optimizer states stay with their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from torch.optim import SGD

from thinwire.local_update.method import Fragments, MakeOptimizer, Order, Plan, check_outer
from thinwire.reducers import Dense, Quantized, Reducer


@dataclass(frozen=True)
class DiLoCo:
    """All weights at once, every `every` steps; everybody waits.

    Sends what `reducer` sends of one float32 number per parameter and round: 8 (W-1)/W / every bytes per
    parameter, step and rank for Dense.
    """

    every: int = 500
    """Inner steps of a round (H)."""
    outer_lr: float = 0.7
    """Of the outer SGD."""
    outer_momentum: float = 0.9
    """Of the outer SGD."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""
    outer: MakeOptimizer | None = None
    """Another outer optimizer in place of SGD, such as `functools.partial(torch.optim.Adam, lr=0.1)`."""
    reducer: Reducer = field(default_factory=Dense)
    """How pseudo-gradients are averaged, such as `tw.Quantized("int8", feedback="error")`."""

    def __post_init__(self) -> None:
        self.plan()

    def plan(self, total_steps: int | None = None) -> Plan:
        return Plan(self.every, self.reducer, outer_sgd(self))


@dataclass(frozen=True)
class StreamingDiLoCo:
    """A fragment of the weights at a time, while training goes on.

    Each fragment is averaged once in `every` steps. Its pseudo-gradient is taken and sent, `delay` more steps are
    taken meanwhile, then its agreed weights are merged with those that the rank has by now:
    `merge` x own + (1 - merge) x agreed. No step waits for more than one fragment, and none if `delay` steps
    take longer than sending it.
    """

    every: int = 100
    """Inner steps of a round (H)."""
    fragments: Fragments = 4
    """Into how many fragments of layers (F), of equal bytes to a tenth; or each one's names and globs."""
    order: Order = "strided"
    """Layer l of L belongs to fragment l mod F, or ("sequential") to l F // L."""
    delay: int = 1
    """Inner steps that communication may take (tau), fewer than every // fragments."""
    merge: float = 0.5
    """Weight of a rank's own weights in the merge (alpha)."""
    outer_lr: float = 0.4
    """Of the outer SGD."""
    outer_momentum: float = 0.9
    """Of the outer SGD."""
    nesterov: bool = True
    """Whether that momentum is Nesterov's."""
    outer: MakeOptimizer | None = None
    """Another outer optimizer in place of SGD."""
    reducer: Reducer = field(default_factory=partial(Quantized, "fp4_e3m0"))
    """How pseudo-gradients are averaged."""

    def __post_init__(self) -> None:
        self.plan()

    def plan(self, total_steps: int | None = None) -> Plan:
        return Plan(self.every, self.reducer, outer_sgd(self), self.fragments, self.order, self.delay, self.merge)


def outer_sgd(method: DiLoCo | StreamingDiLoCo) -> MakeOptimizer:
    if method.outer is not None:
        return method.outer
    momentum = method.outer_momentum
    check_outer("outer", method.outer_lr, momentum)
    return partial(SGD, lr=method.outer_lr, momentum=momentum, nesterov=method.nesterov and momentum > 0)
