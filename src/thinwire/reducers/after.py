"""After: a warm-up. The first `steps` reductions go through `before` (dense unless told), then `reducer`.

Early gradients are large and change quickly, so lossy reducers often start after some dense steps; reductions
are counted, and the count is part of the state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Slot, Wire
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.dense import Dense
from thinwire.reducers.parts import Parts
from thinwire.reducers.reducer import BoundReducer, Reducer, State, check_reducer


@dataclass(frozen=True)
class After:
    """`before`, which must keep no error memory, for the first `steps` reductions (synchronised backwards), then
    `reducer`. Bytes and memory are theirs."""

    steps: int
    reducer: Reducer
    before: Reducer = field(default_factory=Dense)

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "After")
        check_reducer(self.before, "After before")
        if self.steps < 0:
            raise ValueError(f"After needs a number of reductions of at least 0, got {self.steps}")

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundAfter:
        before = self.before.bind(slots, wire)
        if any("residual." in key for key in before.state_dict()):
            raise ValueError(
                "After's `before` keeps error memory, and what it still owes at the switch would never be sent: "
                "use one without feedback"
            )
        return BoundAfter(self.steps, Parts(before=before, after=self.reducer.bind(slots, wire)))

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        """After the warm-up."""
        return self.reducer.sent_bytes(slots, world_size)


class BoundAfter:
    """Two bound reducers and the count that chooses between them."""

    def __init__(self, steps: int, parts: Parts) -> None:
        self._steps = steps
        self._parts = parts
        self._reductions = 0

    @property
    def replicas(self) -> Literal["identical", "drift"]:
        return self._now.replicas

    @property
    def _now(self) -> BoundReducer:
        return self._parts["before" if self._reductions <= self._steps else "after"]

    @property
    def observers(self) -> Mapping[str, Observer]:
        following = self._parts["before" if self._reductions < self._steps else "after"]
        return following.observers

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return self._now.fidelity

    def begin(self) -> None:
        self._reductions += 1
        self._now.begin()

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        return self._now.all_reduce(named, weight=weight)

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        return self._now.reduce_scatter(named, out, weight=weight)

    def finite(self) -> bool:
        return self._now.finite()

    def rollback(self, names: Sequence[str] | None = None) -> None:
        self._now.rollback(names)

    def settle(self) -> None:
        self._now.settle()

    def set_loss_scale(self, scale: float) -> None:
        self._parts.set_loss_scale(scale)

    def state_dict(self) -> State:
        return self._parts.state_dict(self._reductions)

    def load_state_dict(self, state: State) -> None:
        self._reductions = self._parts.load_state_dict(state)

    def memory_bytes(self) -> int:
        return self._parts.memory_bytes()
