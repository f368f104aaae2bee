"""What a local-update method is: a frozen configuration that makes a plan. What carries it out is `engine.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from thinwire.reducers import Dense, Reducer
from thinwire.reducers.reducer import check_reducer

MakeOptimizer: TypeAlias = Callable[[list[Tensor]], Optimizer]
"""An optimizer of these tensors, such as `functools.partial(torch.optim.SGD, lr=0.7)`."""

Fragments: TypeAlias = int | tuple[tuple[str, ...], ...]
"""How many, or for each its parameters, by names and globs."""

Order: TypeAlias = Literal["strided", "sequential"]
"""Layer l of L belongs to fragment l mod F, or to fragment l F // L."""


@dataclass(frozen=True)
class Moment:
    """When an outer step is taken."""

    progress: float | None
    """Steps so far / all steps of the run; None where those are unknown."""
    inner_lr: float
    """Of the first parameters of the first inner optimizer."""
    last_inner_lr: float
    """The same, when the outer step before was taken."""
    alike: bool
    """Whether it is one of the first steps, in which all ranks average their gradients."""


Settings: TypeAlias = Callable[[Moment], Mapping[str, float]]
"""What the outer optimizer's groups are to be set to, such as {"lr": 0.7, "momentum": 0.9}."""


@dataclass(frozen=True)
class Plan:
    """What happens when. A *round* is `every` steps; in it each fragment is averaged once, at even distances."""

    every: int
    """Steps of a round."""
    reducer: Reducer
    """How pseudo-gradients are averaged."""
    outer: MakeOptimizer
    """What moves the agreed weights along the averaged pseudo-gradient."""
    fragments: Fragments = 1
    order: Order = "strided"
    delay: int = 0
    """Steps between sending a fragment's pseudo-gradient and applying the mean."""
    merge: float = 0.0
    """Weight of a rank's own weights when the agreed ones arrive."""
    settings: Settings | None = None
    """Of the outer optimizer before each of its steps; None: they stay as they are."""
    alike: int = 0
    """First steps, in which all ranks average their gradients and stay alike; nothing is averaged at the end of a
    round, whose weights become the anchors. With a learning rate of 0 the outer optimizer gathers momentum."""
    groups: int | None = None
    """Groups of consecutive ranks that average their gradients in every step; None: every rank is alone."""
    inner: Reducer = field(default_factory=Dense)
    """How gradients are averaged."""
    share_anchors: bool = False
    """Whether the ranks of a group share the anchors and what the outer optimizer keeps."""
    rounds: int = 50
    """Fewer in a run are warned of: momentum and schedules of an outer optimizer need some to pay."""
    offload: bool = False
    """Whether anchors and what the outer optimizer keeps stay in the memory of the host."""

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "a local-update method")
        check_reducer(self.inner, "a local-update method's inner")
        every, count, groups = self.every, self.count, self.groups
        few = f"1 to every, {every}" if count else "a number of at least 1, or names and globs of each fragment"
        gap = every // max(count, 1) if isinstance(every, int) else 0
        delay = isinstance(self.delay, int) and self.delay in range(gap)
        for key, value, fine, what in [
            ("every", every, isinstance(every, int) and every >= 1, "a whole number of at least 1"),
            ("fragments", self.fragments, isinstance(every, int) and 1 <= count <= every, few),
            ("order", self.order, self.order in ("strided", "sequential"), "'strided' or 'sequential'"),
            ("delay", self.delay, delay, f"0 to every // fragments - 1, {gap - 1}"),
            ("merge", self.merge, is_number(self.merge) and 0.0 <= self.merge <= 1.0, "from 0 to 1"),
            ("groups", self.groups, groups is None or (isinstance(groups, int) and groups >= 1), "at least 1"),
            ("outer", self.outer, callable(self.outer), "a function of the tensors that it moves"),
        ]:
            if not fine:
                raise ValueError(f"{key} must be {what}, got {value!r}")

    @property
    def count(self) -> int:
        """Fragments; 0 for what are none."""
        if isinstance(self.fragments, int):
            return self.fragments
        return len(self.fragments) if _are_names(self.fragments) else 0

    def sending(self, step: int) -> Sequence[int]:
        """The fragments whose pseudo-gradient is taken after step number `step`, from 1."""
        return self.arriving(step + self.delay)

    def arriving(self, step: int) -> Sequence[int]:
        """The fragments whose mean is applied after step number `step`."""
        within = (step - 1) % self.every + 1
        return [p for p in range(self.count) if (p + 1) * self.every // self.count == within]


@runtime_checkable
class Method(Protocol):
    """A frozen configuration."""

    def plan(self, total_steps: int | None = None) -> Plan:
        """What the engine is to do in a run of that many steps (None: unknown). Raises ValueError naming a setting
        that cannot be."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _are_names(fragments: object) -> bool:
    """Whether each fragment has a tuple of names."""
    return isinstance(fragments, tuple | list) and all(
        isinstance(names, tuple | list) and names and all(isinstance(name, str) for name in names)
        for names in fragments
    )


def check_outer(prefix: str, lr: float, momentum: float) -> None:
    """Raise ValueError with its key for a learning rate or momentum that cannot be."""
    if not (is_number(lr) and 0 <= lr < float("inf")):
        raise ValueError(f"{prefix}_lr must be a number of at least 0, got {lr!r}")
    if not (is_number(momentum) and 0 <= momentum < 1):
        raise ValueError(f"{prefix}_momentum must be from 0 to less than 1, got {momentum!r}")
