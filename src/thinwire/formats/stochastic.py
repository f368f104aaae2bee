"""Stochastic rounding with numbers that a hash draws: the same bits on every device, after every restart.

    u = hash(counter) in [0, 1);   rounded = floor(v / spacing + u) * spacing

is v on average, where the grid has its neighbours `spacing` apart. The counter of an element is the key of
its span plus its index within the span, so what an element draws does not depend on the chunk that it is in.
The hash is `lowbias32` (Chris Wellons' hash prospector), the key of a span is a SHA-256 of its names.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from thinwire.formats.format import Spans


def span_key(*names: object) -> int:
    """The key of a span, an int32, from what names it (seed, slot, step, rank, stage, start)."""
    digest = hashlib.sha256("/".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def counters(keys: Tensor, spans: Spans) -> Tensor:
    """int32 (sum(spans),): one counter per element, from the keys of the spans, int32 (len(spans),)."""
    lengths = torch.tensor(spans, device=keys.device)
    starts = lengths.cumsum(0) - lengths
    index = torch.arange(sum(spans), device=keys.device) - starts.repeat_interleave(lengths)
    return (keys.to(torch.int64).repeat_interleave(lengths) + index).to(torch.int32)


def uniform(counter: Tensor) -> Tensor:
    """Float32 in [0, 1) on a grid of 2^-24, from int32 counters."""
    x = counter ^ _shifted(counter, 16)
    x = x * 0x7FEB352D
    x = x ^ _shifted(x, 15)
    x = x * (0x846CA68B - (1 << 32))
    x = x ^ _shifted(x, 16)
    return _shifted(x, 8).to(torch.float32) * 2.0**-24


def _shifted(x: Tensor, places: int) -> Tensor:
    """x >> places without the sign."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def round_stochastically(values: Tensor, spacing: Tensor, counter: Tensor) -> Tensor:
    """One of the two neighbours of each value in its grid, so that the mean over counters is the value."""
    return torch.floor(values / spacing + uniform(counter)) * spacing
