"""The tokens of one split as one long array, whether it lies in memory or in memory-mapped files."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenStore:
    """One split: its tokens as consecutive pieces, where its documents end, and the size of its text."""

    pieces: tuple[NDArray[Any], ...]
    ends: NDArray[np.int64]  # (documents,), rising; the last one is the number of tokens
    text_bytes: int
    files: tuple[Path, ...] = ()  # of the pieces, for messages; empty in memory

    @cached_property
    def _starts(self) -> list[int]:
        """Where each piece starts, and where the last one ends."""
        return [0, *itertools.accumulate(len(piece) for piece in self.pieces)]

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop), across pieces."""
        parts = []
        while start < stop:
            index = bisect.bisect_right(self._starts, start) - 1
            offset, end = self._starts[index], min(stop, self._starts[index + 1])
            parts.append(self.pieces[index][start - offset : end - offset].astype(np.int64))
            start = end
        return np.concatenate(parts)

    def file_of(self, token: int) -> str:
        """The file that holds this token."""
        index = bisect.bisect_right(self._starts, token) - 1
        return str(self.files[index]) if self.files else "the text in memory"


class TokenSink(Protocol):
    """Takes the tokens of one split, batch by batch."""

    def append(self, tokens: NDArray[Any], lengths: NDArray[np.int64], text_bytes: int) -> None: ...


class MemorySink:
    """Collects tokens in memory."""

    def __init__(self) -> None:
        self._tokens: list[NDArray[Any]] = []
        self._lengths: list[NDArray[np.int64]] = []
        self._text_bytes = 0

    def append(self, tokens: NDArray[Any], lengths: NDArray[np.int64], text_bytes: int) -> None:
        self._tokens.append(tokens)
        self._lengths.append(lengths)
        self._text_bytes += text_bytes

    def store(self) -> TokenStore:
        tokens = np.concatenate(self._tokens) if self._tokens else np.empty(0, np.uint16)
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, np.int64)
        return TokenStore((tokens,), np.cumsum(lengths), self._text_bytes)
