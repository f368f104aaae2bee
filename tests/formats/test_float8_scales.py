"""Scales: 16 significant bits make code x scale exact; powers of two make encoding idempotent."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.coding import FP8, POWER_OF_TWO, decoded, encoded, float8, normal, round_trip, split
from thinwire.formats.elements import ELEMENTS

EXACT = tuple(name for name in FP8 if name not in POWER_OF_TWO)


def wide(n: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose blocks differ by many orders of magnitude, from 1e-29 to 1e34."""
    magnitudes = torch.linspace(-29, 34, n // 128).repeat_interleave(128)
    return normal(n, seed) * 10.0**magnitudes


@pytest.mark.parametrize("name", EXACT)
def test_exact_scales_have_16_significant_bits(name: str) -> None:
    format = float8(name)
    x = wide(128 * 500)
    spans = (128,) * 500
    scales, _ = split(format, encoded(format, x, spans), spans)
    assert bool((scales.view(torch.int32) & 0xFF == 0).all())


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_scale_is_the_smallest_that_holds_the_largest_magnitude(name: str) -> None:
    """Up to its last bit, 2^-15, and the rounding of 1 / max."""
    format = float8(name)
    x = wide(128 * 500, seed=1)
    spans = (128,) * 500
    scales, _ = split(format, encoded(format, x, spans), spans)
    ideal = x.view(-1, 128).abs().amax(1).double() / ELEMENTS[format.element].max
    ratio = scales.double() / ideal
    assert ratio.min() >= 1 - 2**-22
    assert ratio.max() <= 1 + 2**-15 + 2**-22


@pytest.mark.parametrize("name", FP8)
def test_code_times_scale_is_exact_in_float32(name: str) -> None:
    """So a fused multiply-add has nothing to round differently. Compared with exact rational arithmetic."""
    format = float8(name)
    x = wide(128 * 64, seed=2)
    spans = (128,) * 64
    buffer = encoded(format, x, spans)
    scales, codes = split(format, buffer, spans)
    values = decoded(format, buffer, spans)
    numbers = codes.view(ELEMENTS[format.element].dtype).float()
    for scale, own, got in zip(scales.tolist(), numbers.view(-1, 128)[:, ::5], values.view(-1, 128)[:, ::5]):
        assert [Fraction(scale) * Fraction(v) for v in own.tolist()] == [Fraction(v) for v in got.tolist()]


@pytest.mark.parametrize("name", POWER_OF_TWO)
def test_power_of_two_scales_make_encoding_idempotent(name: str) -> None:
    format = float8(name)
    x = wide(128 * 500, seed=3)
    once = encoded(format, x)
    again = encoded(format, decoded(format, once, (x.numel(),)))
    assert torch.equal(decoded(format, again, (x.numel(),)), decoded(format, once, (x.numel(),)))


@pytest.mark.parametrize("name", POWER_OF_TWO)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(amax=st.floats(min_value=2.0**-90, max_value=2.0**110, width=32))
def test_a_power_of_two_scale_is_the_smallest_that_holds_the_largest_magnitude(name: str, amax: float) -> None:
    format = float8(name)
    x = torch.zeros(128)
    x[5] = -amax
    scales, _ = split(format, encoded(format, x), (128,))
    scale, largest = scales.item(), ELEMENTS[format.element].max
    assert largest * scale >= amax > largest * scale / 2


@pytest.mark.parametrize("name", FP8)
def test_magnitudes_at_the_edge_of_a_binade_and_of_the_format_do_not_overflow(name: str) -> None:
    """amax just below, at and above max x 2^k: the largest element must neither become inf nor lose a place."""
    format = float8(name)
    largest = torch.tensor(ELEMENTS[format.element].max)
    edges = [torch.nextafter(largest, torch.tensor(0.0)), largest, torch.nextafter(largest, torch.tensor(1e9))]
    for edge in edges:
        for exponent in (-60, -1, 0, 1, 60):
            x = torch.zeros(128)
            x[0] = edge * 2.0**exponent
            y = round_trip(format, x)[0]
            assert abs(float(y / x[0]) - 1) < 2**-3
