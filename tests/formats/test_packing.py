"""Packing, for any spans: sizes are exact, nothing outside the buffers is touched, adding is adding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.coding import FORMATS, decoded, encoded, normal, same_bits
from thinwire.formats import NVFP4, BlockScaled, Cast, Format, Spans, get, names
from thinwire.formats.elements import ELEMENTS

some_formats = st.one_of(
    st.sampled_from(names()).map(get),
    st.builds(
        BlockScaled,
        element=st.sampled_from(sorted(ELEMENTS)),
        block=st.integers(1, 20).map(lambda k: 16 * k),
        per_span=st.booleans(),
        scale=st.sampled_from(["exact", "rceil", "floor", "ceil"]),
    ),
    st.builds(Cast, st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
)
some_spans = st.lists(st.integers(1, 9), min_size=1, max_size=6)
seeds = st.integers(0, 1000)
checked = settings(max_examples=60, deadline=None, derandomize=True)


def in_blocks(format: Format, blocks: list[int]) -> Spans:
    return tuple(count * format.block for count in blocks)


@checked
@given(format=some_formats, blocks=some_spans)
def test_nbytes_is_scales_and_codes_rounded_up_to_16(format: Format, blocks: list[int]) -> None:
    spans = in_blocks(format, blocks)
    if isinstance(format, BlockScaled):
        scales = len(spans) if format.per_span else sum(blocks)
        bits = ELEMENTS[format.element].bits
        expected = sum(spans) * bits // 8 + scales * (4 if format.scale == "exact" else 1)
    elif isinstance(format, NVFP4):
        expected = sum(spans) // 2 + sum(blocks) + 4 * len(spans)
    else:
        assert isinstance(format, Cast)
        expected = sum(spans) * format.dtype.itemsize
    assert expected <= format.nbytes(spans) < expected + 16
    assert format.nbytes(spans) % 16 == 0


@checked
@given(format=some_formats, blocks=some_spans, seed=seeds)
def test_nothing_outside_the_buffers_is_touched(format: Format, blocks: list[int], seed: int) -> None:
    """Buffers are rows of larger ones, at any multiple of 16 bytes; the input is only read."""
    spans = in_blocks(format, blocks)
    x, nbytes = normal(sum(spans), seed), format.nbytes(spans)
    before = x.clone()
    room = torch.full((nbytes + 64,), 0xAB, dtype=torch.uint8)
    format.encode(x, room[16 : 16 + nbytes], spans=spans)
    out = torch.full((sum(spans) + 8,), -1.0)
    format.decode(room[16 : 16 + nbytes], out[4:-4], spans=spans)
    assert torch.equal(x, before)
    assert bool((room[:16] == 0xAB).all())
    assert bool((room[16 + nbytes :] == 0xAB).all())
    assert bool((out[:4] == -1).all())
    assert bool((out[-4:] == -1).all())
    assert torch.equal(out[4:-4], decoded(format, encoded(format, x, spans), spans))


@checked
@given(format=some_formats, blocks=some_spans, seed=seeds)
def test_decode_add_is_decode_then_add_bit_for_bit(format: Format, blocks: list[int], seed: int) -> None:
    spans = in_blocks(format, blocks)
    n = sum(spans)
    buffer = encoded(format, normal(n, seed) * torch.logspace(-6, 6, n), spans)
    accumulator = normal(n, seed + 1)
    expected = accumulator + decoded(format, buffer, spans)
    format.decode_add(buffer, accumulator, spans=spans)
    assert same_bits(accumulator, expected)


@checked
@given(format=some_formats, blocks=some_spans, seed=seeds)
def test_spans_are_encoded_as_if_each_were_alone(format: Format, blocks: list[int], seed: int) -> None:
    spans = in_blocks(format, blocks)
    x = normal(sum(spans), seed) * torch.logspace(-3, 3, sum(spans))
    together = decoded(format, encoded(format, x, spans), spans)
    alone = [decoded(format, encoded(format, part.clone()), (len(part),)) for part in x.split(spans)]
    assert same_bits(together, torch.cat(alone))


@checked
@given(format=some_formats, blocks=some_spans, seed=seeds)
def test_encoding_is_deterministic_and_odd_around_zero(format: Format, blocks: list[int], seed: int) -> None:
    spans = in_blocks(format, blocks)
    x = normal(sum(spans), seed)
    there = decoded(format, encoded(format, x, spans), spans)
    assert torch.equal(there, decoded(format, encoded(format, x, spans), spans))
    assert torch.equal(-there, decoded(format, encoded(format, -x, spans), spans))


@pytest.mark.parametrize("name", FORMATS)
def test_non_finite_accumulators_stay_non_finite(name: str) -> None:
    format = FORMATS[name]
    spans = (128,)
    accumulator = torch.full((128,), float("nan"))
    format.decode_add(encoded(format, normal(128), spans), accumulator, spans=spans)
    assert bool(accumulator.isnan().all())
