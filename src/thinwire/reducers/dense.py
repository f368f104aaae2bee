"""Dense: the backend's own all-reduce, in float32, over one call's tensors as one flat buffer.

float64 tensors of the call make a buffer of their own, in float64; narrower ones are widened, and their mean is
rounded once, where plain DDP adds bfloat16 in bfloat16.

For float32 gradients and DDP's bucket order this is bit for bit what plain DDP computes (multiply by 1/W,
then sum). Above two ranks the order in which a ring adds depends on the position in the buffer, so, as with
plain DDP, the last bit depends on the buckets. Sends 2 (W-1)/W x 4 bytes per element (8 for float64). Where
gradients are views of DDP's buckets and zeroed in place, plain DDP divides by W instead of multiplying by
1/W: another last bit, unless W is a power of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Slot, Wire, all_reduce_bytes
from thinwire.collectives.pipeline import Task
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.finite import FiniteWatch
from thinwire.reducers.pieces import Pieces
from thinwire.reducers.reducer import State, check_tensors, done, label, new_state, reductions_in, residuals_in
from thinwire.reducers.views import memory_view


@dataclass(frozen=True)
class Dense:
    """The mean in float32 (of float64 tensors in float64), by one all_reduce per call and accumulation dtype.

    Sends 2 (W-1)/W x 4 bytes per element and rank (8 for float64), keeps no memory. Raises ValueError at bind
    for slots that are not floating point.
    """

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundDense:
        for slot in slots:
            if not slot.dtype.is_floating_point:
                raise ValueError(f"Dense averages floating point tensors, got {slot.dtype} for {slot.name!r}")
        return BoundDense(slots, wire)

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        nbytes: Counter[torch.dtype] = Counter()
        for slot in slots:
            nbytes[_wide(slot.dtype)] += slot.numel * _wide(slot.dtype).itemsize
        return sum(all_reduce_bytes(total, world_size) for total in nbytes.values())


class BoundDense:
    """Stateless but for the count of reductions."""

    replicas: Literal["identical", "drift"] = "identical"

    def __init__(self, slots: Sequence[Slot], wire: Wire) -> None:
        self._wire = wire
        self._slots = {slot.name: slot for slot in slots}
        self._pieces = Pieces(slots, wire)
        self._reductions = 0
        self._watch = FiniteWatch(wire.device)
        self._open: list[Future[None]] = []  # calls of the open reduction
        if wire.world_size > 1:
            wire.phase("dense")

    @property
    def observers(self) -> Mapping[str, Observer]:
        return {}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {}

    def begin(self) -> None:
        self._open.clear()
        self._watch.reset()
        self._reductions += 1

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        check_tensors(named, self._slots)
        if self._wire.world_size == 1 or not named:
            return done(self._wire.device)

        def deliver(means: Mapping[str, Tensor]) -> None:
            for name, mean in means.items():
                view = memory_view(named[name])
                view.copy_(mean.view(view.shape))

        return self._submit(named, weight, deliver)

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        """An all-reduce of which this rank keeps its piece: gloo's own reduce-scatter sends no less."""
        check_tensors(named, self._slots)
        self._pieces.check(out)
        if not named:
            return done(self._wire.device)

        def deliver(means: Mapping[str, Tensor]) -> None:
            self._pieces.write(means, {name: out[name] for name in means})

        return self._submit({name: tensor.contiguous() for name, tensor in named.items()}, weight, deliver)

    def finite(self) -> bool:
        for future in self._open:
            future.wait()
        return self._watch.all_finite()

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

    def _submit(
        self, named: Mapping[str, Tensor], weight: float, deliver: Callable[[Mapping[str, Tensor]], None]
    ) -> Future[None]:
        """Average the tensors, a task per accumulation dtype, and deliver the means, flat, in memory order."""
        tasks = []
        for dtype in (torch.float32, torch.float64):
            if same := {name: tensor for name, tensor in named.items() if _wide(tensor.dtype) == dtype}:
                tasks.append(self._average(same, self._snapshot(same, dtype, weight), deliver))
        self._open.append(self._wire.submit(tasks, label(list(named))))
        return self._open[-1]

    def _snapshot(self, named: Mapping[str, Tensor], dtype: torch.dtype, weight: float) -> Tensor:
        """The tensors as one flat buffer, scaled."""
        flat = torch.cat([view.reshape(-1).to(dtype) for view in map(memory_view, named.values())])
        return self._wire.lend(flat.mul_(weight / self._wire.world_size))

    def _average(
        self, named: Mapping[str, Tensor], flat: Tensor, deliver: Callable[[Mapping[str, Tensor]], None]
    ) -> Task:
        if self._wire.world_size > 1:
            yield self._wire.all_reduce(flat)
        if self._wire.keeps_memory:
            self._watch.see(flat)
        deliver(dict(zip(named, flat.split([tensor.numel() for tensor in named.values()]))))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of `dtype` are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32
