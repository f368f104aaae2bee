"""Number formats: numbers to bytes and back. Pure functions on tensors; no state, no torch.distributed."""

from __future__ import annotations

import torch

from thinwire.formats.cast import Cast
from thinwire.formats.format import Format, Spans
from thinwire.formats.nvfp4 import NVFP4
from thinwire.formats.scaled import BlockScaled

__all__ = ["NVFP4", "BlockScaled", "Cast", "Format", "Spans", "get", "names"]

_FORMATS: dict[str, Format] = {
    "fp32": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "fp8_e4m3": BlockScaled("e4m3"),
    "fp8_e5m2": BlockScaled("e5m2"),
    "fp8_e4m3_pow2": BlockScaled("e4m3", scale="rceil"),
    "fp8_e5m2_pow2": BlockScaled("e5m2", scale="rceil"),
    "fp8_e4m3_span": BlockScaled("e4m3", per_span=True),
    "fp8_e5m2_span": BlockScaled("e5m2", per_span=True),
    "mxfp8": BlockScaled("e4m3", block=32, scale="rceil"),
    "mxfp8_e5m2": BlockScaled("e5m2", block=32, scale="rceil"),
    "mxfp4": BlockScaled("e2m1", block=32, scale="rceil"),
    "nvfp4": NVFP4(),
    "fp4_e3m0": BlockScaled("e3m0"),
    "fp4_e3m0_span": BlockScaled("e3m0", per_span=True),
    "int8": BlockScaled("int8"),
    "int4": BlockScaled("int4"),
    "int8_span": BlockScaled("int8", per_span=True),
    "int4_span": BlockScaled("int4", per_span=True),
}


def names() -> tuple[str, ...]:
    """Names that `get` knows."""
    return tuple(_FORMATS)


def get(name: str | Format) -> Format:
    """The format called `name`; a Format passes through. Raises ValueError listing the names."""
    if not isinstance(name, str):
        return name
    if name not in _FORMATS:
        raise ValueError(f"unknown format {name!r}; choose one of {', '.join(_FORMATS)}, or pass a Format")
    return _FORMATS[name]
