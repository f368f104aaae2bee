"""Number formats: numbers to bytes and back. Pure functions on tensors; no state, no torch.distributed."""

from __future__ import annotations

import torch

from thinwire.formats.cast import Cast
from thinwire.formats.float8 import Float8
from thinwire.formats.format import Format, Spans

__all__ = ["Cast", "Float8", "Format", "Spans", "get", "names"]

_FORMATS: dict[str, Format] = {
    "fp32": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "fp16": Cast(torch.float16),
    "fp8_e4m3": Float8("e4m3"),
    "fp8_e5m2": Float8("e5m2"),
    "fp8_e4m3_pow2": Float8("e4m3", scale="power_of_two"),
    "fp8_e5m2_pow2": Float8("e5m2", scale="power_of_two"),
    "fp8_e4m3_span": Float8("e4m3", per_span=True),
    "fp8_e5m2_span": Float8("e5m2", per_span=True),
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
