"""Elements: the small numbers that stand under a shared scale, as codes of 8 or 4 bits.

| element | grid | largest | what a code is |
|---|---|---|---|
| e4m3 | 4 exponent, 3 mantissa bits | 448 | torch.float8_e4m3fn |
| e5m2 | 5 exponent, 2 mantissa bits | 57344 | torch.float8_e5m2 |
| e2m1 | 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives | 6 | sign in bit 3, magnitude in bits 0 to 2 |
| e3m0 | 0, 0.25, 0.5, 1, 2, 4, 8, 16 and their negatives | 16 | sign in bit 3, magnitude in bits 0 to 2 |
| int8, int4 | whole numbers, as many positive as negative | 127, 7 | two's complement |

Codes of 4 bits come one to an int8 (its upper half is ignored): to uint8 the compiler does not vectorise.

`code` rounds to nearest even and saturates nowhere but in E2M1: the scale comes from the block's largest
magnitude, and rounding cannot pass the element's largest value. Non-finite numbers live in the scale.
Source: the OCP formats as torch and ml_dtypes implement them (FP8, FP4); E3M0 as named in Streaming DiLoCo (arXiv
2501.18512), which gives its bits and not its layout; integers as in SDP4Bit (arXiv
2410.15526), symmetric, because error feedback would see a bias in a grid with one more negative number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.formats.kernels import is_compiling

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


@dataclass(frozen=True)
class Element:
    """A grid of numbers and how float32 values get onto it and back."""

    name: str
    bits: int
    """8, or 4: then two codes share a byte on the wire."""
    max: float
    dtype: torch.dtype
    """Of a tensor of codes."""
    mantissa: int | None
    """Mantissa bits; None for whole numbers."""
    min_exponent: int
    """The spacing of the grid is 2^(max(exponent of the value, min_exponent) - mantissa)."""
    code: Callable[[Tensor], Tensor]
    """Float32 values within the grid's range to codes."""
    widen: Callable[[Tensor], Tensor]
    """Codes to float32, exactly."""

    def spacing(self, values: Tensor) -> Tensor:
        """The distance of the grid's neighbours of each value, float32."""
        if self.mantissa is None:
            return torch.ones_like(values)
        exponent = ((values.view(torch.int32) >> 23) & 0xFF).clamp(min=self.min_exponent + 127)
        return ((exponent - self.mantissa) << 23).view(torch.float32)


def _code_e4m3(values: Tensor) -> Tensor:
    return values.to(E4M3)


def _code_e5m2(values: Tensor) -> Tensor:
    return values.to(E5M2)


def _code_e2m1(values: Tensor) -> Tensor:
    """Round at the spacing of the binade; the code of a magnitude is then that number of spacings, plus the
    codes of the binades below. Float arithmetic throughout: bits take the compiler twice as long."""
    values = torch.where(values == values, values, 0.0)  # NaN has no code, and a sign that depends on the device
    magnitude = values.abs().clamp(max=6.0)
    upper = torch.where(magnitude < 4.0, torch.round(magnitude) + 2.0, torch.round(magnitude * 0.5) + 4.0)
    code = torch.where(magnitude < 2.0, torch.round(magnitude * 2.0), upper)
    sign = 4.0 - torch.copysign(torch.full_like(values, 4.0), values)  # 0 or 8
    return (code + sign).to(torch.int8)


def _code_e3m0(values: Tensor) -> Tensor:
    """Round the bits of a magnitude to its exponent, ties to the even code; below 1/4, to that or to zero."""
    values = torch.where(values == values, values, 0.0)  # NaN has no code
    bits = values.abs().view(torch.int32)
    code = ((bits + 0x3FFFFF + ((bits >> 23) & 1)) >> 23) - 124  # 1/4, the smallest, has exponent field 125
    code = torch.where(bits > 124 << 23, code.clamp(1, 7), 0)
    return (code + torch.where(torch.signbit(values), 8, 0)).to(torch.int8)


def _code_int8(values: Tensor) -> Tensor:
    return torch.round(torch.where(values == values, values, 0.0)).to(torch.int8)  # NaN has no integer


def _widen_e4m3(codes: Tensor) -> Tensor:
    """The compiler vectorises `.to`; eagerly the way through fp16 is 5x faster."""
    if is_compiling() or codes.device.type != "cpu":
        return codes.to(torch.float32)
    # The 7 magnitude bits of E4M3, 7 places up, are an fp16 with an exponent that is 8 too small.
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    bits.masked_fill_((bits & 0x3F80) == 0x3F80, 0x7E00)  # the NaN code
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def _widen_e5m2(codes: Tensor) -> Tensor:
    if is_compiling() or codes.device.type != "cpu":
        return codes.to(torch.float32)
    return (codes.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)  # its upper byte


def _widen_e2m1(codes: Tensor) -> Tensor:
    """Compiled, float arithmetic is twice as fast as bits; eagerly it is half as fast."""
    if is_compiling():
        code = codes.to(torch.float32)
        steps = torch.where(code >= 8.0, code - 8.0, code)
        magnitude = torch.where(steps < 4.0, steps * 0.5, torch.where(steps < 6.0, steps - 2.0, steps * 2.0 - 8.0))
        return torch.where(code >= 8.0, -magnitude, magnitude)
    # The 3 magnitude bits of E2M1, 9 places up, are an fp16 with an exponent that is 14 too small.
    bits = codes.to(torch.int16)
    return (((bits & 7) << 9) | ((bits & 8) << 12)).view(torch.float16).to(torch.float32) * 2.0**14


def _widen_e3m0(codes: Tensor) -> Tensor:
    code = codes.to(torch.int32)
    magnitude = torch.where((code & 7) > 0, ((code & 7) + 124) << 23, 0)
    return (magnitude | ((code & 8) << 28)).view(torch.float32)


def _widen_int8(codes: Tensor) -> Tensor:
    return codes.to(torch.float32)


def _widen_int4(codes: Tensor) -> Tensor:
    return (((codes & 15) ^ 8) - 8).to(torch.float32)  # extends the sign


ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", 8, 448.0, E4M3, 3, -6, _code_e4m3, _widen_e4m3),
        Element("e5m2", 8, 57344.0, E5M2, 2, -14, _code_e5m2, _widen_e5m2),
        Element("e2m1", 4, 6.0, torch.int8, 1, 0, _code_e2m1, _widen_e2m1),
        Element("e3m0", 4, 16.0, torch.int8, 0, -2, _code_e3m0, _widen_e3m0),
        Element("int8", 8, 127.0, torch.int8, None, 0, _code_int8, _widen_int8),
        Element("int4", 4, 7.0, torch.int8, None, 0, _code_int8, _widen_int4),
    )
}


# Two 4-bit codes in a byte: element 2i in the lower half, 2i+1 in the upper. The compiler does not vectorise
# strided pairs, so codes come one to a byte and are seen as int16 pairs here.


def pack(pairs: Tensor, out: Tensor) -> None:
    """int16 (n/2,), each two codes of one byte, to uint8 (n/2,)."""
    out.copy_(((pairs & 15) | ((pairs >> 4) & 0xF0)).to(torch.uint8))


def unpack(packed: Tensor, pairs: Tensor) -> None:
    """uint8 (n/2,) to int16 (n/2,), each two codes of one byte."""
    wide = packed.to(torch.int16)
    pairs.copy_((wide & 15) | ((wide & 0xF0) << 4))
