"""A link: a reducer attached to a model. The handle through which users see and steer it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.collectives import Ledger, Slot, Wire
from thinwire.data_parallel.agreement import ranks_that_differ
from thinwire.data_parallel.inputs import InputWatch
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.reducer import BoundReducer, State


class Link:
    """What `tw.attach` returns.

    torch.profiler shows the worker's ranges `thinwire::encode`, `thinwire::send` and `thinwire::decode` if it
    looks at all threads:
    `experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        slots: Sequence[Slot],
        reducer: BoundReducer,
        wire: Wire,
        on_detach: Callable[[], None],
        watch: Callable[[Callable[[], Mapping[str, Observer]]], InputWatch] | None = None,
    ) -> None:
        self.reducer = reducer
        """The bound reducer, with its state."""
        self.exposed_seconds = 0.0
        """Seconds since `attach` in which backward passes had nothing left to do but wait for communication."""
        self._parameters = parameters
        self._slots = tuple(slots)
        self._wire = wire
        self._on_detach = on_detach
        self._verify_every = 0
        self._reductions = 0
        self._detached = False
        self._watch = watch
        self._watching: InputWatch | None = None
        self._watch_inputs()
        # For a model that is dropped with its link still attached.
        weakref.finalize(self, wire.release).atexit = False

    @property
    def ledger(self) -> Ledger:
        """The bytes that this rank has sent since `attach`: `ledger.sent_bytes()`, `ledger.summary()`."""
        return self._wire.ledger

    @property
    def world_size(self) -> int:
        """Ranks that average: those of DDP's process group; 1 where there is none."""
        return self._wire.world_size

    @property
    def encode_seconds(self) -> float:
        """Seconds since `attach` that the worker spent computing (encode, decode, copy), hidden behind the
        backward pass or not. On CUDA: what enqueueing that took."""
        return self._wire.busy_seconds

    @property
    def sending_seconds(self) -> float:
        """Seconds since `attach` in which gradients were under way; what of them is not in `exposed_seconds` was
        hidden behind the backward pass. On CUDA: what enqueueing took."""
        return self._wire.sending_seconds

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        """For each parameter whose coordinates a geometry chose: `error`, `plain_error` and `cosine` of a round
        trip of its gradient through the format, as its owner measured them at the last refresh. The same on all
        ranks."""
        return self.reducer.fidelity

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is averaged, (name, shape, dtype), in the order of the model's parameters."""
        return self._slots

    def verify(self, every: int = 100) -> None:
        """Compare a hash of all parameters across ranks now, and again before every `every`-th reduction (0:
        only now).

        Collective: all ranks call it. Returns nothing; where replicas differ it raises RuntimeError on every
        rank, here or out of `backward()`, naming the ranks that differ from most. Each comparison reads every
        parameter once and sends 8 bytes to each rank, counted as control traffic. A reducer whose replicas
        drift by design (Local) has nothing to compare. Raises ValueError for a negative `every`.
        """
        if every < 0:
            raise ValueError(f"verify needs every >= 0, got {every}")
        self._verify_every = every
        self._verify_parameters()

    def set_loss_scale(self, scale: float) -> None:
        """Tell the reducer by what the loss is multiplied (a GradScaler's scale), before the backward pass.

        Raises ValueError unless it is positive.
        """
        self.reducer.set_loss_scale(scale)

    def rollback(self, names: list[str] | None = None) -> None:
        """Forget what the last reduction added to the error memory, of all slots or of `names`: for a caller
        who throws that reduction's gradients away. All ranks call it alike, before the next backward pass.

        Raises ValueError for a name that is not one of `slots`.
        """
        known = {slot.name for slot in self._slots}
        if unknown := [name for name in names or () if name not in known]:
            raise ValueError(
                f"rollback: {unknown[0]!r} is not averaged by this link; see link.slots for the names"
            )
        self.reducer.rollback(names)

    def control_all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor, of one shape on all ranks, over the ranks: in place, now. Returns the tensor.

        Counted as control traffic. Raises CollectiveError where a rank does not answer.
        """
        return self._wire.control_all_reduce(tensor)

    def settle(self) -> None:
        """Finish the last reduction now rather than before the next one: commit its error memory and change to the
        coordinates found in it, which costs the refresh's bytes. Collective: all ranks call it."""
        self.reducer.settle()

    def state_dict(self) -> State:
        """This rank's state: plain tensors and numbers. Save it on every rank: all ranks call this alike, since it
        settles the last reduction first.

        `rank` and `world_size` say whose it is; the rest is the reducer's: `format_version`, `reductions` and
        per parameter `residual.<name>`, float32 of the parameter's shape in its logical order; with a geometry, in
        the coordinates that `geometry` and `geometry.<name>` say.
        """
        return {**self.reducer.state_dict(), **self._place()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Raises ValueError naming what does not fit: the rank,
        the number of ranks, a parameter."""
        here = self._place()
        there = {key: state.get(key) for key in here}
        if there != here:
            raise ValueError(
                f"this link state is of rank {there['rank']} of {there['world_size']}, to be loaded on rank "
                f"{here['rank']} of {here['world_size']}: load on each rank what that rank saved (for another "
                "number of ranks, add the residuals of all ranks up and give each an equal share of the sum)"
            )
        self.reducer.load_state_dict({key: value for key, value in state.items() if key not in here})
        self._watch_inputs()

    def memory_bytes(self) -> int:
        """Bytes that the reducer holds on this rank: work buffers and error memory."""
        return self.reducer.memory_bytes()

    def detach(self) -> None:
        """Give the model its own gradient averaging back. Error memory not yet sent is dropped."""
        if not self._detached:
            self._detached = True
            if self._watching is not None:
                self._watching.remove()
            self._on_detach()
            self._wire.close()

    def begin(self, *, shadow: bool = False) -> None:
        """For the call site, before its first bucket: open a reduction.

        `shadow`: this rank has no gradients of its own and may hold old parameters.
        """
        self._reductions += 1
        if self._verify_every and self._reductions % self._verify_every == 0:
            self._verify_parameters(abstain=shadow)
        self.reducer.begin()
        self._watch_inputs()

    def raise_error(self) -> None:
        """For the call site, after its last bucket: raise the CollectiveError that broke the wire, if any did."""
        if self._wire.error is not None:
            raise self._wire.error

    def expose(self, since: float) -> None:
        """For the call site: count the time since `since` (time.perf_counter) as exposed communication."""
        self.exposed_seconds += time.perf_counter() - since

    def _watch_inputs(self) -> None:
        """Have layer inputs shown to the reducer from the first time that it wants to see any."""
        if self._watch is not None and self._watching is None and self.reducer.observers:
            reducer = self.reducer  # the model's hooks must not keep this link alive
            self._watching = self._watch(lambda: reducer.observers)

    def _place(self) -> dict[str, int]:
        return {"rank": self._wire.rank, "world_size": self._wire.world_size}

    def _verify_parameters(self, *, abstain: bool = False) -> None:
        if self.reducer.replicas == "drift":
            return
        differing = ranks_that_differ(self._wire, self._parameters.values(), abstain=abstain)
        if differing:
            raise RuntimeError(
                f"parameters of rank {', '.join(map(str, differing))} differ from those of the other ranks, "
                f"seen before reduction {self._reductions}; replicas must start equal and take the same updates"
            )
