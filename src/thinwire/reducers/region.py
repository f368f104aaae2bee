"""A region: the work matrix and the residual of slots that are reduced in one call.

Both are matrices (world size, message length), in the layout of the call. In a reduction the work matrix, float32,
first holds the contributions, then what the encodings left out: the pending residual. Committing hands it to the
residual; rolling back just doesn't. When DDP rebuilds its buckets a slot moves to another region and takes its
residual along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from thinwire.collectives import Chunk, Layout, Place
from thinwire.reducers.reducer import check_pieces
from thinwire.reducers.residual import Residual
from thinwire.reducers.views import Staged


class Region:
    """Work matrix and, if there is one, residual of the slots of `layout`, for one rank."""

    def __init__(self, layout: Layout, rank: int, device: torch.device, residual: Residual | None) -> None:
        self.layout = layout
        self.key = tuple(place.slot.name for place in layout.places)
        """The slots that are reduced together here."""
        self.names = set(self.key)
        """Those of them whose residual lives here."""
        self._rank = rank
        self._places = {place.slot.name: place for place in layout.places}
        shape = (layout.world_size, layout.length)
        self.work = torch.zeros(shape, dtype=torch.float32, device=device)
        self.residual = residual

    @property
    def nbytes(self) -> int:
        return self.work.nbytes + (0 if self.residual is None else self.residual.nbytes)

    def fill(self, sources: Mapping[str, Staged], chunk: Chunk, scale: float) -> None:
        """Write this rank's contributions to a chunk, times `scale`, into the work matrix; zeros where no element
        lies."""
        for segment, span in zip(chunk.segments, chunk.spans):
            place, start, length = segment.place, segment.start, segment.length
            flat = sources[place.slot.name].flat
            begin = chunk.start + segment.column
            columns = self.work[:, begin : begin + span]  # (W, span)
            full, rest, piece = place.full, place.rest, place.piece
            if full < len(columns) or length < span:
                columns[:, length:].zero_()
                columns[full:].zero_()
            _put(flat[: full * piece].view(full, piece)[:, start : start + length], columns[:full, :length], scale)
            if rest > start:
                part = flat[full * piece + start : full * piece + min(start + length, rest)]
                _put(part, columns[full, : len(part)], scale)

    def window(
        self, outputs: Mapping[str, Staged], chunk: Chunk, owner: int, *, whole: bool = True
    ) -> Tensor | None:
        """The part of an output that is all of this chunk of the owner's pieces, float32 (columns,); None where
        the chunk holds several parts, padding or another dtype, and `deliver` has to share it out."""
        segment = chunk.segments[0]
        place = segment.place
        flat = outputs[place.slot.name].flat
        columns = chunk.stop - chunk.start
        if flat.dtype != torch.float32 or place.length(owner) - segment.start < columns:
            return None
        start = segment.start + (owner * place.piece if whole else 0)
        return flat[start : start + columns]

    def deliver(
        self, outputs: Mapping[str, Staged], chunk: Chunk, owner: int, values: Tensor, *, whole: bool = True
    ) -> None:
        """Write the mean of one chunk of one owner into outputs that are whole slots, or the owner's pieces."""
        for segment in chunk.segments:
            place = segment.place
            length = min(segment.length, place.length(owner) - segment.start)
            if length > 0:
                start = segment.start + (owner * place.piece if whole else 0)
                part = values[segment.column : segment.column + length]
                outputs[place.slot.name].flat[start : start + length].copy_(part)

    def pieces(self, out: Mapping[str, Tensor]) -> dict[str, Staged]:
        """Check and stage the tensors that take this rank's pieces."""
        lengths = {name: place.length(self._rank) for name, place in self._places.items()}
        check_pieces(out, lengths, self._rank)
        return {name: Staged(piece) for name, piece in out.items()}

    def write_back(self, outputs: Mapping[str, Staged]) -> None:
        """Finish outputs that are not contiguous."""
        for staged in outputs.values():
            staged.write_back()

    def commit(self, keep: float = 0.0, forget: Sequence[str] = ()) -> None:
        """The pending residual becomes the residual, or (1 - keep) of it beside `keep` of the old one; nothing is
        left of the slots to `forget`."""
        if self.residual is not None:
            self.work = self.residual.take(self.work, keep)
            for name in forget:
                self._write(name, torch.zeros_like(self._columns(self.work, name)))

    def restore(self, names: Sequence[str]) -> None:
        """Make a commit leave the residual of these slots as it is."""
        if self.residual is not None:
            for name in names:
                self._columns(self.work, name).copy_(self._read(name))

    def owe(self, name: str, values: Tensor, scale: float) -> None:
        """Add this rank's piece of `values`, float32 of the slot's elements, times `scale`, to what is pending."""
        if self.residual is not None:
            place = self._places[name]
            start, length = self._rank * place.piece, place.length(self._rank)
            own = self.work[self._rank, place.offset : place.offset + length]
            own.add_(values.reshape(-1)[start : start + length], alpha=scale)

    def read_residual(self, name: str, out: Tensor) -> None:
        """Copy the residual of a slot into `out`, float32 of the slot's shape."""
        if self.residual is not None:
            self._collect(self._read(name), out.view(-1), self._places[name])

    def write_residual(self, name: str, residual: Tensor) -> None:
        """Set the residual of a slot from float32 of its shape."""
        if self.residual is not None:
            columns = torch.zeros_like(self._columns(self.work, name))
            self._spread(residual.reshape(-1), columns, self._places[name])
            self._write(name, columns)

    def hand_over(self, name: str, to: Region) -> None:
        """Give a slot and its residual to another region."""
        if self.residual is not None and to.residual is not None:
            to._write(name, self._read(name))
        self.names.discard(name)
        to.names.add(name)

    def _columns(self, matrix: Tensor, name: str) -> Tensor:
        place = self._places[name]
        return matrix[:, place.offset : place.offset + place.padded]

    def _read(self, name: str) -> Tensor:
        """The residual's columns of a slot."""
        assert self.residual is not None
        place = self._places[name]
        return self.residual.read(place.offset, place.offset + place.padded)

    def _write(self, name: str, columns: Tensor) -> None:
        assert self.residual is not None
        place = self._places[name]
        self.residual.write(place.offset, place.offset + place.padded, columns)

    def _spread(self, flat: Tensor, columns: Tensor, place: Place) -> None:
        """flat (numel,) into a slot's columns (W, padded), which are zeros."""
        full, rest, piece = place.full, place.rest, place.piece
        columns[:full, :piece].copy_(flat[: full * piece].view(full, piece))
        if rest:
            columns[full, :rest].copy_(flat[full * piece :])

    def _collect(self, columns: Tensor, flat: Tensor, place: Place) -> None:
        full, rest, piece = place.full, place.rest, place.piece
        flat[: full * piece].view(full, piece).copy_(columns[:full, :piece])
        if rest:
            flat[full * piece :].copy_(columns[full, :rest])


def _put(values: Tensor, out: Tensor, scale: float) -> None:
    """out = values x scale, in float32."""
    if values.dtype == torch.float32 and scale != 1.0:
        torch.mul(values, scale, out=out)
    else:
        out.copy_(values)
        if scale != 1.0:
            out.mul_(scale)
