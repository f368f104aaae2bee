"""Stochastic rounding with numbers that a hash draws: the same bits on every device, after every restart.

    u = hash(counter) in (0, 1);   low = floor(v / spacing);   rounded = (low + (u < v / spacing - low)) * spacing

is v on average, where the grid has its neighbours `spacing` apart, and v on the grid stays. (Not
`floor(v / spacing + u)`: that sum, rounded to float32, is now and then the next whole number.) What saturates
afterwards is biased. The counter of an element is the key of its span plus its index within the span, so what
an element draws does not depend on the chunk that it is in. The hash is `lowbias32` (Chris Wellons' hash
prospector), the key of a span is a SHA-256 of its names.
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


def counters(name: str, keys: Tensor | None, spans: Spans) -> Tensor:
    """int32 (sum(spans),): one counter per element, from the keys of the spans, int32 (len(spans),), that the
    format `name` was given."""
    if keys is None:
        raise ValueError(f"{name} rounds stochastically: encode needs key=, one int32 per span")
    if keys.dtype != torch.int32 or keys.shape != (len(spans),):
        raise ValueError(
            f"{name} needs key= of one int32 per span, here {len(spans)}, "
            f"got {keys.dtype} of shape {tuple(keys.shape)}"
        )
    lengths = torch.tensor(spans, device=keys.device)
    starts = lengths.cumsum(0) - lengths
    index = torch.arange(sum(spans), device=keys.device) - starts.repeat_interleave(lengths)
    return (keys.to(torch.int64).repeat_interleave(lengths) + index).to(torch.int32)


def uniform(counter: Tensor) -> Tensor:
    """Float32 from int32 counters: the midpoints of 2^23 intervals of (0, 1). Without 0 and 1, what is within
    2^-24 of a number of the grid always becomes that number, as tiny blocks must become zeros."""
    x = counter ^ _shifted(counter, 16)
    x = x * 0x7FEB352D
    x = x ^ _shifted(x, 15)
    x = x * (0x846CA68B - (1 << 32))
    x = x ^ _shifted(x, 16)
    return _shifted(x, 9).to(torch.float32) * 2.0**-23 + 2.0**-24


def _shifted(x: Tensor, places: int) -> Tensor:
    """x >> places without the sign."""
    return (x >> places) & ((1 << (32 - places)) - 1)


def round_stochastically(values: Tensor, spacing: Tensor, counter: Tensor) -> Tensor:
    """One of the two neighbours of each value in its grid, so that the mean over counters is the value."""
    steps = values / spacing
    low = torch.floor(steps)
    return torch.where(uniform(counter) < steps - low, low + 1.0, low) * spacing
