"""Quantized: the mean through a low-precision format, in two compressed phases, with two-stage error feedback.

Without feedback what the encodings round away is lost. With `feedback="error"` it is kept and added to the
next reduction: each rank keeps what its own encoding left out (the sender's residual), and the owner of a
piece what the encoding of the mean left out (the owner's). Together:

    sum of applied means + sum over ranks of residuals = sum of the exact means        (to float32 rounding)

A rank's residual is one float32 number per element, in units of the mean: what rank r still owes to the
mean. It is laid out as the work matrix is, (world size, message length): row w is owed to owner w, and the
own row is what this rank as owner still owes to everybody. (An owner's contribution to its own piece is
never encoded, so it leaves nothing out and needs no memory.)

Memory: 8 bytes per element and rank, work matrix and residual; 4 without feedback, a little above 5 with `LoCo`
(`feedback.py`). The work matrix becomes the new residual when the reduction is committed, at the next `begin`.
Error feedback: 1-bit SGD (Seide et al. 2014); for both stages DoubleSqueeze (arXiv 1905.05957).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import CHUNK, Chunk, Layout, Slot, Wire
from thinwire.collectives.pipeline import Task
from thinwire.collectives.two_phase import Buffers, Deliver, TwoPhase, round_to_slots
from thinwire.formats import BlockScaled, Format, get
from thinwire.formats.stochastic import span_key
from thinwire.geometry import Fidelity, Geometry, Observer, Place
from thinwire.reducers.alone import BoundAlone
from thinwire.reducers.coordinates import Coordinates, load_coordinates, matrix_shapes, wire_slots
from thinwire.reducers.executable import executable, for_another_thread
from thinwire.reducers.feedback import Feedback, memory_of
from thinwire.reducers.finite import FiniteWatch
from thinwire.reducers.reducer import (
    BoundReducer,
    State,
    check_loss_scale,
    check_tensors,
    done,
    is_configuration,
    label,
    new_state,
    reductions_in,
    residuals_in,
)
from thinwire.reducers.refresh import refresh
from thinwire.reducers.region import Region
from thinwire.reducers.residual import Coded, Plain, Residual
from thinwire.reducers.round_trip import round_trip
from thinwire.reducers.views import Staged

logger = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Quantized:
    """The mean in `format`: about 2 (W-1)/W x bytes per element of the format, sent per rank and reduction."""

    format: str | Format
    """A name of `thinwire.formats.names()` or a Format."""

    feedback: Feedback = "none"
    """"error" keeps what the encodings leave out and adds it to the next reduction; `tw.LoCo()` keeps a moving
    average of it, in a byte per element."""

    geometry: Geometry | None = None
    """The coordinates in which matrices are encoded, such as `tw.GIFT()`; None: their own."""

    seed: int = 0
    """Of stochastic rounding, where the format does that."""

    compile: bool | None = None
    """Fuse the kernels with torch.compile (same bits); None: from 8 Mi elements on, where a compiler is found."""

    def __post_init__(self) -> None:
        if not is_configuration(get(self.format), Format):
            raise ValueError(f"Quantized format must be a name or a Format, got {self.format!r}")
        if self.geometry is not None and not is_configuration(self.geometry, Geometry):
            raise ValueError(
                f"Quantized geometry must be None or a geometry such as tw.GIFT(), got {self.geometry!r}"
            )
        memory, block = memory_of(self.feedback), get(self.format).block
        if memory is not None and memory.storage == "int8" and block % 16:
            raise ValueError(
                f"LoCo storage='int8' needs a format with blocks of a multiple of 16, {get(self.format).name} has "
                f"{block}: use storage='bfloat16'"
            )

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundReducer:
        for slot in slots:
            if slot.dtype not in FLOATS:
                raise ValueError(
                    f"Quantized needs float32, bfloat16 or float16, got {slot.dtype} for {slot.name!r}; "
                    "send it through Dense() with Routed"
                )
        format = get(self.format)
        if wire.world_size > 1:
            format = executable(format, slots, wire, self.compile)
        coordinates = None
        if self.geometry is not None:
            measured = partial(round_trip, for_another_thread(format))  # the worker encodes meanwhile
            shares_rows = any(slot.unit is not None for slot in slots)
            place = Place(wire.rank, wire.world_size, wire.device, measured, shares_rows)
            coordinates = Coordinates(self.geometry.bind(matrix_shapes(slots), place), slots)
        if wire.world_size == 1:
            return BoundAlone(slots, wire.device, memory=memory_of(self.feedback), coordinates=coordinates)
        return BoundQuantized(self, slots, wire, format, coordinates)

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        """As if all slots were sent in one call: buckets only change the padding of chunks to 16 bytes."""
        if world_size == 1 or not slots:
            return 0
        format, refreshes = get(self.format), 0
        if self.geometry is not None:
            refreshes = self.geometry.refresh_bytes(matrix_shapes(slots), world_size)
            slots = wire_slots(slots)
        chunks = Layout(tuple(slots), world_size, format.block).chunks
        return 2 * (world_size - 1) * sum(format.nbytes(chunk.spans) for chunk in chunks) + refreshes


class BoundQuantized:
    """Regions of work matrix and residual, one per set of slots that are reduced together."""

    replicas: Literal["identical", "drift"] = "identical"

    def __init__(
        self,
        config: Quantized,
        slots: Sequence[Slot],
        wire: Wire,
        format: Format,
        coordinates: Coordinates | None,
    ) -> None:
        self._wire = wire
        self._format = format
        self._coordinates = coordinates
        slots = wire_slots(slots) if coordinates else slots
        self._slots = {slot.name: slot for slot in slots}
        self._memory = memory_of(config.feedback)
        self._stored = None
        if self._memory is not None and self._memory.storage == "int8":
            self._stored = executable(BlockScaled("int8", block=format.block), slots, wire, config.compile)
        self._seed = config.seed
        self._reductions = 0
        self._loss_scale = 1.0
        self._buffers = Buffers(wire.device)
        self._watch = FiniteWatch(wire.device)
        self._agree = False  # whether ranks must ask each other what they saw
        self._open: dict[tuple[str, ...], Future[None]] = {}  # calls of the open reduction
        self._regions: dict[tuple[str, ...], Region] = {}
        wire.keeps_memory |= self._memory is not None
        wire.phase("scatter")
        wire.phase("gather")
        for slot in slots:
            self._regions[(slot.name,)] = self._region([slot])

    @property
    def observers(self) -> Mapping[str, Observer]:
        return self._coordinates.geometry.observers(self._reductions + 1) if self._coordinates else {}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return self._coordinates.geometry.fidelity if self._coordinates else {}

    def begin(self) -> None:
        self.settle()
        self._reductions += 1
        if self._coordinates is not None:
            self._coordinates.geometry.open(self._reductions)

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        check_tensors(named, self._slots)
        if not named:
            return done(self._wire.device)
        region = self._open_region(tuple(named))
        travelling = self._enter(named)
        tensors = {name: Staged(tensor) for name, tensor in travelling.items()}
        # Read where they are written: a chunk is read before any of it can arrive.
        fill = partial(region.fill, tensors, scale=weight / self._wire.world_size)
        step = self._two_phase(region, fill).all_reduce
        return self._submit(region, step, tensors, partial(self._leave, region, travelling, named))

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        check_tensors(named, self._slots)
        if not named:
            return done(self._wire.device)
        region = self._open_region(tuple(named))
        if self._coordinates is not None and self._coordinates.geometry.mixes_rows:
            raise ValueError("reduce_scatter shards rows, which this geometry mixes: use sides='right'")
        sources = {name: Staged(tensor) for name, tensor in self._enter(named).items()}
        for chunk in region.layout.chunks:
            region.fill(sources, chunk, scale=weight / self._wire.world_size)
        travelling = {
            name: torch.empty_like(piece, dtype=torch.float32) if self._changes(name) else piece
            for name, piece in out.items()
        }
        pieces = region.pieces(travelling)
        self._agree = self._wire.keeps_memory  # only its owner sees the mean of a piece
        step = self._two_phase(region, lambda chunk: None).reduce_scatter
        return self._submit(region, step, pieces, partial(self._leave, None, travelling, out), whole=False)

    def finite(self) -> bool:
        self._wait()
        finite = self._watch.all_finite()
        if self._agree:
            flag = torch.tensor([float(finite)], device=self._wire.device)
            finite = bool(self._wire.control_all_reduce(flag, dist.ReduceOp.MIN).item())
        return finite

    def rollback(self, names: Sequence[str] | None = None) -> None:
        self._wait()
        for key in self._open:
            region = self._regions[key]
            region.restore([name for name in key if names is None or name in names])

    def settle(self) -> None:
        """Commit the open reduction, or drop it where any mean was non-finite: every rank saw the same."""
        if self.finite() and (memory := self._memory) is not None:
            forgotten = set(memory.forgotten(list(self._slots), self._reductions))
            for key in self._open:
                self._regions[key].commit(memory.beta, [name for name in key if name in forgotten])
        self._open.clear()
        self._watch.reset()
        self._agree = False
        if self._coordinates is not None:
            refresh(self._coordinates.geometry, self._wire, self._rebase)

    def set_loss_scale(self, scale: float) -> None:
        check_loss_scale(scale)
        self._loss_scale = scale

    def state_dict(self) -> State:
        self.settle()
        state = {**new_state(self._reductions), "chunk": CHUNK}
        if self._memory is not None:
            for name, slot in self._slots.items():
                residual = torch.zeros(slot.shape, dtype=torch.float32, device=self._wire.device)
                self._home(name).read_residual(name, residual)
                state[f"residual.{name}"] = residual
        if self._coordinates is not None:
            state |= self._coordinates.state_dict()
        return state

    def load_state_dict(self, state: State) -> None:
        reductions = reductions_in(state)
        residuals = residuals_in(state, self._slots if self._memory is not None else {})
        if state.get("chunk", CHUNK) != CHUNK:
            logger.warning(
                "saved with chunks of %d elements, now %d: per-span scales change", state["chunk"], CHUNK
            )
        self.settle()
        load_coordinates(self._coordinates, state)
        for name, residual in residuals.items():
            self._home(name).write_residual(name, residual)
        self._reductions = reductions

    def memory_bytes(self) -> int:
        geometry = self._coordinates.geometry.memory_bytes() if self._coordinates else 0
        return sum(region.nbytes for region in self._regions.values()) + self._buffers.nbytes + geometry

    def _region(self, slots: Sequence[Slot]) -> Region:
        layout = Layout(tuple(slots), self._wire.world_size, self._format.block)
        return Region(layout, self._wire.rank, self._wire.device, self._residual(layout))

    def _residual(self, layout: Layout) -> Residual | None:
        if self._memory is None:
            return None
        if self._stored is not None:
            return Coded(layout, self._stored, self._wire.device)
        return Plain(layout, getattr(torch, self._memory.storage), self._wire.device)

    def _two_phase(self, region: Region, fill: Callable[[Chunk], None]) -> TwoPhase:
        return TwoPhase(
            self._wire,
            self._format,
            self._buffers,
            fill,
            region.work,
            None if region.residual is None else region.residual.add_to,
            self._loss_scale,
            self._draw,
        )

    def _draw(self, chunk: Chunk, owner: int) -> Tensor | None:
        """The keys of stochastic rounding: the same after a restart, other ones in every reduction."""
        if not self._format.needs_key:
            return None
        where = (self._reductions, self._wire.rank, owner)
        keys = [span_key(self._seed, part.place.slot.name, *where, part.start) for part in chunk.segments]
        return torch.tensor(keys, dtype=torch.int32, device=self._wire.device)

    def _submit(
        self,
        region: Region,
        step: Callable[[Chunk, Deliver], Task],
        outputs: dict[str, Staged],
        leave: Callable[[], None],
        *,
        whole: bool = True,
    ) -> Future[None]:
        def deliver(chunk: Chunk, owner: int, write: Callable[[Tensor], object]) -> None:
            window = region.window(outputs, chunk, owner, whole=whole)
            mean = self._buffers.take(chunk.stop - chunk.start, torch.float32) if window is None else window
            write(mean)
            if whole:
                round_to_slots(mean, chunk)  # a mean may be finite in float32 and not in a slot's dtype
            if self._wire.keeps_memory:
                self._watch.see(mean)
            if window is None:
                region.deliver(outputs, chunk, owner, mean, whole=whole)
                self._buffers.give(mean)

        for staged in outputs.values():
            self._wire.lend(staged.flat)
        key = region.key
        tasks = [step(chunk, deliver) for chunk in region.layout.chunks]

        def finish() -> None:
            region.write_back(outputs)
            leave()

        self._open[key] = self._wire.submit(tasks, label(key), finish)
        return self._open[key]

    def _enter(self, named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self._coordinates is None:
            return named
        for tensor in named.values():
            self._wire.lend(tensor)  # `_leave` writes them
        return self._coordinates.enter(named, self._loss_scale)

    def _changes(self, name: str) -> bool:
        return self._coordinates is not None and self._coordinates.changes(name)

    def _leave(self, region: Region | None, travelling: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        """From wire coordinates into the tensors of the caller; what their dtype rounds away is owed."""
        for name, tensor in out.items():
            if self._coordinates is not None and self._coordinates.changes(name):
                lost = self._coordinates.leave(name, travelling[name], tensor.detach())
                if lost is not None and region is not None:
                    self._watch.see(lost)  # not finite where the tensor's dtype cannot hold the mean
                    region.owe(name, lost, 1.0 / self._loss_scale)

    def _rebase(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """What is owed of a slot, in new coordinates."""
        if self._memory is not None and self._coordinates is not None:
            region = self._home(name)
            residual = torch.zeros(self._slots[name].shape, dtype=torch.float32, device=self._wire.device)
            region.read_residual(name, residual)
            region.write_residual(name, self._coordinates.rebase(name, residual, change))

    def _open_region(self, key: tuple[str, ...]) -> Region:
        """The region of these slots. Slots that were reduced in other company before bring their residual."""
        if busy := [name for other in self._open for name in other if name in key]:
            raise ValueError(
                f"{label(busy)} is already in the open reduction; call begin() before reducing it again"
            )
        if key not in self._regions:
            region = self._region([self._slots[name] for name in key])
            region.names.clear()
        else:
            region = self._regions[key]
        if moving := [name for name in key if name not in region.names]:
            for name in moving:
                self._home(name).hand_over(name, region)
            self._regions[key] = region
            self._regions = {k: r for k, r in self._regions.items() if r.names}
        return region

    def _home(self, name: str) -> Region:
        return next(region for region in self._regions.values() if name in region.names)

    def _wait(self) -> None:
        for future in self._open.values():
            future.wait()
