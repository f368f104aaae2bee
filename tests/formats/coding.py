"""Short ways to push a tensor through a format, shared by the tests of formats."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.formats import BlockScaled, Format, Spans, get

FP8 = ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3_pow2", "fp8_e5m2_pow2", "fp8_e4m3_span", "fp8_e5m2_span")
NARROW = ("mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "int8", "int4", "int8_span", "int4_span")
CASTS = ("fp32", "bf16", "fp16")
POWER_OF_TWO = ("fp8_e4m3_pow2", "fp8_e5m2_pow2")


def float8(name: str) -> BlockScaled:
    """The FP8 format called `name`."""
    format = get(name)
    assert isinstance(format, BlockScaled)
    return format


def encoded(format: Format, x: Tensor, spans: Spans | None = None) -> Tensor:
    """`x` as bytes; the padding is zero, so that buffers can be compared."""
    spans = spans or (x.numel(),)
    out = torch.zeros(format.nbytes(spans), dtype=torch.uint8)
    format.encode(x, out, spans=spans)
    return out


def decoded(format: Format, buffer: Tensor, spans: Spans) -> Tensor:
    """A buffer as numbers."""
    out = torch.full((sum(spans),), 777.0)
    format.decode(buffer, out, spans=spans)
    return out


def round_trip(format: Format, x: Tensor, spans: Spans | None = None) -> Tensor:
    """What arrives of `x`."""
    spans = spans or (x.numel(),)
    return decoded(format, encoded(format, x, spans), spans)


def split(format: BlockScaled, buffer: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """The float32 scales and the uint8 codes of an encoded chunk: scales come first, one per block or span."""
    count = len(spans) if format.per_span else sum(spans) // format.block
    size = 4 if format.scale == "exact" else 1
    stored, codes = buffer[: count * size], buffer[count * size : count * size + sum(spans)]
    if format.scale == "exact":
        return stored.view(torch.float32), codes
    return stored.view(torch.float8_e8m0fnu).to(torch.float32), codes


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of float32 bits, with every NaN like every other."""
    both_nan = a.isnan() & b.isnan()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | both_nan).all())


def normal(n: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, always the same."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))
