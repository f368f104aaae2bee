"""Routed: each slot through the reducer that suits it.

By default matrices of at least 4096 elements go through the given reducer and everything else (biases,
norms, tiny matrices: a percent of the bytes, and the part that low precision hurts most) through `Dense()`.
Routes nest: `Routed(a, "embed*", otherwise=Routed(b))`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.futures import Future, collect_all

from thinwire.collectives import Slot, Wire
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.dense import Dense
from thinwire.reducers.parts import Parts
from thinwire.reducers.reducer import BoundReducer, Reducer, State, check_reducer, done

Rule: TypeAlias = str | Callable[[Slot], bool]

MATRICES = "matrices"
SMALL = 4096
"""Slots of fewer elements do not count as matrices."""


@dataclass(frozen=True)
class Routed:
    """Slots that match `rule` through `reducer`, the others through `otherwise`; bytes and memory are theirs."""

    reducer: Reducer
    """Averages the slots that match."""

    rule: Rule = MATRICES
    """"matrices" (floating point of at most 32 bits, two or more dimensions, at least 4096 elements), a glob over
    slot names, or a predicate of the slot."""

    otherwise: Reducer = field(default_factory=Dense)

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "Routed")
        check_reducer(self.otherwise, "Routed otherwise")

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundRouted:
        matched, rest = self._split(slots)
        parts = Parts(matched=self.reducer.bind(matched, wire), otherwise=self.otherwise.bind(rest, wire))
        return BoundRouted(parts, {slot.name for slot in matched}, wire)

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        matched, rest = self._split(slots)
        return self.reducer.sent_bytes(matched, world_size) + self.otherwise.sent_bytes(rest, world_size)

    def _split(self, slots: Sequence[Slot]) -> tuple[list[Slot], list[Slot]]:
        matched = [slot for slot in slots if matches(self.rule, slot)]
        names = {slot.name for slot in matched}
        return matched, [slot for slot in slots if slot.name not in names]


def matches(rule: Rule, slot: Slot) -> bool:
    """Whether a rule of Routed selects a slot."""
    if callable(rule):
        return rule(slot)
    if rule == MATRICES:
        small_float = slot.dtype.is_floating_point and slot.dtype.itemsize <= 4
        return small_float and len(slot.shape) >= 2 and slot.numel >= SMALL
    return fnmatchcase(slot.name, rule)


class BoundRouted:
    """Two bound reducers on one wire."""

    def __init__(self, parts: Parts, matched: set[str], wire: Wire) -> None:
        self._parts = parts
        self._matched = matched
        self._wire = wire
        self._reductions = 0

    @property
    def replicas(self) -> Literal["identical", "drift"]:
        drifts = any(part.replicas == "drift" for part in self._parts.each())
        return "drift" if drifts else "identical"

    @property
    def observers(self) -> Mapping[str, Observer]:
        return self._parts.observers

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return self._parts.fidelity

    def begin(self) -> None:
        self.settle()
        self._reductions += 1
        for part in self._parts.each():
            part.begin()

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        return both(
            [part.all_reduce(mine, weight=weight) for part, mine in self._shares(named) if mine], self._wire
        )

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        futures = [
            part.reduce_scatter(mine, {name: out[name] for name in mine}, weight=weight)
            for part, mine in self._shares(named)
            if mine
        ]
        return both(futures, self._wire)

    def finite(self) -> bool:
        return all(part.finite() for part in self._parts.each())

    def rollback(self, names: Sequence[str] | None = None) -> None:
        for part in self._parts.each():
            part.rollback(names)

    def set_loss_scale(self, scale: float) -> None:
        self._parts.set_loss_scale(scale)

    def state_dict(self) -> State:
        self.settle()
        return self._parts.state_dict(self._reductions)

    def load_state_dict(self, state: State) -> None:
        self._reductions = self._parts.load_state_dict(state)

    def memory_bytes(self) -> int:
        return self._parts.memory_bytes()

    def settle(self) -> None:
        """What one part would keep of a reduction that another's mean spoiled is dropped too."""
        if not self.finite():
            self.rollback()
        for part in self._parts.each():
            part.settle()

    def _shares(self, named: Mapping[str, Tensor]) -> list[tuple[BoundReducer, dict[str, Tensor]]]:
        matched = {name: t for name, t in named.items() if name in self._matched}
        rest = {name: t for name, t in named.items() if name not in self._matched}
        return [(self._parts["matched"], matched), (self._parts["otherwise"], rest)]


def both(futures: Sequence[Future[None]], wire: Wire) -> Future[None]:
    """Done when all are; fails as the first that failed."""
    if len(futures) == 1:
        return futures[0]
    if not futures:
        return done(wire.device)
    on_cuda = wire.device.type == "cuda"
    result: Future[None] = Future(devices=[wire.device] if on_cuda else [])

    def finish(_: Future[list[Future[None]]]) -> None:
        """Pass an error on as it is: `then` would wrap it in another type. On CUDA this stream waits for the
        parts' streams, and whoever waits for the result, a tensor as a future needs there, for this stream."""
        try:
            for future in futures:
                future.wait()
        except Exception as error:
            result.set_exception(error)  # type: ignore[arg-type]  # torch annotates T
        else:
            result.set_result(torch.empty(0, device=wire.device) if on_cuda else None)  # type: ignore[arg-type]

    collect_all(list(futures)).add_done_callback(finish)
    return result
