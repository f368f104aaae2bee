"""Block-scaled formats: small numbers under one scale per block or per span.

    inv = 1 / scale;  code = element(x * inv);  decoded = value(code) * scale

all in float32, round to nearest even or stochastically. With them the well-known formats are choices:

    FP8      e4m3 or e5m2, blocks of 128 or one scale per span, exact scales or powers of two
    MXFP8    e4m3 or e5m2, blocks of 32, powers of two         (OCP Microscaling formats 1.0)
    MXFP4    e2m1, blocks of 32, powers of two
    E3M0     powers of two from 1/64 of the largest on, and zero, 4 bits, blocks of 128 or one scale per span
    INT8/4   symmetric integers, groups of 128 or one scale per span

An encoded chunk is: scales (float32, or one E8M0 byte each), codes (8 bits, or 4 packed in pairs).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from thinwire.formats import scales
from thinwire.formats.elements import ELEMENTS, Element, pack, unpack
from thinwire.formats.format import Format, Spans, aligned, check_chunk
from thinwire.formats.kernels import Compiled, Eager, Kernel, Run, fixed
from thinwire.formats.stochastic import counters, round_stochastically

_ROUNDINGS = ("nearest", "stochastic")


@dataclass(frozen=True)
class BlockScaled:
    """Codes of `element` with scales: (bits + 32/block) / 8 bytes per element (exact), or + 8/block (E8M0)."""

    element: Literal["e4m3", "e5m2", "e2m1", "e3m0", "int8", "int4"]
    """See `thinwire.formats.elements`."""

    block: int = 128
    """Elements per scale (or, with `per_span`, the padding unit)."""

    per_span: bool = False
    """One scale per span ("per tensor") instead of one per block."""

    scale: scales.Rule = "exact"
    """"exact": float32 scales of 16 significant bits. Powers of two, as E8M0 bytes: "rceil" holds the largest
    magnitude; "floor" (the OCP standard's), "ceil" and "even" differ where it is rounded or cut off."""

    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Stochastic rounding needs keys. It is unbiased where the scale saturates nothing. With error feedback
    nearest is better."""

    run: Run = field(default=Eager(), repr=False, compare=False)
    """How kernels run; see `compiled`."""

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS:
            raise ValueError(f"BlockScaled element must be one of {', '.join(ELEMENTS)}, got {self.element!r}")
        if self.scale not in scales.RULES:
            raise ValueError(f"BlockScaled scale must be one of {', '.join(scales.RULES)}, got {self.scale!r}")
        if self.rounding not in _ROUNDINGS:
            raise ValueError(f"BlockScaled rounding must be nearest or stochastic, got {self.rounding!r}")
        if self.scale == "even" and self._element.mantissa is None:
            raise ValueError(f"BlockScaled scale 'even' is defined for floating elements, not for {self.element}")
        if self.block < 16 or self.block % 16:
            raise ValueError(f"BlockScaled block must be a positive multiple of 16, got {self.block}")

    @property
    def name(self) -> str:
        floating = self._element.mantissa is not None
        if floating and self.block == 32 and self.scale != "exact" and not self.per_span:
            name = {"e4m3": "mxfp8", "e5m2": "mxfp8_e5m2", "e2m1": "mxfp4", "e3m0": "mxfp4_e3m0"}[self.element]
            power = "" if self.scale == "rceil" else f"_{self.scale}"
        else:
            name = f"fp{self._element.bits}_{self.element}" if floating else self.element
            name += f"_{self.block}" if self.block != 128 else ""
            name += "_span" if self.per_span else ""
            power = {"exact": "", "rceil": "_pow2"}.get(self.scale, f"_pow2_{self.scale}")
        return name + power + ("_sr" if self.rounding == "stochastic" else "")

    @property
    def needs_key(self) -> bool:
        return self.rounding == "stochastic"

    def compiled(self, chunk: int) -> Format:
        return replace(self, run=Compiled(chunk))

    def nbytes(self, spans: Spans) -> int:
        return aligned(self._scale_bytes(spans) + sum(spans) * self._element.bits // 8)

    def encode(self, x: Tensor, out: Tensor, *, spans: Spans, key: Tensor | None = None) -> None:
        check_chunk(self.name, x, spans, self.block)
        blocks = x.view(-1, self.block)  # (blocks, block)
        stored, codes, packed = self._views(out, spans, x)
        draws = self._draws(key, spans)
        run = partial(self.run, numel=x.numel())
        if self.per_span:
            amax = torch.stack([part.amax() for part in run(_amax, blocks).split(self._blocks(spans))])
            self._kernel(_store)(amax, stored)  # (spans,)
            run(self._kernel(_code_blocks), blocks, self._of_blocks(stored, spans), codes, *draws)
        else:
            amax = run(self._kernel(_encode_blocks), blocks, codes, *draws)
            run(self._kernel(_store), amax, stored)  # (blocks,)
        if packed is not None:
            run(pack, codes.view(-1).view(torch.int16), packed)

    def decode(self, buffer: Tensor, out: Tensor, *, spans: Spans) -> None:
        self._decode(_decode_blocks, buffer, out, spans)

    def decode_add(self, buffer: Tensor, accumulator: Tensor, *, spans: Spans) -> None:
        self._decode(_decode_add_blocks, buffer, accumulator, spans)

    def _decode(self, kernel: Kernel, buffer: Tensor, out: Tensor, spans: Spans) -> None:
        stored, codes, packed = self._views(buffer, spans, out)
        run = partial(self.run, numel=out.numel())
        if packed is not None:
            run(unpack, packed, codes.view(-1).view(torch.int16))
        run(self._kernel(kernel), codes, self._of_blocks(stored, spans), out.view(-1, self.block))

    @property
    def _element(self) -> Element:
        return ELEMENTS[self.element]

    def _kernel(self, kernel: Kernel) -> Kernel:
        return fixed(kernel, element=self._element, rule=self.scale)

    def _blocks(self, spans: Spans) -> list[int]:
        """Blocks of each span."""
        return [length // self.block for length in spans]

    def _scale_bytes(self, spans: Spans) -> int:
        count = len(spans) if self.per_span else sum(spans) // self.block
        return count * (4 if self.scale == "exact" else 1)

    def _views(self, buffer: Tensor, spans: Spans, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Stored scales, float32 or uint8 (blocks or spans,); codes (blocks, block), in the buffer if they are
        bytes, else in memory of their own; then the place of the packed ones in the buffer, uint8 (n/2,)."""
        numel, end = sum(spans), self._scale_bytes(spans)
        stored = buffer[:end].view(torch.float32) if self.scale == "exact" else buffer[:end]
        if self._element.bits == 8:
            return stored, buffer[end : end + numel].view(-1, self.block).view(self._element.dtype), None
        codes = self.run.scratch(numel, chunk, self._element.dtype).view(-1, self.block)
        return stored, codes, buffer[end : end + numel // 2]

    def _of_blocks(self, stored: Tensor, spans: Spans) -> Tensor:
        """The stored scale of every block (blocks,)."""
        if not self.per_span:
            return stored
        return stored.repeat_interleave(torch.tensor(self._blocks(spans), device=stored.device))

    def _draws(self, key: Tensor | None, spans: Spans) -> tuple[Tensor, ...]:
        """The counters of stochastic rounding, int32 (blocks, block); nothing for rounding to nearest."""
        if self.rounding == "nearest":
            return ()
        return (counters(self.name, key, spans).view(-1, self.block),)


# Kernels. Arguments: x, float32 (blocks, block); amax, float32 (blocks,); stored scales, float32 or uint8
# (blocks,); codes (blocks, block); draws, int32 (blocks, block). The encoder returns amax instead of storing
# scales: so the compiler keeps both passes over a block in one loop.


def _amax(x: Tensor) -> Tensor:
    return x.abs().amax(1)


def _encode_blocks(
    x: Tensor, codes: Tensor, draws: Tensor | None = None, *, element: Element, rule: scales.Rule
) -> Tensor:
    amax = x.abs().amax(1)
    _code_blocks(x, scales.stored(amax, element, rule), codes, draws, element=element, rule=rule)
    return amax


def _store(amax: Tensor, stored: Tensor, *, element: Element, rule: scales.Rule) -> None:
    stored.copy_(scales.stored(amax, element, rule))


def _code_blocks(
    x: Tensor,
    stored: Tensor,
    codes: Tensor,
    draws: Tensor | None = None,
    *,
    element: Element,
    rule: scales.Rule,
) -> None:
    scale = scales.float32(stored, rule)
    values = x * (1.0 / scale)[:, None]
    if draws is not None:
        values = round_stochastically(values, element.spacing(values), draws)
    if draws is not None or rule in scales.SATURATING:
        values = _saturated(values, element.max)
    codes.copy_(element.code(values))


def _saturated(values: Tensor, largest: float) -> Tensor:
    """Like clamp, but a NaN keeps its bits, compiled too."""
    return torch.where(values > largest, largest, torch.where(values < -largest, -largest, values))


def _decode_blocks(codes: Tensor, stored: Tensor, out: Tensor, *, element: Element, rule: scales.Rule) -> None:
    torch.mul(element.widen(codes), scales.float32(stored, rule)[:, None], out=out)


def _decode_add_blocks(
    codes: Tensor, stored: Tensor, sums: Tensor, *, element: Element, rule: scales.Rule
) -> None:
    sums.add_(element.widen(codes) * scales.float32(stored, rule)[:, None])
