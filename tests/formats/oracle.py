"""The formats written out in numpy and ml_dtypes: what they must agree with, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

ELEMENTS = ("e4m3", "e5m2", "e2m1", "e3m0", "int8", "int4")
FLOATS: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e3m0": 4, "int8": 8, "int4": 4}
MAX = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0, "e3m0": 16.0, "int8": 127.0, "int4": 7.0}
MANTISSA = {"e4m3": 3, "e5m2": 2, "e2m1": 1, "e3m0": 0}
E3M0 = np.array([0.0, *np.exp2(np.arange(-2.0, 5.0))])
TINY = np.float32(1e-30)


def cast(x: Floats, element: str) -> Codes:
    """Codes of numbers within ±max, rounded to nearest even."""
    with np.errstate(all="ignore"):
        if element in FLOATS:
            return x.astype(FLOATS[element]).view(np.uint8)
        if element == "e3m0":
            return _nearest(x, E3M0)
        return np.rint(x).astype(np.int8).view(np.uint8) & np.uint8(0xFF if element == "int8" else 0x0F)


def values(codes: Codes, element: str) -> Floats:
    """What codes mean."""
    if element in FLOATS:
        return codes.view(FLOATS[element]).astype(np.float32)
    if element == "e3m0":
        return np.copysign(E3M0[codes & 7], np.where(codes & 8, -1.0, 1.0)).astype(np.float32)
    half = 128 if element == "int8" else 8
    return np.where(codes >= half, codes - np.float32(2 * half), codes).astype(np.float32)


def _nearest(x: Floats, grid: npt.NDArray[np.float64]) -> Codes:
    """The number of the nearest magnitude of the grid, the even one of two as near; 8 more with a sign."""
    magnitude = np.abs(np.where(np.isnan(x), np.float32(0.0), x)).astype(np.float64)
    middles = (grid[1:] + grid[:-1]) / 2
    below = np.searchsorted(middles, magnitude, side="left")
    tie = np.isin(magnitude, middles)
    return (below + (tie & (below % 2 == 1)) + 8 * (np.signbit(x) & ~np.isnan(x))).astype(np.uint8)


def exact_scale(amax: Floats, largest: float) -> Floats:
    """amax / largest, rounded up to 16 significant bits."""
    mantissa, exponent = np.frexp(amax * np.float32(1.0 / largest))
    return np.ldexp(np.ceil(np.ldexp(mantissa.astype(np.float64), 16)), exponent - 16).astype(np.float32)


def exponent(amax: Floats, element: str, rule: str) -> npt.NDArray[np.int64]:
    """The exponent of a power-of-two scale, by the definitions of the rules in exact arithmetic."""
    a, largest = amax.astype(np.float64), MAX[element]
    emax = np.floor(np.log2(largest)).astype(np.int64)
    fraction, log2 = np.frexp(a)  # a = fraction * 2^log2, 0.5 <= fraction < 1
    floor = log2.astype(np.int64) - 1
    if rule == "floor":
        return floor - emax
    if rule == "ceil":
        return floor + (fraction > 0.5) - emax
    if rule == "even":
        half_a_step = np.exp2(floor - MANTISSA[element] - 1.0)
        return np.frexp(a + half_a_step)[1] - 1 - emax
    return floor - emax + (largest * np.exp2((floor - emax).astype(np.float64)) < a)  # rceil


def scale(amax: Floats, element: str, rule: str) -> Floats:
    """Scales of blocks: 1 where amax counts as zero, NaN where it is not finite."""
    with np.errstate(all="ignore"):
        if rule == "exact":
            own = exact_scale(amax, MAX[element])
        else:
            finite = np.where(np.isfinite(amax) & (amax > 0), amax, np.float32(1.0))
            own = np.exp2(exponent(finite, element, rule).astype(np.float64)).astype(np.float32)
    return np.where(np.isfinite(amax), np.where(amax < TINY, np.float32(1.0), own), np.float32(np.nan))


def encode(x: Floats, element: str, rule: str, group: int) -> tuple[Floats, Codes]:
    """Scales, one per `group` elements, and codes."""
    blocks = x.reshape(-1, group)
    with np.errstate(all="ignore"):
        s = scale(np.abs(blocks).max(axis=1), element, rule)
        scaled = np.clip(blocks * (np.float32(1.0) / s)[:, None], -MAX[element], MAX[element])
        return s, cast(scaled.reshape(-1), element)


def encode_nvfp4(span: Floats) -> tuple[Floats, Codes]:
    """Products of block and span scale, one per 16 elements, and codes, of one span."""
    blocks = span.reshape(-1, 16)
    one, sixth = np.float32(1.0), np.float32(1.0 / 6.0)
    with np.errstate(all="ignore"):
        amax = np.abs(blocks).max(axis=1)
        largest = amax.max(keepdims=True)
        s = exact_scale(largest, 6.0 * 448.0)
        s = np.where(np.isfinite(largest), np.where(largest < TINY, one, s), np.float32(np.nan))
        v = values(cast(np.minimum(amax * (one / s * sixth), np.float32(448.0)), "e4m3"), "e4m3") * s
        inverse = np.where(v == 0, np.float32(0.0), one / v)
        return v, cast(np.clip(blocks * inverse[:, None], -6.0, 6.0).reshape(-1), "e2m1")


def decode(scales: Floats, codes: Codes, element: str) -> Floats:
    """code x scale in float32."""
    with np.errstate(all="ignore"):
        return (values(codes, element).reshape(len(scales), -1) * scales[:, None]).reshape(-1)
