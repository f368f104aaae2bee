"""Residuals: what the encodings of earlier reductions left out, as a matrix like the work matrix, in some storage.

Float32 or bfloat16 as they are, or encoded, as LoCo keeps them: INT8 takes a byte per element.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from thinwire.collectives import Chunk, Layout
from thinwire.formats import Format


class Residual(Protocol):
    """A matrix (world size, message length), in units of the mean, unscaled."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    def add_to(self, chunk: Chunk, rows: Tensor, scale: float) -> None:
        """rows (W, columns of the chunk) += scale x residual."""

    def read(self, start: int, stop: int) -> Tensor:
        """Columns [start, stop), float32; perhaps a view."""

    def write(self, start: int, stop: int, columns: Tensor) -> None:
        """Set columns [start, stop)."""

    def take(self, work: Tensor, keep: float) -> Tensor:
        """residual <- keep x residual + (1 - keep) x work. Returns a matrix to work in, of any content."""


class Plain:
    """Residuals as they are, in a dtype of their own."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self._matrix = torch.zeros((layout.world_size, layout.length), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self._matrix.nbytes

    def add_to(self, chunk: Chunk, rows: Tensor, scale: float) -> None:
        rows.add_(self._matrix[:, chunk.start : chunk.stop], alpha=scale)

    def read(self, start: int, stop: int) -> Tensor:
        return self._matrix[:, start:stop].float()

    def write(self, start: int, stop: int, columns: Tensor) -> None:
        self._matrix[:, start:stop].copy_(columns)

    def take(self, work: Tensor, keep: float) -> Tensor:
        if keep == 0.0 and self._matrix.dtype == work.dtype:
            self._matrix, work = work, self._matrix
            return work
        for own, new in zip(self._matrix, work):  # a row at a time: little memory
            own.copy_(own.float().lerp_(new, 1.0 - keep))
        return work


class Coded:
    """Residuals in a format whose decoded numbers are encoded to the same bits."""

    def __init__(self, layout: Layout, format: Format, device: torch.device) -> None:
        self._format = format
        self._chunks = layout.chunks
        self._codes = {
            chunk.start: torch.empty(
                (layout.world_size, format.nbytes(chunk.spans)), dtype=torch.uint8, device=device
            )
            for chunk in self._chunks
        }
        for chunk in self._chunks:
            self._encode(chunk, torch.zeros((layout.world_size, chunk.stop - chunk.start), device=device))

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes for codes in self._codes.values())

    def add_to(self, chunk: Chunk, rows: Tensor, scale: float) -> None:
        rows.add_(self._decode(chunk), alpha=scale)

    def read(self, start: int, stop: int) -> Tensor:
        parts = [
            self._decode(chunk)[:, max(start - chunk.start, 0) : stop - chunk.start]
            for chunk in self._within(start, stop)
        ]
        return torch.cat(parts, dim=1)

    def write(self, start: int, stop: int, columns: Tensor) -> None:
        for chunk in self._within(start, stop):
            first, last = max(start, chunk.start), min(stop, chunk.stop)
            rows = self._decode(chunk)  # what lies beside is encoded to the bits that it had
            rows[:, first - chunk.start : last - chunk.start] = columns[:, first - start : last - start]
            self._encode(chunk, rows)

    def take(self, work: Tensor, keep: float) -> Tensor:
        for chunk in self._chunks:
            new = work[:, chunk.start : chunk.stop]
            self._encode(chunk, self._decode(chunk).lerp_(new, 1.0 - keep) if keep else new)
        return work

    def _within(self, start: int, stop: int) -> Iterator[Chunk]:
        return (chunk for chunk in self._chunks if chunk.start < stop and start < chunk.stop)

    def _encode(self, chunk: Chunk, rows: Tensor) -> None:
        for row, codes in zip(rows, self._codes[chunk.start]):
            self._format.encode(row.contiguous(), codes, spans=chunk.spans)

    def _decode(self, chunk: Chunk) -> Tensor:
        codes = self._codes[chunk.start]
        rows = torch.empty((len(codes), chunk.stop - chunk.start), device=codes.device)
        for row, encoded in zip(rows, codes):
            self._format.decode(encoded, row, spans=chunk.spans)
        return rows
