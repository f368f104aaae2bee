"""FP8 written out in numpy and ml_dtypes: what the formats must agree with, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]

DTYPES: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
MAX = {"e4m3": 448.0, "e5m2": 57344.0}
TINY = np.float32(1e-30)


def exact_scale(amax: Floats, element: str) -> Floats:
    """amax / max, rounded up to 16 significant bits."""
    mantissa, exponent = np.frexp(amax * np.float32(1.0 / MAX[element]))
    scale = np.ldexp(np.ceil(np.ldexp(mantissa.astype(np.float64), 16)), exponent - 16)
    return special(amax, scale.astype(np.float32))


def power_of_two_scale(amax: Floats, element: str) -> Floats:
    """The smallest power of two s for which amax / s does not exceed the largest value."""
    exponent = np.full(amax.shape, -140)
    while (too_small := MAX[element] * np.exp2(exponent.astype(np.float64)) < amax).any():
        exponent[too_small & (exponent < 128)] += 1
        if (exponent[too_small] == 128).all():  # inf
            break
    return special(amax, np.exp2(exponent.astype(np.float64)).astype(np.float32))


def special(amax: Floats, scale: Floats) -> Floats:
    """1 where amax counts as zero, NaN where it is not finite."""
    return np.where(np.isfinite(amax), np.where(amax < TINY, np.float32(1.0), scale), np.float32(np.nan))


SCALES = {"exact": exact_scale, "rceil": power_of_two_scale}


def encode(x: Floats, element: str, scale: str, group: int) -> tuple[Floats, Codes]:
    """Scales, one per `group` elements, and codes."""
    groups = x.reshape(-1, group)
    with np.errstate(all="ignore"):
        s = SCALES[scale](np.abs(groups).max(axis=1), element)
        scaled = np.clip(groups * (np.float32(1.0) / s)[:, None], -MAX[element], MAX[element])
        return s, cast(scaled.reshape(-1), element)


def cast(x: Floats, element: str) -> Codes:
    """Round to nearest even, as ml_dtypes does."""
    with np.errstate(all="ignore"):
        return x.astype(DTYPES[element]).view(np.uint8)


def decode(scales: Floats, codes: Codes, element: str) -> Floats:
    """code x scale in float32."""
    with np.errstate(all="ignore"):
        values = codes.view(DTYPES[element]).astype(np.float32).reshape(len(scales), -1)
        return (values * scales[:, None]).reshape(-1)


def is_nan_code(codes: Codes, element: str) -> npt.NDArray[np.bool_]:
    """Which codes mean NaN (several do)."""
    return np.isnan(codes.view(DTYPES[element]).astype(np.float32))
