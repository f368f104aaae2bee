"""Whether the means of a reduction are finite: error memory must not outlive one that is not.

A caller who meets a NaN throws the whole step away, so everything that took part in the reduction forgets it,
also where its own means are fine. All ranks decode the same means, so they agree without asking.
"""

from __future__ import annotations

import torch
from torch import Tensor


class FiniteWatch:
    """Watches the means of one reduction, without ever waiting for their device."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)

    def see(self, mean: Tensor) -> None:
        """Take note of a mean. (One whose sum overflows, 1e33 and more, counts as non-finite.)"""
        self._sum += mean.sum() * 0.0  # 0 x inf and 0 x NaN are NaN

    def all_finite(self) -> bool:
        """Whether all means seen since `reset` were finite."""
        return self._sum.item() == 0.0

    def reset(self) -> None:
        """Forget."""
        self._sum.zero_()
