"""How much each rank counts in the mean: all alike, or by the tokens that its steps were made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import Wire
from thinwire.local_update.weights import Weights


class Tokens:
    """This rank's tokens since each fragment was sent last. `wire`: to the ranks that average."""

    def __init__(self, fragments: int, weights: Weights, wire: Wire) -> None:
        self._since_sent = [0.0] * fragments
        self._given: bool | None = None  # None: no step so far
        self._weights = weights
        self._wire = wire

    def count(self, tokens: float | Tensor | None) -> None:
        """Of one step. Raises ValueError for what is no number, or given in some steps and not in others."""
        if self._given not in (None, tokens is not None):
            raise ValueError("step: tokens are given in some steps and not in others")
        number = _number_of(tokens)
        self._given = tokens is not None
        self._since_sent = [so_far + number for so_far in self._since_sent]

    def sent(self, fragment: int) -> None:
        """Those so far are in what was sent."""
        self._since_sent[fragment] = 0.0

    def weight(self, fragment: int) -> float:
        """Of this rank in the mean; all ranks' sum to the world size. Where tokens are given, an all-reduce of a
        float64 number, and one for each dimension that the model is sharded along: control traffic."""
        if not self._given:
            return 1.0
        tokens = torch.tensor([self._since_sent[fragment]], dtype=torch.float64, device=self._wire.device)
        own = self._weights.sum_over_shards(tokens)  # all parts of a model count alike
        total = float(self._wire.control_all_reduce(own.clone()))
        group = float(self._weights.sum_over_group(own))
        return group / total * self._wire.world_size / self._weights.sharers if total else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": list(self._since_sent), "weighted": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._since_sent, self._given = list(state["tokens"]), state["weighted"]


def _number_of(tokens: float | Tensor | None) -> float:
    """Raises ValueError for what is no number of tokens."""
    try:
        count = 0.0 if tokens is None else float(tokens)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not 0 <= count < float("inf"):
        raise ValueError(f"step: tokens cannot be {tokens!r}")
    return count
