"""Local: no averaging. Every rank keeps its own tensors, nothing is sent; replicas drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Slot, Wire
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.pieces import Pieces
from thinwire.reducers.reducer import State, check_tensors, done, new_state, reductions_in, residuals_in


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
        self._device = wire.device
        self._slots = {slot.name: slot for slot in slots}
        self._pieces = Pieces(slots, wire)
        self._reductions = 0

    @property
    def observers(self) -> Mapping[str, Observer]:
        return {}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {}

    def begin(self) -> None:
        self._reductions += 1

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        check_tensors(named, self._slots)
        return done(self._device)

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        check_tensors(named, self._slots)
        self._pieces.check(out)
        self._pieces.write(named, out)
        return done(self._device)

    def finite(self) -> bool:
        return True  # nobody depends on what other ranks hold

    def rollback(self, names: Sequence[str] | None = None) -> None:
        """There is no error memory."""

    def settle(self) -> None:
        pass

    def set_loss_scale(self, scale: float) -> None:
        """There is no error memory."""

    def state_dict(self) -> State:
        return new_state(self._reductions)

    def load_state_dict(self, state: State) -> None:
        residuals_in(state, {})  # another reducer's are refused rather than dropped
        self._reductions = reductions_in(state)

    def memory_bytes(self) -> int:
        return 0
