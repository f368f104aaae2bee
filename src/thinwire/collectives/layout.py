"""Which rank owns what: the layout of slots into pieces, messages, chunks and spans.

A *slot* is what is averaged under one name. Its *piece* w, owned by rank w, is piece w of `torch.chunk` over
its units. *Message* w of a call holds the pieces w of the call's slots, in slot order. Every piece of a slot
takes the same room in its message (the last ones are zero-padded), so all messages of a call have one shape
and the call's work buffer is a matrix (world size, message length).

A message travels in *chunks*: columns of that matrix. Chunks consist of *spans*, over which scales never
reach: a piece longer than CHUNK is cut into spans from its own start, short spans share a chunk. A span
depends on its slot and the world size alone, never on the call (a DDP bucket, say) it travels in: the layout
is part of the numerics. Chunks are not: of a short message they are smaller, so that it too travels in several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

CHUNK = 1 << 17
"""Largest chunk and longest span, in elements. A constant of the layout, so never tuned at run time."""

LEAST_CHUNK = 1 << 15
"""Elements below which a chunk is not made smaller: each costs two collectives."""
CHUNKS = 8
"""Into how many chunks a message is cut, if its spans allow it. On a slow wire a message of one or two chunks
takes a third longer: whoever is ready first is sent everything at once, by everybody."""


@dataclass(frozen=True)
class Slot:
    """What is averaged under one name: a parameter, a factor, a fragment, a shard."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    unit: int | None = None
    """Elements that are never separated, such as a row; None: one block of the format."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Place:
    """Where the pieces of one slot lie in their messages."""

    slot: Slot
    offset: int
    """First column of every piece in its message."""
    piece: int
    """Elements in a full piece."""
    padded: int
    """Columns that a piece takes: `piece` rounded up to whole blocks."""

    @property
    def full(self) -> int:
        """Number of leading ranks whose piece is full."""
        return self.slot.numel // self.piece

    @property
    def rest(self) -> int:
        """Elements in the piece of rank `full`; later ranks own nothing of this slot."""
        return self.slot.numel % self.piece

    def length(self, rank: int) -> int:
        """Elements in the piece of `rank`."""
        return max(0, min(self.piece, self.slot.numel - rank * self.piece))


@dataclass(frozen=True)
class Segment:
    """The part of a slot's pieces that one chunk carries."""

    place: Place
    start: int
    """First element within each piece."""
    length: int
    column: int
    """First column within the chunk."""


@dataclass(frozen=True)
class Chunk:
    """Columns `start` to `stop` of every message, encoded and sent in one go."""

    start: int
    stop: int
    spans: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Layout:
    """The messages of a call over `slots`; a pure function of slots, world size and block."""

    slots: tuple[Slot, ...]
    world_size: int
    block: int
    places: tuple[Place, ...] = field(init=False)
    chunks: tuple[Chunk, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", _place(self.slots, self.world_size, self.block))
        object.__setattr__(self, "chunks", _cut(self.places, self.block))

    @property
    def length(self) -> int:
        """Columns of a message."""
        return self.places[-1].offset + self.places[-1].padded if self.places else 0


def _place(slots: Sequence[Slot], world_size: int, block: int) -> tuple[Place, ...]:
    places, offset = [], 0
    for slot in slots:
        unit = slot.unit or block
        units = max(1, -(-slot.numel // unit))
        piece = -(-units // world_size) * unit  # ceil, as torch.chunk does
        padded = -(-piece // block) * block
        places.append(Place(slot, offset, piece, padded))
        offset += padded
    return tuple(places)


def _cut(places: Sequence[Place], block: int) -> tuple[Chunk, ...]:
    longest = max(CHUNK // block, 1) * block  # CHUNK in whole blocks
    message = places[-1].offset + places[-1].padded if places else 0
    room = min(longest, max(LEAST_CHUNK, message // CHUNKS))
    chunks: list[Chunk] = []
    start, column = 0, 0
    spans: list[int] = []
    segments: list[Segment] = []

    def close() -> None:
        nonlocal start, column
        if spans:
            chunks.append(Chunk(start, start + column, tuple(spans), tuple(segments)))
            start, column = start + column, 0
            spans.clear()
            segments.clear()

    for place in places:
        for begin in range(0, place.padded, longest):
            span = min(longest, place.padded - begin)
            if column + span > room:
                close()
            spans.append(span)
            segments.append(Segment(place, begin, min(span, place.piece - begin), column))
            column += span
    close()
    return tuple(chunks)
