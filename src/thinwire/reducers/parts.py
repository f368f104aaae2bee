"""The parts of a reducer made of others: what is done to each, and their state, each under its own prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.reducer import BoundReducer, State, new_state, reductions_in


class Parts:
    """Bound reducers by name, on one wire."""

    def __init__(self, **parts: BoundReducer) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> BoundReducer:
        return self._parts[name]

    def each(self) -> Sequence[BoundReducer]:
        """All of them, in order."""
        return tuple(self._parts.values())

    @property
    def observers(self) -> Mapping[str, Observer]:
        return {name: observer for part in self.each() for name, observer in part.observers.items()}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {name: measured for part in self.each() for name, measured in part.fidelity.items()}

    def set_loss_scale(self, scale: float) -> None:
        for part in self.each():
            part.set_loss_scale(scale)

    def memory_bytes(self) -> int:
        return sum(part.memory_bytes() for part in self.each())

    def state_dict(self, reductions: int) -> State:
        """One flat state: `part.key` for each key of each part."""
        state = new_state(reductions)
        for name, part in self._parts.items():
            state |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
        return state

    def load_state_dict(self, state: State) -> int:
        """Give each part its own; returns the number of reductions."""
        reductions = reductions_in(state)
        for name, part in self._parts.items():
            part.load_state_dict(_under(f"{name}.", state))
        return reductions


def _under(prefix: str, state: Mapping[str, object]) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
