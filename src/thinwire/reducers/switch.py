"""A reducer that is one of several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from torch import Tensor
from torch.futures import Future

from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.parts import Parts
from thinwire.reducers.reducer import BoundReducer, State


class Switch:
    """Passes everything to the part that `choose(reduction)` names, by the reduction's number from 1; state is of
    all parts."""

    def __init__(self, parts: Parts, choose: Callable[[int], str]) -> None:
        self._parts = parts
        self._choose = choose
        self._reductions = 0

    @property
    def now(self) -> BoundReducer:
        """The part that reduces; before the first reduction, the one that will."""
        return self._parts[self._choose(max(1, self._reductions))]

    @property
    def replicas(self) -> Literal["identical", "drift"]:
        return self.now.replicas

    @property
    def observers(self) -> Mapping[str, Observer]:
        """Of the next reduction."""
        return self._parts[self._choose(self._reductions + 1)].observers

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return self.now.fidelity

    def begin(self) -> None:
        self._reductions += 1
        self.now.begin()

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        return self.now.all_reduce(named, weight=weight)

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        return self.now.reduce_scatter(named, out, weight=weight)

    def finite(self) -> bool:
        return self.now.finite()

    def rollback(self, names: Sequence[str] | None = None) -> None:
        self.now.rollback(names)

    def settle(self) -> None:
        self.now.settle()

    def set_loss_scale(self, scale: float) -> None:
        self._parts.set_loss_scale(scale)

    def state_dict(self) -> State:
        return self._parts.state_dict(self._reductions)

    def load_state_dict(self, state: State) -> None:
        self._reductions = self._parts.load_state_dict(state)

    def memory_bytes(self) -> int:
        return self._parts.memory_bytes()
