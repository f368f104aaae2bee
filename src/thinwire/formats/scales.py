"""Scales of low-precision blocks: the numbers that bring a block's largest magnitude to the element's largest.

A scale is `amax / max`. *Exact* scales are rounded up to 16 significant bits, so that code x scale is exact
in float32 for codes of up to 8 bits and a fused multiply-add cannot change a bit. *Power-of-two* scales
travel as one E8M0 byte (exponent + 127, NaN = 255); decoding only moves the exponent. Four rules for them:

    rceil   2^ceil(log2(amax / max)): the smallest that holds amax
    floor   2^(floor(log2 amax) - emax): the OCP standard's; the largest magnitudes may saturate
    ceil    2^(ceil(log2 amax) - emax)
    even    floor, after rounding amax to the element's mantissa

Under each of them what was decoded is encoded without error, so a second hop costs nothing.
A block whose amax is below 1e-30 counts as zero: its scale is 1. (With error feedback the residual of an
unused row decays to denormals, and 1 / scale would overflow.) A block that holds inf or NaN has the scale
NaN, so every rank sees it.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from thinwire.formats.elements import Element

Rule: TypeAlias = Literal["exact", "rceil", "floor", "ceil", "even"]

RULES = ("exact", "rceil", "floor", "ceil", "even")
SATURATING = ("floor", "even")
"""Rules under which amax / scale can pass the element's largest value."""

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


def stored(amax: Tensor, element: Element, rule: Rule) -> Tensor:
    """Scales as they travel: float32, or E8M0 codes, here int32."""
    if rule == "exact":
        return exact_scale(amax, element.max)
    return power_of_two_exponent(amax, element, rule)


def float32(stored: Tensor, rule: Rule) -> Tensor:
    """Scales as encoding and decoding multiply with them."""
    return stored if rule == "exact" else power_of_two_scale(stored)


def power_of_two_exponent(amax: Tensor, element: Element, rule: Rule) -> Tensor:
    """int32 E8M0 codes, exact by the bits of amax."""
    mantissa, emax = _mantissa_and_exponent(element.max)
    # What is added to the bits of amax carries into its exponent where the rule rounds up.
    carry = {
        "rceil": 0x7FFFFF - mantissa,  # where the mantissa exceeds that of the largest value
        "ceil": 0x7FFFFF,
        "floor": 0,
        "even": 1 << (22 - (element.mantissa or 0)),
    }[rule]
    code = ((amax.view(torch.int32) + carry) >> 23) - emax
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
