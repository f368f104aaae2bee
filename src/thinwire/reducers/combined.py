"""State, memory and settings of a reducer made of others, each under its own prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.reducers.reducer import FORMAT_VERSION, BoundReducer, State, check_state_version


def combined_state(parts: Mapping[str, BoundReducer], reductions: int) -> State:
    """One flat state: `part.key` for each key of each part."""
    state: State = {"format_version": FORMAT_VERSION, "reductions": reductions}
    for prefix, part in parts.items():
        state.update({f"{prefix}.{key}": value for key, value in part.state_dict().items()})
    return state


def load_combined_state(parts: Mapping[str, BoundReducer], state: State) -> int:
    """Give each part its own; returns the number of reductions."""
    check_state_version(state)
    for prefix, part in parts.items():
        start = f"{prefix}."
        part.load_state_dict({k.removeprefix(start): v for k, v in state.items() if k.startswith(start)})
    return int(state["reductions"])


def roll_back_each(parts: Mapping[str, BoundReducer], names: Sequence[str] | None) -> None:
    """Roll every part back."""
    for part in parts.values():
        part.rollback(names)
