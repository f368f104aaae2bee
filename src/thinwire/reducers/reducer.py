"""The Reducer: given tensors that differ on each rank, return their mean over the group.

Configuration is frozen, state is bound. A `Reducer` is a frozen dataclass; `bind` makes the object with
state for given slots on a given wire. Whoever reduces divides, once: every contribution is multiplied by
weight / world size before the sum, as DDP does. A world of one rank is an exact identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Slot, Wire
from thinwire.geometry import Fidelity, Observer

State: TypeAlias = dict[str, Any]
"""Plain tensors, numbers and strings by name."""

FORMAT_VERSION = 1


class BoundReducer(Protocol):
    """A reducer with state. All ranks make the same calls in the same order."""

    @property
    def replicas(self) -> Literal["identical", "drift"]:
        """Whether all ranks hold the same bits after a reduction."""

    @property
    def observers(self) -> Mapping[str, Observer]:
        """Who wants to see the inputs of layers in forward passes before the next reduction, by the name of the
        layer's weight; empty when nobody does."""

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        """What the encoding leaves of gradients, by slot, as last measured; the same on all ranks."""

    def begin(self) -> None:
        """Open a reduction: settle the previous one (commit its error memory, or drop it if a mean was
        non-finite)."""

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        """Replace every tensor by its weighted mean over the group, in its own dtype and strides.

        `named` maps slot names to tensors of the slots' shapes, which are the reducer's to read and write until
        the future is complete. `weight` is this rank's, and the ranks' weights sum to the world size.
        Calls on disjoint slots may be outstanding together.
        """

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        """Write this rank's piece of every mean into `out`, tensors of as many elements as the piece has."""

    def finite(self) -> bool:
        """Whether all means of the open reduction are finite, on every rank; waits for them."""

    def rollback(self, names: Sequence[str] | None = None) -> None:
        """Forget what the open reduction would add to the error memory of these slots (None: of all)."""

    def settle(self) -> None:
        """Finish the open reduction, as `begin` and `state_dict` do: commit its error memory (or drop it if a mean
        was non-finite) and change to the coordinates found in it. All ranks call it alike."""

    def set_loss_scale(self, scale: float) -> None:
        """Gradients are multiplied by `scale` from the next call on; error memory stays unscaled."""

    def state_dict(self) -> State:
        """This rank's state, settled: `format_version`, `reductions` and tensors keyed by slot name."""

    def load_state_dict(self, state: State) -> None:
        """Restore a state of the same slots. Raises ValueError naming the slot that does not fit."""

    def memory_bytes(self) -> int:
        """Bytes of buffers and error memory held on this rank."""


@runtime_checkable
class Reducer(Protocol):
    """How a mean is made: a frozen configuration."""

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundReducer:
        """Allocate state for `slots` on `wire`. All ranks bind alike, in one order: it may make process groups.

        Raises ValueError naming a slot that it cannot reduce.
        """

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        """Bytes that one rank sends in one reduction of `slots` over `world_size` ranks."""


def is_configuration(value: object, kind: type) -> bool:
    """Whether a value is an object of this protocol, and not a class that makes such objects."""
    return isinstance(value, kind) and not isinstance(value, type)


def check_reducer(value: object, who: str) -> None:
    """Raise TypeError for what is no reducer."""
    if not is_configuration(value, Reducer):
        inner = getattr(value, "reducer", None)
        hint = ": pass its .reducer" if is_configuration(inner, Reducer) else ""
        raise TypeError(f"{who} needs a reducer such as tw.Quantized('fp8_e5m2'), got {value!r:.200}{hint}")


def done(device: torch.device) -> Future[None]:
    """A future that is already complete."""
    future: Future[None] = Future(devices=[device] if device.type == "cuda" else [])
    future.set_result(None)
    return future


def label(names: Sequence[str]) -> str:
    """Slot names for a message, shortened."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else "no slots"


def check_loss_scale(scale: float) -> None:
    """Refuse what cannot be divided by."""
    if not scale > 0:
        raise ValueError(f"the loss scale must be positive, got {scale}")


def check_tensors(named: Mapping[str, Tensor], slots: Mapping[str, Slot]) -> None:
    """Refuse by name a tensor that is no slot's, or not of its slot's shape."""
    for name, tensor in named.items():
        if name not in slots:
            raise ValueError(f"{name!r} was not among the slots that this reducer was bound to")
        if tuple(tensor.shape) != tuple(slots[name].shape):
            raise ValueError(f"{name!r} has shape {tuple(tensor.shape)}, was bound as {slots[name].shape}")


def check_pieces(out: Mapping[str, Tensor], lengths: Mapping[str, int], rank: int) -> None:
    """Refuse by name a tensor that cannot take this rank's piece of its slot."""
    for name, piece in out.items():
        if piece.numel() != lengths[name]:
            raise ValueError(
                f"the piece of {name!r} on rank {rank} has {lengths[name]} elements, got {piece.numel()}"
            )


def new_state(reductions: int) -> State:
    """What every reducer's state has, to be completed with tensors."""
    return {"format_version": FORMAT_VERSION, "reductions": reductions}


def reductions_in(state: State) -> int:
    """The number of reductions in a state. Raises ValueError for one of another format version, or without."""
    version = state.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(f"reducer state has format_version {version}, this version reads {FORMAT_VERSION}")
    count = state.get("reductions")
    if type(count) is not int or count < 0:
        raise ValueError(f"reducer state has {count!r} for its number of reductions")
    return count


def residuals_in(state: State, slots: Mapping[str, Slot]) -> dict[str, Tensor]:
    """The residuals of `slots` in a state. Raises ValueError naming one that is missing, foreign or misshapen."""
    prefix = "residual."
    found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    for name in found:
        if name not in slots:
            raise ValueError(f"the reducer state has a residual of {name!r}, which this reducer does not keep")
    for name, slot in slots.items():
        if name not in found:
            raise ValueError(f"the reducer state has no residual of {name!r}")
        if not isinstance(found[name], Tensor):
            raise ValueError(f"residual of {name!r} is of type {type(found[name]).__name__}, expected a tensor")
        if tuple(found[name].shape) != tuple(slot.shape):
            raise ValueError(f"residual of {name!r} has shape {tuple(found[name].shape)}, expected {slot.shape}")
    return found
