"""What a rank saw of a matrix in one reduction, and how it reaches the matrix's owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from thinwire.geometry.moments import Moment


@dataclass(frozen=True)
class Seen:
    """What a rank saw of a matrix: the moments of its sides, the first of layer inputs or of gradient rows."""

    moments: tuple[Moment, ...]
    of_inputs: bool

    def packed(self) -> Tensor:
        """As it travels to the owner: 1 for gradient rows or 2 for inputs, then the moments."""
        parts = [moment.packed() for moment in self.moments]
        return torch.cat([parts[0].new_tensor([1.0 + self.of_inputs]), *parts])

    def plus(self, packed: Tensor, sizes: list[int], empty: Callable[[], Moment]) -> Seen:
        """Together with what another rank saw, if anything. Gradient rows add nothing to layer inputs."""
        kind = packed[0].item()
        if not kind:
            return self
        parts = packed[1:].split(sizes)
        first, *others = [moment.plus(part) for moment, part in zip(self.moments, parts)]
        if kind > 1.0 + self.of_inputs:
            first = empty().plus(parts[0])
        elif kind < 1.0 + self.of_inputs:
            first = self.moments[0]
        return Seen((first, *others), self.of_inputs or kind > 1.0)
