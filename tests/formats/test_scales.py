"""Scales: 16 significant bits make code x scale exact; powers of two make encoding idempotent."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats import oracle
from tests.formats.coding import (
    BLOCK_SCALED,
    FORMATS,
    NARROW,
    bf16_patterns,
    block_scaled,
    decoded,
    element_of,
    encoded,
    float32_patterns,
    normal,
    numbers,
    round_trip,
    split,
)
from thinwire.formats import NVFP4
from thinwire.formats.elements import ELEMENTS
from thinwire.formats.scales import power_of_two_scale, stored

EXACT = tuple(name for name in BLOCK_SCALED if block_scaled(name).scale == "exact")
POWER_OF_TWO = tuple(name for name in BLOCK_SCALED if block_scaled(name).scale != "exact")
RCEIL = tuple(name for name in BLOCK_SCALED if block_scaled(name).scale == "rceil")


def wide(n: int, seed: int = 0) -> torch.Tensor:
    """Numbers whose blocks differ by many orders of magnitude, from 1e-29 to 1e34."""
    magnitudes = torch.linspace(-29, 34, n // 128).repeat_interleave(128)
    return normal(n, seed) * 10.0**magnitudes


@pytest.mark.parametrize("name", [*EXACT, "nvfp4"])
def test_exact_scales_have_16_significant_bits(name: str) -> None:
    format = FORMATS[name]
    x = wide(128 * 500)
    spans = (128,) * 500
    buffer = encoded(format, x, spans)
    scales = split(format, buffer, spans)[0]
    if isinstance(format, NVFP4):
        scales = buffer[len(x) // 2 :][:2000].view(torch.float32)  # of the spans, after the codes
    assert len(scales) == 500
    assert bool((scales.view(torch.int32) & 0xFF == 0).all())


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_scale_is_the_smallest_that_holds_the_largest_magnitude(name: str) -> None:
    """Up to its last bit, 2^-15, and the rounding of 1 / max."""
    format = block_scaled(name)
    x = wide(128 * 500, seed=1)
    spans = (128,) * 500
    scales, _ = split(format, encoded(format, x, spans), spans)
    ideal = x.view(-1, 128).abs().amax(1).double() / ELEMENTS[format.element].max
    ratio = scales.double() / ideal
    assert ratio.min() >= 1 - 2**-22
    assert ratio.max() <= 1 + 2**-15 + 2**-22


@pytest.mark.parametrize("name", NARROW)
def test_code_times_scale_is_exact_in_float32(name: str) -> None:
    """So a fused multiply-add has nothing to round differently. Compared with exact rational arithmetic."""
    format = FORMATS[name]
    x = wide(128 * 64, seed=2)
    spans = (128,) * 64
    buffer = encoded(format, x, spans)
    scales, codes = split(format, buffer, spans)
    values = decoded(format, buffer, spans).view(len(scales), -1)[:, ::5]
    own = numbers(format, codes).view(len(scales), -1)[:, ::5]
    for scale, code, value in zip(scales.tolist(), own.tolist(), values.tolist()):
        assert [Fraction(scale) * Fraction(c) for c in code] == [Fraction(v) for v in value]


@pytest.mark.parametrize("name", POWER_OF_TWO)
def test_power_of_two_scales_make_encoding_idempotent(name: str) -> None:
    format = FORMATS[name]
    x = wide(128 * 500, seed=3)
    once = round_trip(format, x)
    assert torch.equal(round_trip(format, once), once)


@pytest.mark.parametrize(
    ("element", "rule"),
    [
        (element, rule)
        for element in oracle.ELEMENTS
        for rule in ("rceil", "floor", "ceil", "even")
        if rule != "even" or element in oracle.MANTISSA
    ],
)
def test_power_of_two_scales_are_the_e8m0_bytes_of_the_rules(element: str, rule: str) -> None:
    """For amax of all patterns, ties and edges included, by exact arithmetic and the bytes of ml_dtypes."""
    edges = np.float32(oracle.MAX[element]) * np.exp2(np.arange(-90, 100)).astype(np.float32)
    edges = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(np.inf))])
    amax = np.concatenate([bf16_patterns()[: 1 << 15], float32_patterns()[: 1 << 15], edges])
    theirs = oracle.scale(amax, element, rule).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    ours = stored(torch.from_numpy(amax), ELEMENTS[element], rule)  # type: ignore[arg-type]
    assert np.array_equal(ours.numpy(), theirs)


def test_e8m0_bytes_mean_what_they_mean_to_ml_dtypes() -> None:
    """But 0, the subnormal 2^-127, which no scale is."""
    codes = np.arange(1, 256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(power_of_two_scale(torch.from_numpy(codes)).numpy(), theirs, equal_nan=True)


@pytest.mark.parametrize("name", RCEIL)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(amax=st.floats(min_value=2.0**-90, max_value=2.0**110, width=32))
def test_a_power_of_two_scale_is_the_smallest_that_holds_the_largest_magnitude(name: str, amax: float) -> None:
    format = block_scaled(name)
    x = torch.zeros(format.block)
    x[5] = -amax
    scales, _ = split(format, encoded(format, x), (format.block,))
    scale, largest = scales.item(), ELEMENTS[format.element].max
    assert largest * scale >= amax > largest * scale / 2


@pytest.mark.parametrize("name", NARROW)
def test_magnitudes_at_the_edge_of_a_binade_and_of_the_format_do_not_overflow(name: str) -> None:
    """amax just below, at and above max x 2^k: the largest element must neither become inf nor lose a place."""
    format = FORMATS[name]
    element = ELEMENTS[element_of(format)]
    tolerance = 2.0**-3 if element.bits == 8 else 2.0**-2
    largest = torch.tensor(element.max)
    edges = [torch.nextafter(largest, torch.tensor(0.0)), largest, torch.nextafter(largest, torch.tensor(1e9))]
    for edge in edges:
        for exponent in (-60, -1, 0, 1, 60):
            x = torch.zeros(128)
            x[0] = edge * 2.0**exponent
            y = round_trip(format, x)[0]
            assert abs(float(y / x[0]) - 1) < tolerance
