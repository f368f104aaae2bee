"""Scales of low-precision blocks: the numbers that bring a block's largest magnitude to the format's largest.

A scale is `amax / max`. *Exact* scales are rounded up to 16 significant bits, so that code x scale is exact
in float32 for codes of up to 8 bits and a fused multiply-add cannot change a bit. *Power-of-two* scales are
rounded up to a power of two and travel as one E8M0 byte (exponent + 127, NaN = 255); decoding only moves
the exponent, so encoding a decoded block again gives the same bytes.

A block whose amax is below 1e-30 counts as zero: its scale is 1. (With error feedback the residual of an
unused row decays to denormals, and 1 / scale would overflow.) A block that holds inf or NaN has the scale
NaN, so every rank sees it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-30
NAN = float("nan")
INF = float("inf")
E8M0_NAN = 255


def exact_scale(amax: Tensor, max_value: float) -> Tensor:
    """Float32 scales of blocks with largest magnitudes `amax`, rounded up to 16 significant bits."""
    scale = amax * (1.0 / max_value)
    bits = (scale.view(torch.int32) + 0xFF) & ~0xFF
    scale = torch.where(amax < TINY, 1.0, bits.view(torch.float32))
    return torch.where(amax < INF, scale, NAN)


def power_of_two_exponent(amax: Tensor, max_value: float) -> Tensor:
    """int32 E8M0 codes of ceil(log2(amax / max_value)), exact by the bits of amax."""
    mantissa, exponent = _mantissa_and_exponent(max_value)
    # The carry into the exponent is the ceiling: it happens where amax's mantissa exceeds that of max_value.
    code = ((amax.view(torch.int32) + (0x7FFFFF - mantissa)) >> 23) - exponent
    code = torch.where(amax < TINY, 127, code)
    return torch.where(amax < INF, code, E8M0_NAN)


def power_of_two_scale(code: Tensor) -> Tensor:
    """Float32 scale of an E8M0 code (1..254; 255 gives NaN)."""
    code = code.to(torch.int32)
    return torch.where(code == E8M0_NAN, NAN, (code << 23).view(torch.float32))


def _mantissa_and_exponent(value: float) -> tuple[int, int]:
    """Mantissa bits and unbiased exponent of a positive normal float32."""
    fraction, exponent = math.frexp(value)  # 0.5 <= fraction < 1
    return int((2 * fraction - 1) * (1 << 23)), exponent - 1
