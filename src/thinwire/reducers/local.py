"""Local: no averaging. Every rank keeps its own tensors, nothing is sent; replicas drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Layout, Slot, Wire
from thinwire.reducers.reducer import FORMAT_VERSION, State, check_state_version, done


@dataclass(frozen=True)
class Local:
    """Leave gradients as they are: for optimizers and schedules that do their own averaging. Sends nothing."""

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundLocal:
        return BoundLocal(slots, wire)

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        return 0


class BoundLocal:
    """Stateless but for the count of reductions."""

    replicas: Literal["identical", "drift"] = "drift"

    def __init__(self, slots: Sequence[Slot], wire: Wire) -> None:
        self._wire = wire
        self._reductions = 0
        self._places = {place.slot.name: place for place in Layout(tuple(slots), wire.world_size, block=1).places}

    def begin(self) -> None:
        self._reductions += 1

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        return done(self._wire.device)

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        for name, piece in out.items():
            start = self._wire.rank * self._places[name].piece
            with torch.no_grad():
                piece.copy_(named[name].reshape(-1)[start : start + piece.numel()].view(piece.shape))
        return done(self._wire.device)

    def finite(self) -> bool:
        return True  # nobody depends on what other ranks hold

    def rollback(self, names: Sequence[str] | None = None) -> None:
        """There is no error memory."""

    def set_loss_scale(self, scale: float) -> None:
        """There is no error memory."""

    def state_dict(self) -> State:
        return {"format_version": FORMAT_VERSION, "reductions": self._reductions}

    def load_state_dict(self, state: State) -> None:
        check_state_version(state)
        self._reductions = int(state["reductions"])

    def memory_bytes(self) -> int:
        return 0
