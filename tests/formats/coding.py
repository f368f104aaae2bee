"""Short ways to push a tensor through a format, shared by the tests of formats."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.formats import oracle
from thinwire.formats import NVFP4, BlockScaled, Cast, Format, Spans, get, names

CASTS = ("fp32", "bf16", "fp16")
FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        *(get(name) for name in names()),
        *(
            BlockScaled(element, 32, scale=rule)
            for element in ("e4m3", "e5m2", "e2m1")
            for rule in ("floor", "ceil", "even")
        ),
        *(BlockScaled(element, scale=rule) for element in ("int8", "int4") for rule in ("rceil", "floor", "ceil")),
    )
}
"""All formats with a name of their own, and the rules for scales that have none."""

BLOCK_SCALED = tuple(name for name, format in FORMATS.items() if isinstance(format, BlockScaled))
NARROW = tuple(name for name, format in FORMATS.items() if not isinstance(format, Cast))
"""The formats with scales."""


def block_scaled(name: str) -> BlockScaled:
    """The block-scaled format called `name`."""
    format = FORMATS[name]
    assert isinstance(format, BlockScaled)
    return format


def encoded(format: Format, x: Tensor, spans: Spans | None = None, key: Tensor | None = None) -> Tensor:
    """`x` as bytes; the padding is zero, so that buffers can be compared."""
    spans = spans or (x.numel(),)
    out = torch.zeros(format.nbytes(spans), dtype=torch.uint8)
    format.encode(x, out, spans=spans, key=key)
    return out


def decoded(format: Format, buffer: Tensor, spans: Spans) -> Tensor:
    """A buffer as numbers."""
    out = torch.full((sum(spans),), 777.0)
    format.decode(buffer, out, spans=spans)
    return out


def round_trip(format: Format, x: Tensor, spans: Spans | None = None, key: Tensor | None = None) -> Tensor:
    """What arrives of `x`."""
    spans = spans or (x.numel(),)
    return decoded(format, encoded(format, x, spans, key), spans)


def element_of(format: Format) -> str:
    """The element of a format with scales."""
    return format.element if isinstance(format, BlockScaled) else "e2m1"


def groups(format: Format, spans: Spans) -> list[int]:
    """Lengths of the runs of elements that see each other: blocks, or spans where a scale is the span's."""
    if isinstance(format, NVFP4) or (isinstance(format, BlockScaled) and format.per_span):
        return list(spans)
    return [format.block] * (sum(spans) // format.block)


def split(format: Format, buffer: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """What an encoded chunk holds, read from the layout of the formats: float32 scales, one per block (or per
    span, with a scale per span), and codes, one uint8 per element."""
    numel = sum(spans)
    if isinstance(format, NVFP4):
        codes, stored = buffer[: numel // 2], buffer[numel // 2 :]
        span_scales, stored = stored[: 4 * len(spans)].view(torch.float32), stored[4 * len(spans) :]
        counts = torch.tensor([length // 16 for length in spans])
        block_scales = stored[: numel // 16].view(torch.float8_e4m3fn).float()
        return block_scales * span_scales.repeat_interleave(counts), nibbles(codes)
    assert isinstance(format, BlockScaled)
    count = len(spans) if format.per_span else numel // format.block
    size = 4 if format.scale == "exact" else 1
    stored, codes = buffer[: count * size], buffer[count * size :]
    scales = stored.view(torch.float32 if size == 4 else torch.float8_e8m0fnu).float()
    return scales, codes[:numel] if oracle.BITS[format.element] == 8 else nibbles(codes[: numel // 2])


def nibbles(packed: Tensor) -> Tensor:
    """Two codes of each byte: element 2i in the lower half, 2i+1 in the upper."""
    return torch.stack([packed & 15, packed >> 4], dim=1).flatten()


def numbers(format: Format, codes: Tensor) -> Tensor:
    """What codes mean under the scale 1, float32."""
    return torch.from_numpy(oracle.values(codes.numpy(), element_of(format)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality of float32 bits, with every NaN like every other."""
    both_nan = a.isnan() & b.isnan()
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | both_nan).all())


def normal(n: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, always the same."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def bf16_patterns() -> np.ndarray:
    """All 65,536 bfloat16 numbers as float32."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def float32_patterns() -> np.ndarray:
    """2^16-strided float32 bit patterns with low bits set, so that all of them lie off the bfloat16 grid."""
    return ((np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8001).view(np.float32)
