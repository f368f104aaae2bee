"""What a round trip through a format leaves of a matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from thinwire.collectives import CHUNK
from thinwire.formats import Format, Spans


def round_trip(format: Format, matrix: Tensor) -> Tensor:
    """What is left of a matrix, float32, after it was encoded and decoded in spans as long as chunks: coarser ones
    than the layout's, which end with each owner's rows, where a scale is the span's."""
    padded = -(-matrix.numel() // format.block) * format.block
    flat = F.pad(matrix.reshape(-1), (0, padded - matrix.numel()))
    spans = tuple(len(part) for part in flat.split(CHUNK // format.block * format.block))
    encoded = torch.empty(format.nbytes(spans), dtype=torch.uint8, device=flat.device)
    format.encode(flat, encoded, spans=spans, key=any_key(format, spans, flat.device))
    format.decode(encoded, flat, spans=spans)
    return flat[: matrix.numel()].view(matrix.shape)


def any_key(format: Format, spans: Spans, device: torch.device) -> Tensor | None:
    """Keys for a format that rounds stochastically, where no draw is better than another."""
    return torch.zeros(len(spans), dtype=torch.int32, device=device) if format.needs_key else None
