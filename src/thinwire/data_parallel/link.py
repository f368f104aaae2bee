"""A link: a reducer attached to a model. The handle through which users see and steer it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from thinwire.collectives import Ledger, Slot, Wire
from thinwire.data_parallel.agreement import ranks_that_differ
from thinwire.reducers.reducer import BoundReducer, State


class Link:
    """What `tw.attach` returns.

    `ledger` counts bytes, `exposed_seconds` is the time that backward passes were blocked on communication,
    `encode_seconds` the time the worker spent encoding and decoding (hidden or not). torch.profiler shows the
    worker's ranges `thinwire::encode`, `thinwire::send` and `thinwire::decode` if it looks at all threads:
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        slots: Sequence[Slot],
        reducer: BoundReducer,
        wire: Wire,
        on_detach: Callable[[], None],
    ) -> None:
        self.reducer = reducer
        self.exposed_seconds = 0.0
        self._parameters = parameters
        self._slots = tuple(slots)
        self._wire = wire
        self._on_detach = on_detach
        self._verify_every = 0
        self._reductions = 0
        self._detached = False
        # For a model that is dropped with its link still attached.
        weakref.finalize(self, wire.release).atexit = False

    @property
    def ledger(self) -> Ledger:
        return self._wire.ledger

    @property
    def world_size(self) -> int:
        return self._wire.world_size

    @property
    def encode_seconds(self) -> float:
        return self._wire.busy_seconds

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is averaged, in the order of the model's parameters."""
        return self._slots

    def verify(self, every: int = 100) -> None:
        """Compare a hash of all parameters across ranks now and before every n-th reduction (0: never again).

        Raises RuntimeError naming the ranks that differ. Control traffic: an all-gather of 8 bytes.
        """
        if every < 0:
            raise ValueError(f"verify needs every >= 0, got {every}")
        self._verify_every = every
        self._verify_parameters()

    def set_loss_scale(self, scale: float) -> None:
        """Tell the reducer by what the loss is multiplied (a GradScaler's scale), before the backward pass."""
        self.reducer.set_loss_scale(scale)

    def rollback(self, names: list[str] | None = None) -> None:
        """Forget what the last reduction added to the error memory, of all slots or of `names`: for a caller
        who throws that reduction's gradients away."""
        self.reducer.rollback(names)

    def control_all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, in place, now; counted as control traffic."""
        return self._wire.control_all_reduce(tensor)

    def state_dict(self) -> State:
        """This rank's state: plain tensors and numbers. Save it for every rank."""
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Raises ValueError naming what does not fit."""
        self.reducer.load_state_dict(dict(state))

    def memory_bytes(self) -> int:
        """Bytes that the reducer holds on this rank."""
        return self.reducer.memory_bytes()

    def detach(self) -> None:
        """Give the model its own gradient averaging back. Error memory not yet sent is dropped."""
        if not self._detached:
            self._detached = True
            self._on_detach()
            self._wire.close()

    def begin(self, *, shadow: bool = False) -> None:
        """Open a reduction (the call site does this before its first bucket).

        `shadow`: this rank has no gradients of its own and may hold old parameters.
        """
        self._reductions += 1
        if self._verify_every and self._reductions % self._verify_every == 0:
            self._verify_parameters(abstain=shadow)
        self.reducer.begin()

    def raise_error(self) -> None:
        """Raise what broke the wire, if anything did."""
        if self._wire.error is not None:
            raise self._wire.error

    def expose(self, since: float) -> None:
        """Count the time from `since` (time.perf_counter) until now as exposed communication."""
        self.exposed_seconds += time.perf_counter() - since

    def _verify_parameters(self, *, abstain: bool = False) -> None:
        if self.reducer.replicas == "drift":
            return
        differing = ranks_that_differ(self._wire, self._parameters.values(), abstain=abstain)
        if differing:
            raise RuntimeError(
                f"parameters of rank {', '.join(map(str, differing))} differ from those of the other ranks, "
                f"seen before reduction {self._reductions}; replicas must start equal and take the same updates"
            )
