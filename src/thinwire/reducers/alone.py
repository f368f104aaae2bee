"""A world of one rank: an exact identity, no collective, no rounding.

Only a run that goes on with fewer ranks brings something: what its former ranks still owed is added to the
first reduction, so that nothing is lost there either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Slot
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.coordinates import Coordinates, load_coordinates
from thinwire.reducers.feedback import LoCo
from thinwire.reducers.finite import FiniteWatch
from thinwire.reducers.reducer import (
    State,
    check_loss_scale,
    check_pieces,
    check_tensors,
    done,
    new_state,
    reductions_in,
    residuals_in,
)


class BoundAlone:
    """What a lossy reducer is in a world of one rank; `memory`: what it keeps on more, of `kept` (None: all)."""

    replicas: Literal["identical", "drift"] = "identical"

    def __init__(
        self,
        slots: Sequence[Slot],
        device: torch.device,
        *,
        memory: LoCo | None,
        kept: Sequence[Slot] | None = None,
        coordinates: Coordinates | None = None,
    ) -> None:
        self._slots = {slot.name: slot for slot in slots}
        self._device = device
        remembered = [] if memory is None else slots if kept is None else kept
        self._kept = {slot.name: slot for slot in remembered}
        self._share = 1.0 - memory.beta if memory is not None else 1.0  # residual / what is owed
        self._coordinates = coordinates
        self._reductions = 0
        self._loss_scale = 1.0
        self._owed: dict[str, Tensor] = {}
        self._paid: set[str] = set()  # in the open reduction
        self._watch = FiniteWatch(device)

    @property
    def observers(self) -> Mapping[str, Observer]:
        return {}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {}

    def begin(self) -> None:
        self.settle()
        self._reductions += 1

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        check_tensors(named, self._slots)
        self._pay(named)
        return done(self._device)

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        check_tensors(named, self._slots)
        check_pieces(out, {name: tensor.numel() for name, tensor in named.items()}, rank=0)
        for name, piece in out.items():
            piece.detach().copy_(named[name].detach().reshape(piece.shape))
        self._pay(out)
        return done(self._device)

    def finite(self) -> bool:
        return self._watch.all_finite()

    def rollback(self, names: Sequence[str] | None = None) -> None:
        self._paid -= self._paid if names is None else set(names)

    def set_loss_scale(self, scale: float) -> None:
        check_loss_scale(scale)
        self._loss_scale = scale

    def state_dict(self) -> State:
        self.settle()
        state = new_state(self._reductions)
        for name, slot in self._kept.items():
            owed = self._owed.get(name)
            residual = (
                torch.zeros(slot.shape, dtype=torch.float32, device=self._device)
                if owed is None
                else owed * self._share
            )
            if self._coordinates is not None:
                residual = self._coordinates.forward(name, residual)
            state[f"residual.{name}"] = residual
        return state | (self._coordinates.state_dict() if self._coordinates else {})

    def load_state_dict(self, state: State) -> None:
        reductions = reductions_in(state)
        residuals = residuals_in(state, self._kept)
        self.settle()
        load_coordinates(self._coordinates, state)
        if self._coordinates is not None:
            residuals = {name: self._coordinates.inverse(name, owed) for name, owed in residuals.items()}
        self._owed = {
            name: residual.to(self._device) / self._share for name, residual in residuals.items() if residual.any()
        }
        self._reductions = reductions

    def memory_bytes(self) -> int:
        return sum(owed.nbytes for owed in self._owed.values())

    def _pay(self, named: Mapping[str, Tensor]) -> None:
        for name in (self._owed.keys() & named.keys()) - self._paid:
            tensor = named[name].detach()
            tensor.add_(self._owed[name].view(tensor.shape), alpha=self._loss_scale)
            self._watch.see(tensor)
            self._paid.add(name)

    def settle(self) -> None:
        if self.finite():
            for name in self._paid:
                del self._owed[name]
        self._paid.clear()
        self._watch.reset()
