"""Dense: the backend's own all-reduce, in float32, over one call's tensors as one flat buffer.

For float32 gradients and DDP's bucket order this is bit for bit what plain DDP computes (multiply by 1/W,
then sum). Above two ranks the order in which a ring adds depends on the position in the buffer, so, as with
plain DDP, the last bit depends on the buckets. Sends 2 (W-1)/W x 4 bytes per element (8 for float64). Where
gradients are views of DDP's buckets and zeroed in place, plain DDP divides by W instead of multiplying by
1/W: another last bit, unless W is a power of two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Layout, Slot, Wire, all_reduce_bytes
from thinwire.collectives.pipeline import Task
from thinwire.reducers.finite import FiniteWatch
from thinwire.reducers.reducer import (
    FORMAT_VERSION,
    State,
    check_pieces,
    check_state_version,
    check_tensors,
    done,
    label,
)
from thinwire.reducers.views import memory_view


@dataclass(frozen=True)
class Dense:
    """The exact mean in float32 (float64 tensors in float64), by one all_reduce per call.

    Sends 2 (W-1)/W x 4 bytes per element and rank, keeps no memory. Raises ValueError at bind for slots that
    are not floating point.
    """

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundDense:
        for slot in slots:
            if not slot.dtype.is_floating_point:
                raise ValueError(f"Dense averages floating point tensors, got {slot.dtype} for {slot.name!r}")
        return BoundDense(slots, wire)

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        return all_reduce_bytes(sum(s.numel * _sum_dtype([s.dtype]).itemsize for s in slots), world_size)


class BoundDense:
    """Stateless but for the count of reductions."""

    replicas: Literal["identical", "drift"] = "identical"

    def __init__(self, slots: Sequence[Slot], wire: Wire) -> None:
        self._wire = wire
        self._slots = {slot.name: slot for slot in slots}
        self._places = {place.slot.name: place for place in Layout(tuple(slots), wire.world_size, block=1).places}
        self._reductions = 0
        self._watch = FiniteWatch(wire.device)
        self._open: list[Future[None]] = []  # calls of the open reduction
        if wire.world_size > 1:
            wire.phase("dense")

    def begin(self) -> None:
        self._open.clear()
        self._watch.reset()
        self._reductions += 1

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        check_tensors(named, self._slots)
        if self._wire.world_size == 1 or not named:
            return done(self._wire.device)
        flat = self._snapshot(named, weight)

        def task() -> Task:
            yield self._wire.all_reduce(flat)
            self._see(flat)
            parts = flat.split([tensor.numel() for tensor in named.values()])
            for tensor, part in zip(named.values(), parts):
                view = memory_view(tensor)
                view.copy_(part.view(view.shape))

        return self._submit(task(), list(named))

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        """An all-reduce of which this rank keeps its piece: gloo's own reduce-scatter sends no less."""
        check_tensors(named, self._slots)
        check_pieces(out, {name: self._places[name].length(self._wire.rank) for name in out}, self._wire.rank)
        if not named:
            return done(self._wire.device)
        flat = self._snapshot({name: t.contiguous() for name, t in named.items()}, weight)
        means = dict(zip(named, flat.split([t.numel() for t in named.values()])))

        def task() -> Task:
            if self._wire.world_size > 1:
                yield self._wire.all_reduce(flat)
            self._see(flat)
            for name, piece in out.items():
                start = self._wire.rank * self._places[name].piece
                piece.detach().copy_(means[name][start : start + piece.numel()].view(piece.shape))

        return self._submit(task(), list(named))

    def finite(self) -> bool:
        for future in self._open:
            future.wait()
        return self._watch.all_finite()

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

    def _submit(self, task: Task, names: Sequence[str]) -> Future[None]:
        self._open.append(self._wire.submit([task], label(names)))
        return self._open[-1]

    def _see(self, mean: Tensor) -> None:
        if self._wire.keeps_memory:
            self._watch.see(mean)

    def _snapshot(self, named: Mapping[str, Tensor], weight: float) -> Tensor:
        """The tensors as one flat buffer, scaled."""
        dtype = _sum_dtype([t.dtype for t in named.values()])
        flat = torch.cat([view.reshape(-1).to(dtype) for view in map(memory_view, named.values())])
        return self._wire.lend(flat.mul_(weight / self._wire.world_size))


def _sum_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32
