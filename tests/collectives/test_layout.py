"""The layout: a pure function of slots, world size and block, that puts every element in exactly one place."""

from __future__ import annotations

import copy

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.collectives import CHUNK, Layout, Place, Slot
from thinwire.collectives.layout import LEAST_CHUNK

BLOCKS = (1, 8, 16, 48, 128, 1024, 2 * CHUNK)

some_shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.tuples(st.integers(1, 3 * CHUNK)),
    st.tuples(st.integers(1, 40), st.integers(1, 70000)),
)
some_slots = st.lists(
    st.tuples(some_shapes, st.sampled_from([None, 1, 3, 7, 100, 128, 5000])), min_size=1, max_size=6
).map(lambda given: tuple(Slot(f"slot{i}", shape, unit=unit) for i, (shape, unit) in enumerate(given)))
world_sizes = st.integers(1, 9)
checked = settings(max_examples=80, deadline=None, derandomize=True)


def spans_of(layout: Layout, name: str) -> list[tuple[int, int]]:
    """(start within the piece, length) of the spans of a slot, padding included, in order."""
    found = []
    for chunk in layout.chunks:
        for segment, span in zip(chunk.segments, chunk.spans):
            if segment.place.slot.name == name:
                found.append((segment.start, span))
    return found


def chunked(place: Place, world_size: int, block: int) -> list[torch.Tensor]:
    """torch.chunk over the units of a slot; element indices of each piece."""
    elements = torch.arange(place.slot.numel)
    units = list(elements.split(place.slot.unit or block))
    parts = torch.arange(len(units)).chunk(world_size) if units else []
    pieces = [torch.cat([units[i] for i in part.tolist()]) for part in parts]
    return pieces + [elements[:0]] * (world_size - len(pieces))


@checked
@given(
    shape=st.lists(st.integers(0, 30), max_size=3).map(tuple),
    unit=st.sampled_from([None, 1, 3, 7, 100]),
    world_size=world_sizes,
    block=st.sampled_from(BLOCKS),
)
def test_pieces_are_those_of_torch_chunk_over_units(
    shape: tuple[int, ...], unit: int | None, world_size: int, block: int
) -> None:
    (place,) = Layout((Slot("x", shape, unit=unit),), world_size, block).places
    for rank, expected in enumerate(chunked(place, world_size, block)):
        start = rank * place.piece
        assert list(range(start, start + place.length(rank))) == expected.tolist()


def test_pieces_with_rows_as_units_are_the_shards_of_fsdp2() -> None:
    """FSDP2 shards dimension 0 with torch.chunk; the last ranks may get less, or nothing."""
    for rows in (1, 2, 5, 7, 8, 9):
        weight = torch.arange(rows * 6).view(rows, 6)
        (place,) = Layout((Slot("w", (rows, 6), unit=6),), 4, 128).places
        shards = [*weight.chunk(4), *[weight[:0]] * 4][:4]
        for rank, shard in enumerate(shards):
            start = rank * place.piece
            assert torch.equal(weight.view(-1)[start : start + place.length(rank)], shard.reshape(-1))


@checked
@given(slots=some_slots, world_size=world_sizes, block=st.sampled_from(BLOCKS))
def test_every_element_of_every_slot_is_in_exactly_one_chunk(
    slots: tuple[Slot, ...], world_size: int, block: int
) -> None:
    layout = Layout(slots, world_size, block)
    covered: dict[str, list[tuple[int, int]]] = {slot.name: [] for slot in slots}
    for chunk in layout.chunks:
        for segment in chunk.segments:
            place = segment.place
            for owner in range(world_size):
                length = min(segment.length, place.length(owner) - segment.start)
                if length > 0:
                    start = owner * place.piece + segment.start
                    covered[place.slot.name].append((start, start + length))
    for slot in slots:
        position = 0
        for start, stop in sorted(covered[slot.name]):
            assert start == position
            position = stop
        assert position == slot.numel


@checked
@given(slots=some_slots, world_size=world_sizes, block=st.sampled_from(BLOCKS))
def test_chunks_cut_messages_into_consecutive_columns_of_whole_blocks(
    slots: tuple[Slot, ...], world_size: int, block: int
) -> None:
    layout = Layout(slots, world_size, block)
    position = 0
    for chunk in layout.chunks:
        assert chunk.start == position
        position = chunk.stop
        assert sum(chunk.spans) == chunk.stop - chunk.start <= max(CHUNK, block)
        assert all(span > 0 and span % block == 0 for span in chunk.spans)
        column = 0
        for segment, span in zip(chunk.segments, chunk.spans):
            assert segment.column == column
            assert segment.place.offset + segment.start == chunk.start + column
            assert 0 < segment.length <= span
            column += span
    assert position == layout.length


def test_a_short_message_too_travels_in_several_chunks() -> None:
    weights = tuple(Slot(f"layer{i}", (2, LEAST_CHUNK // 2)) for i in range(32))
    assert [len(Layout(weights[:n], 2, block=16).chunks) for n in (1, 2, 16, 32)] == [1, 1, 8, 8]
    long = Slot("long", (2, 3 * CHUNK))
    assert [chunk.spans for chunk in Layout((*weights[:2], long), 2, block=16).chunks] == [
        (LEAST_CHUNK // 2, LEAST_CHUNK // 2),
        *[(CHUNK,)] * 3,
    ]


@checked
@given(slots=some_slots, world_size=world_sizes, block=st.sampled_from(BLOCKS), data=st.data())
def test_spans_depend_on_the_slot_and_the_world_size_alone(
    slots: tuple[Slot, ...], world_size: int, block: int, data: st.DataObject
) -> None:
    """Scales never reach across a span, so the numbers do not depend on the bucket a slot travels in."""
    others = tuple(data.draw(st.permutations(slots)))
    together, shuffled = Layout(slots, world_size, block), Layout(others, world_size, block)
    for slot in slots:
        alone = spans_of(Layout((slot,), world_size, block), slot.name)
        assert alone == spans_of(together, slot.name) == spans_of(shuffled, slot.name)


@checked
@given(slots=some_slots, world_size=world_sizes, block=st.sampled_from(BLOCKS))
def test_the_layout_is_a_pure_function(slots: tuple[Slot, ...], world_size: int, block: int) -> None:
    assert Layout(slots, world_size, block) == Layout(copy.deepcopy(slots), world_size, block)


@checked
@given(slots=some_slots, world_size=world_sizes, block=st.sampled_from(BLOCKS))
def test_padding_stays_below_a_unit_and_a_block_per_slot_and_owner(
    slots: tuple[Slot, ...], world_size: int, block: int
) -> None:
    """Equal room for all pieces costs little: a message is at most 1/W of the slots and that padding."""
    layout = Layout(slots, world_size, block)
    for place in layout.places:
        unit = place.slot.unit or block
        assert place.padded < place.slot.numel / world_size + unit + block + 1
