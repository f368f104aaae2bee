"""NVFP4: E2M1 elements, an E4M3 scale per block of 16, a float32 scale per span.

    span scale    s = amax(span) / (6 * 448), rounded up to 16 significant bits
    block scale   v = e4m3(amax(block) / 6 / s), round to nearest even
    code          e2m1(x / (v s)), round to nearest even, saturating at 6 (v may have been rounded down)
    decoded       value(code) * (v s): 2 + 4 + 16 significant bits, exact in float32

4.5 bits per element and 4 bytes per span. A block whose scale rounds to zero (its amax is some 2^-10 of one
448th of the span's) is zeros. A non-finite value makes its whole span NaN. An encoded chunk is: codes packed in
pairs, span scales, block scales.
Source: NVIDIA's NVFP4 recipe (arXiv 2509.25149, appendix B) as Transformer Engine computes it, except that s
is the float32 that is multiplied with, not its reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinwire.formats import scales
from thinwire.formats.elements import ELEMENTS, pack, unpack
from thinwire.formats.format import Format, Spans, aligned, check_chunk
from thinwire.formats.kernels import Compiled, Eager, Kernel, Run
from thinwire.formats.stochastic import counters, round_stochastically

BLOCK = 16
E2M1 = ELEMENTS["e2m1"]
E4M3 = ELEMENTS["e4m3"]


@dataclass(frozen=True)
class NVFP4:
    """E2M1 under two scales: 0.5625 bytes per element."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Stochastic rounding needs keys. It is unbiased, but that a block whose scale was rounded down loses up to a
    17th of its largest magnitudes. With error feedback nearest is better."""

    run: Run = field(default=Eager(), repr=False, compare=False)
    """How kernels run; see `compiled`."""

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"NVFP4 rounding must be nearest or stochastic, got {self.rounding!r}")

    @property
    def name(self) -> str:
        return "nvfp4" if self.rounding == "nearest" else "nvfp4_sr"

    @property
    def block(self) -> int:
        return BLOCK

    @property
    def needs_key(self) -> bool:
        return self.rounding == "stochastic"

    def compiled(self, chunk: int) -> Format:
        return replace(self, run=Compiled(chunk))

    def nbytes(self, spans: Spans) -> int:
        return aligned(4 * len(spans) + sum(spans) // BLOCK + sum(spans) // 2)

    def encode(self, x: Tensor, out: Tensor, *, spans: Spans, key: Tensor | None = None) -> None:
        check_chunk(self.name, x, spans, BLOCK)
        run = partial(self.run, numel=x.numel())
        blocks = x.view(-1, BLOCK)
        span_scales, block_scales, packed = _views(out, spans)
        counts = [length // BLOCK for length in spans]
        amax = self.run.scratch(len(blocks), x, torch.float32)
        run(_amax, blocks, amax)
        of_span = torch.stack([part.amax() for part in amax.split(counts)])
        span_scales.copy_(scales.exact_scale(of_span, 6.0 * 448.0))
        run(_scale_blocks, amax, _spread(span_scales, counts), block_scales)
        codes = self.run.scratch(x.numel(), x, E2M1.dtype)
        run(_code_blocks, blocks, amax, codes.view(-1, BLOCK), *self._draws(key, spans))
        run(pack, codes.view(torch.int16), packed)

    def decode(self, buffer: Tensor, out: Tensor, *, spans: Spans) -> None:
        self._decode(_decode_blocks, buffer, out, spans)

    def decode_add(self, buffer: Tensor, accumulator: Tensor, *, spans: Spans) -> None:
        self._decode(_decode_add_blocks, buffer, accumulator, spans)

    def _decode(self, kernel: Kernel, buffer: Tensor, out: Tensor, spans: Spans) -> None:
        run = partial(self.run, numel=out.numel())
        span_scales, block_scales, packed = _views(buffer, spans)
        codes = self.run.scratch(out.numel(), out, E2M1.dtype)
        run(unpack, packed, codes.view(torch.int16))
        span_scale = _spread(span_scales, [length // BLOCK for length in spans])
        run(kernel, codes.view(-1, BLOCK), block_scales, span_scale, out.view(-1, BLOCK))

    def _draws(self, key: Tensor | None, spans: Spans) -> tuple[Tensor, ...]:
        if self.rounding == "nearest":
            return ()
        return (counters(self.name, key, spans).view(-1, BLOCK),)


def _views(buffer: Tensor, spans: Spans) -> tuple[Tensor, Tensor, Tensor]:
    """Span scales, float32 (spans,); block scales, float8 (n/16,); packed codes, uint8 (n/2,), which come first in
    the buffer: so all are aligned."""
    numel = sum(spans)
    first = numel // 2
    second = first + 4 * len(spans)
    return (
        buffer[first:second].view(torch.float32),
        buffer[second : second + numel // BLOCK].view(E4M3.dtype),
        buffer[:first],
    )


def _spread(span_scales: Tensor, counts: list[int]) -> Tensor:
    """(spans,) to (blocks,)."""
    if len(counts) == 1:
        return span_scales.expand(counts)
    return span_scales.repeat_interleave(torch.tensor(counts, device=span_scales.device))


# Kernels. Arguments: x, float32 (blocks, 16); amax, span_scale and inverse, float32 (blocks,); block_scales,
# float8 (blocks,); codes, int8 (blocks, 16); draws, int32 (blocks, 16). What is computed per block has a kernel
# of its own: fused with what is computed per element, the compiler would compute it 16 times.


def _amax(x: Tensor, amax: Tensor) -> None:
    torch.amax(x.abs(), 1, out=amax)


def _scale_blocks(amax: Tensor, span_scale: Tensor, block_scales: Tensor) -> None:
    """`amax` becomes what x is multiplied with: 0 where the block scale is 0, NaN where the span's is."""
    exact = (amax * (1.0 / span_scale * (1.0 / 6.0))).clamp(max=448.0)
    rounded = exact.abs().to(E4M3.dtype)  # one NaN: eager and compiled ones differ in sign
    block_scales.copy_(rounded)
    scale = _scale(rounded, span_scale)
    amax.copy_(torch.where(scale == 0.0, 0.0, 1.0 / scale))


def _code_blocks(x: Tensor, inverse: Tensor, codes: Tensor, draws: Tensor | None = None) -> None:
    values = x * inverse[:, None]
    if draws is not None:
        values = values.clamp(-6.0, 6.0)
        values = round_stochastically(values, E2M1.spacing(values), draws)
    codes.copy_(E2M1.code(values))


def _scale(block_scales: Tensor, span_scale: Tensor) -> Tensor:
    return E4M3.widen(block_scales) * span_scale


def _decode_blocks(codes: Tensor, block_scales: Tensor, span_scale: Tensor, out: Tensor) -> None:
    torch.mul(E2M1.widen(codes), _scale(block_scales, span_scale)[:, None], out=out)


def _decode_add_blocks(codes: Tensor, block_scales: Tensor, span_scale: Tensor, sums: Tensor) -> None:
    sums.add_(E2M1.widen(codes) * _scale(block_scales, span_scale)[:, None])
