"""The two-phase compressed all-reduce, one chunk at a time, and its first half, the reduce-scatter.

For columns [a, b) of the work matrix `rows` (world size, message length), whose row w holds what this rank
contributes to owner w:

1. take the contributions, scaled, and add the residual: what earlier reductions left out;
2. encode row w for each other owner w, keep row - decoded as the new residual, all_to_all the codes;
3. as an owner, add the decoded contributions in float32 in rank order, the own one as it is (it never
   crosses the wire, so it is never encoded);
4. encode the sum, keep sum - decoded as the new residual of the own row, all_gather the codes;
5. decode every owner's sum: all ranks, owners included, decode the same bytes.

Bytes sent per rank: (W-1) nbytes(chunk) in each phase. Adding in float32 keeps the error from growing with
the number of ranks; two-phase after ZeRO++ qgZ (arXiv 2306.10209) and FP8-LM (arXiv 2310.18313).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.profiler import record_function

from thinwire.collectives.layout import Chunk
from thinwire.collectives.pipeline import Pending, Task
from thinwire.collectives.wire import Wire
from thinwire.formats import Format

Deliver = Callable[[Chunk, int, Callable[[Tensor], object]], None]
"""`deliver(chunk, owner, write)`: takes the mean of a chunk of one owner's pieces; `write(out)` puts it into
`out`, float32 (columns,), which may be where it is wanted in the end."""

Owed = Callable[[Chunk, Tensor, float], None]
"""`owed(chunk, rows, scale)`: adds what is still owed of a chunk, in units of the mean, times `scale`."""

Draw = Callable[[Chunk, int], Tensor | None]
"""`draw(chunk, owner)`: the keys, int32 (spans,), with which this rank encodes its contribution to the owner's
pieces, or for its own rank their mean; None for a format that needs none."""


@dataclass
class Buffers:
    """Buffers handed out and taken back, by size: a fresh tensor costs more than encoding into it."""

    device: torch.device
    _free: dict[tuple[int, torch.dtype], list[Tensor]] = field(default_factory=dict)
    _total: int = 0

    def take(self, numel: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """An uninitialised vector of `numel` elements."""
        free = self._free.setdefault((numel, dtype), [])
        if free:
            return free.pop()
        self._total += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, *buffers: Tensor) -> None:
        """Take buffers back for reuse."""
        for buffer in buffers:
            self._free[(buffer.numel(), buffer.dtype)].append(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers ever handed out."""
        return self._total


@dataclass(frozen=True)
class TwoPhase:
    """The compressed mean of one call: its wire, format, work matrix and what is owed."""

    wire: Wire
    format: Format
    buffers: Buffers
    fill: Callable[[Chunk], None]
    """Writes the contributions to a chunk, times this rank's weight / world size, into `rows`."""
    rows: Tensor
    """float32 (W, message length): work memory; in the end the pending residual, if there is one."""
    owed: Owed | None
    """What earlier reductions left out; None: that is lost, and of this one, too."""
    loss_scale: float = 1.0
    draw: Draw = lambda chunk, owner: None

    def all_reduce(self, chunk: Chunk, deliver: Deliver) -> Task:
        """Steps 1 to 5 for one chunk."""
        nbytes = self.format.nbytes(chunk.spans)
        total = yield from self._reduce(chunk)
        send = self.buffers.take(nbytes)
        with record_function("thinwire::encode"):
            self.format.encode(total, send, spans=chunk.spans, key=self.draw(chunk, self.wire.rank))
            if self.owed is not None:
                own = self.rows[self.wire.rank, chunk.start : chunk.stop]
                self._keep(own, total, send, chunk, delivered=True)
        self.buffers.give(total)
        received = self.buffers.take(self.wire.world_size * nbytes)
        with record_function("thinwire::send"):
            pending = self.wire.all_gather(received.view(self.wire.world_size, nbytes), send)
        yield pending
        with record_function("thinwire::decode"):
            for owner, encoded in enumerate(received.view(self.wire.world_size, nbytes)):
                deliver(chunk, owner, partial(self.format.decode, encoded, spans=chunk.spans))
        self.buffers.give(send, received)

    def reduce_scatter(self, chunk: Chunk, deliver: Deliver) -> Task:
        """Steps 1 to 3: the own pieces arrive as exact float32 sums of what was decoded."""
        total = yield from self._reduce(chunk)
        self.rows[self.wire.rank, chunk.start : chunk.stop].zero_()  # delivered as it is: nothing is left out
        deliver(chunk, self.wire.rank, lambda out: out.copy_(total))
        self.buffers.give(total)

    def _reduce(self, chunk: Chunk) -> Generator[Pending, None, Tensor]:
        rank, others = self.wire.rank, self.wire.world_size - 1
        nbytes, length = self.format.nbytes(chunk.spans), chunk.stop - chunk.start
        rows = self.rows[:, chunk.start : chunk.stop]  # (W, length)
        send, received = self.buffers.take(others * nbytes), self.buffers.take(others * nbytes)
        with record_function("thinwire::encode"):
            self.fill(chunk)
            if self.owed is not None:
                self.owed(chunk, rows, self.loss_scale)
            foreign = [owner for owner in range(len(rows)) if owner != rank]
            for owner, encoded in zip(foreign, send.view(others, nbytes)):
                row = rows[owner]
                self.format.encode(row, encoded, spans=chunk.spans, key=self.draw(chunk, owner))
                if self.owed is not None:
                    self._keep(row, row, encoded, chunk)
        with record_function("thinwire::send"):
            pending = self.wire.all_to_all(received.view(others, nbytes), send.view(others, nbytes))
        yield pending
        total = self.buffers.take(length, torch.float32)
        with record_function("thinwire::decode"):
            contributions = list(received.view(others, nbytes))
            contributions.insert(rank, rows[rank])
            for source, contribution in enumerate(contributions):
                if source == rank:
                    total.copy_(contribution) if source == 0 else total.add_(contribution)
                elif source == 0:
                    self.format.decode(contribution, total, spans=chunk.spans)
                else:
                    self.format.decode_add(contribution, total, spans=chunk.spans)
        self.buffers.give(send, received)
        return total

    def _keep(self, out: Tensor, exact: Tensor, encoded: Tensor, chunk: Chunk, *, delivered: bool = False) -> None:
        """out = (exact - decoded) / loss scale: what this encoding leaves out.

        A mean is `delivered` in its slot's dtype, and what that rounds away is left out as well.
        """
        decoded = self.buffers.take(chunk.stop - chunk.start, torch.float32)
        self.format.decode(encoded, decoded, spans=chunk.spans)
        if delivered:
            round_to_slots(decoded, chunk)
        torch.sub(exact, decoded, out=out)
        if self.loss_scale != 1.0:
            out.mul_(1.0 / self.loss_scale)
        self.buffers.give(decoded)


def round_to_slots(values: Tensor, chunk: Chunk) -> None:
    """Round float32 values of a chunk to what its slots' dtypes hold, in place."""
    for segment in chunk.segments:
        if segment.place.slot.dtype != torch.float32:
            part = values[segment.column : segment.column + segment.length]
            part.copy_(part.to(segment.place.slot.dtype))
