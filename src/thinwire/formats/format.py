"""What a number format is: numbers to bytes and back, for one whole chunk in one call.

A chunk is a contiguous float32 vector made of *spans*; `spans` gives their lengths, each a whole number of
the format's blocks. A scale never reaches across a span, so a value's code does not depend on its
neighbours in the chunk.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

Spans: TypeAlias = tuple[int, ...]
"""Lengths, in elements, of the spans of one chunk; their sum is the chunk's length."""

ALIGNMENT = 16
"""Encoded buffers are padded to this many bytes, so that any of them can be viewed as any dtype."""


@runtime_checkable
class Format(Protocol):
    """Numbers to bytes and back. Implementations are frozen dataclasses without state."""

    @property
    def name(self) -> str:
        """The name that `thinwire.formats.get` knows, or a description of the variant."""

    @property
    def block(self) -> int:
        """Elements that share a scale; spans are zero-padded to whole blocks."""

    @property
    def needs_key(self) -> bool:
        """Whether `encode` rounds stochastically and needs keys."""

    def nbytes(self, spans: Spans) -> int:
        """Exact size of an encoded chunk in bytes, padding included."""

    def encode(self, x: Tensor, out: Tensor, *, spans: Spans, key: Tensor | None = None) -> None:
        """Encode `x`, float32 `(sum(spans),)`, into `out`, uint8 `(nbytes(spans),)`: scales, then codes.

        `key`, int32 `(len(spans),)`, seeds stochastic rounding; deterministic formats ignore it. A non-finite
        value makes at least itself, at most its whole span, non-finite after decoding.
        """

    def decode(self, buffer: Tensor, out: Tensor, *, spans: Spans) -> None:
        """Decode `buffer`, uint8 `(nbytes(spans),)`, into `out`, float32 `(sum(spans),)`."""

    def decode_add(self, buffer: Tensor, accumulator: Tensor, *, spans: Spans) -> None:
        """Add the decoded chunk to `accumulator`, float32 `(sum(spans),)`: the bits of decode, then add."""

    def compiled(self, chunk: int) -> Format:
        """The same format, same bits, with kernels compiled for chunks of `chunk` elements; for one thread."""


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of encoded buffers."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_chunk(name: str, x: Tensor, spans: Spans, block: int) -> None:
    """Refuse what no format can encode, in a sentence."""
    total = sum(spans)
    if x.dtype != torch.float32 or x.shape != (total,) or not x.is_contiguous():
        raise ValueError(
            f"{name} works on a contiguous float32 vector of sum(spans) = {total} elements, "
            f"got {x.dtype} of shape {tuple(x.shape)} and strides {x.stride()}"
        )
    if any(length % block for length in spans):
        raise ValueError(f"{name} needs spans of whole blocks of {block} elements, got {spans}")
