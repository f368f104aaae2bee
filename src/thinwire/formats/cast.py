"""fp32, bf16 and fp16: formats that only change the dtype.

They round to nearest even as the dtype's cast does, and carry inf and NaN themselves. fp16 overflows to inf
above 65504: reducers scale by 1 / world size before they encode, so gradients whose mean fits stay finite.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.formats.format import Format, Spans, aligned, check_chunk

NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Cast:
    """One of the dtypes float32, bfloat16, float16 on the wire: 4 or 2 bytes per element."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in NAMES:
            raise ValueError(f"Cast knows float32, bfloat16 and float16, got {self.dtype}")

    @property
    def name(self) -> str:
        return NAMES[self.dtype]

    @property
    def block(self) -> int:
        return 8  # 16 bytes of a two-byte dtype

    @property
    def needs_key(self) -> bool:
        return False

    def nbytes(self, spans: Spans) -> int:
        return aligned(sum(spans) * self.dtype.itemsize)

    def encode(self, x: Tensor, out: Tensor, *, spans: Spans, key: Tensor | None = None) -> None:
        check_chunk(self.name, x, spans, self.block)
        self._codes(out, spans).copy_(x)

    def decode(self, buffer: Tensor, out: Tensor, *, spans: Spans) -> None:
        out.copy_(self._codes(buffer, spans))

    def decode_add(self, buffer: Tensor, accumulator: Tensor, *, spans: Spans) -> None:
        accumulator.add_(self._codes(buffer, spans))

    def compiled(self, chunk: int) -> Format:
        return self  # a cast is one vectorised op already

    def _codes(self, buffer: Tensor, spans: Spans) -> Tensor:
        return buffer[: sum(spans) * self.dtype.itemsize].view(self.dtype)
