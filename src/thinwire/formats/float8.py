"""FP8: the element formats E4M3 and E5M2 under one scale per block or per span.

    inv = 1 / scale;  code = cast(x * inv);  decoded = code * scale

all in float32, round to nearest even. The cast needs no clamp: the scale comes from the block's largest
magnitude, and rounding cannot pass the format's largest value (448 or 57344).
Source: OCP FP8 formats as torch.float8_e4m3fn and torch.float8_e5m2 implement them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from thinwire.formats import scales
from thinwire.formats.format import Format, Run, Spans, aligned, check_chunk
from thinwire.formats.kernels import Compiled, eager

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MAX = {E4M3: 448.0, E5M2: 57344.0}
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


@dataclass(frozen=True)
class Float8:
    """FP8 codes with scales: 1 + 4/block bytes per element (exact) or 1 + 1/block (power of two)."""

    element: Literal["e4m3", "e5m2"]
    """E4M3: 3 mantissa bits, range 2^-9 to 448. E5M2: 2 mantissa bits, range 2^-16 to 57344."""

    block: int = 128
    """Elements per scale (or, with `per_span`, the padding unit)."""

    per_span: bool = False
    """One scale per span ("per tensor") instead of one per block."""

    scale: Literal["exact", "power_of_two"] = "exact"
    """Float32 scales of 16 significant bits, or E8M0 bytes."""

    run: Run = field(default=eager, repr=False, compare=False)
    """How kernels run; see `compiled`."""

    def __post_init__(self) -> None:
        if self.element not in DTYPES:
            raise ValueError(f"Float8 element must be 'e4m3' or 'e5m2', got {self.element!r}")
        if self.scale not in ("exact", "power_of_two"):
            raise ValueError(f"Float8 scale must be 'exact' or 'power_of_two', got {self.scale!r}")
        if self.block < 16 or self.block % 16:
            raise ValueError(f"Float8 block must be a positive multiple of 16, got {self.block}")

    @property
    def name(self) -> str:
        block = f"_{self.block}" if self.block != 128 else ""
        return (
            f"fp8_{self.element}{block}"
            + ("_span" if self.per_span else "")
            + ("_pow2" if self.scale == "power_of_two" else "")
        )

    def compiled(self, chunk: int) -> Format:
        return replace(self, run=Compiled(chunk))

    def nbytes(self, spans: Spans) -> int:
        return aligned(self._scale_bytes(spans) + sum(spans))

    def encode(self, x: Tensor, out: Tensor, *, spans: Spans, key: Tensor | None = None) -> None:
        check_chunk(self.name, x, spans, self.block)
        stored, codes = self._views(out, spans)
        blocks = x.view(-1, self.block)  # (blocks, block)
        if self.per_span:
            per_block = self.run(_amax, blocks)
            amax = torch.stack([span.amax() for span in per_block.split([n // self.block for n in spans])])
            stored.copy_(self._stored_scale(amax))  # (spans,)
            self.run(_cast_blocks, blocks, self._block_scales(stored, spans), codes)
        else:
            encode = _encode_exact if self.scale == "exact" else _encode_power_of_two
            amax = self.run(encode, blocks, codes)
            stored.copy_(self._stored_scale(amax))  # (blocks,)

    def decode(self, buffer: Tensor, out: Tensor, *, spans: Spans) -> None:
        stored, codes = self._views(buffer, spans)
        self.run(_decode_blocks, codes, self._block_scales(stored, spans), out.view(-1, self.block))

    def decode_add(self, buffer: Tensor, accumulator: Tensor, *, spans: Spans) -> None:
        stored, codes = self._views(buffer, spans)
        blocks = accumulator.view(-1, self.block)
        self.run(_decode_add_blocks, codes, self._block_scales(stored, spans), blocks)

    def _scale_bytes(self, spans: Spans) -> int:
        count = len(spans) if self.per_span else sum(spans) // self.block
        return count * (4 if self.scale == "exact" else 1)

    def _views(self, buffer: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
        """Stored scales, float32 or uint8 (blocks or spans,), and codes, float8 (blocks, block)."""
        end = self._scale_bytes(spans)
        stored = buffer[:end]
        codes = buffer[end : end + sum(spans)].view(-1, self.block).view(DTYPES[self.element])
        return (stored.view(torch.float32) if self.scale == "exact" else stored), codes

    def _stored_scale(self, amax: Tensor) -> Tensor:
        max_value = MAX[DTYPES[self.element]]
        if self.scale == "exact":
            return scales.exact_scale(amax, max_value)
        return scales.power_of_two_exponent(amax, max_value).to(torch.uint8)

    def _block_scales(self, stored: Tensor, spans: Spans) -> Tensor:
        """Float32 scales (blocks,) of stored ones."""
        scale = stored if self.scale == "exact" else scales.power_of_two_scale(stored)
        if not self.per_span:
            return scale
        blocks_per_span = torch.tensor([length // self.block for length in spans], device=stored.device)
        return scale.repeat_interleave(blocks_per_span)


# Kernels. Arguments: x, float32 (blocks, block); scales (blocks,); codes, float8 (blocks, block). The encoders
# return amax (blocks,) instead of writing scales: so the compiler keeps both passes over a block in one loop.


def _encode_exact(x: Tensor, codes: Tensor) -> Tensor:
    amax = x.abs().amax(1)
    _cast_blocks(x, scales.exact_scale(amax, MAX[codes.dtype]), codes)
    return amax


def _encode_power_of_two(x: Tensor, codes: Tensor) -> Tensor:
    amax = x.abs().amax(1)
    exponent = scales.power_of_two_exponent(amax, MAX[codes.dtype])
    _cast_blocks(x, scales.power_of_two_scale(exponent), codes)
    return amax


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax(1)


def _cast_blocks(x: Tensor, scale: Tensor, codes: Tensor) -> None:
    codes.copy_((x * (1.0 / scale)[:, None]).to(codes.dtype))


def _decode_blocks(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    torch.mul(widen(codes), scale[:, None], out=out)


def _decode_add_blocks(codes: Tensor, scale: Tensor, accumulator: Tensor) -> None:
    accumulator.add_(widen(codes) * scale[:, None])


def widen(codes: Tensor) -> Tensor:
    """float8 to float32, exactly. The compiler vectorises `.to`; eagerly the way through fp16 is 5x faster."""
    if torch.compiler.is_compiling() or codes.device.type != "cpu":
        return codes.to(torch.float32)
    if codes.dtype == E5M2:  # E5M2 is the upper byte of an fp16
        return (codes.view(torch.uint8).to(torch.int16) << 8).view(torch.float16).to(torch.float32)
    # The 7 magnitude bits of E4M3, 7 places up, are an fp16 with an exponent that is 8 too small.
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000
    bits.masked_fill_((bits & 0x3F80) == 0x3F80, 0x7E00)  # the NaN code
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)
