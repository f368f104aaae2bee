"""MuLoCo (arXiv 2505.23725): DiLoCo around Muon, whose pseudo-gradients stand narrow numbers better than AdamW's.

The inner optimizers are the script's: `torch.optim.Muon` for the hidden matrices and AdamW for the rest, given to
`tw.local_update` together. What each rank's numbers leave out it adds to its next pseudo-gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from thinwire.local_update.diloco import DiLoCo
from thinwire.reducers import Quantized, Reducer


@dataclass(frozen=True)
class MuLoCo(DiLoCo):
    """Sends what `reducer` sends of one number per parameter and round: with INT4, (W-1)/W 1.03 / every bytes per
    parameter, step and rank."""

    every: int = 30
    outer_lr: float = 0.9
    outer_momentum: float = 0.8
    reducer: Reducer = field(default_factory=partial(Quantized, "int4", feedback="error"))
    """The paper's own numbers are of 2 to 8 bits with a codebook."""
