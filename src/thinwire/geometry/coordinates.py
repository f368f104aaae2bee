"""The coordinates of one matrix, and the vector of numbers as which they travel and are saved.

head: whether they are used, their fidelity (3);  then for each side: V (n x rank), energy (rank), D (n), damping
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from thinwire.geometry.geometry import Fidelity
from thinwire.geometry.whitening import Whitening

_HEAD = 4


@dataclass(frozen=True)
class MatrixCoordinates:
    """A whitening of the rows and, with both sides, one of the columns."""

    sides: tuple[Whitening, ...]
    active: bool
    """Whether they are used; if not, they are kept to be measured again."""
    fidelity: Fidelity
    """Measured at the last refresh with the coordinates of that time."""

    def forward(self, matrix: Tensor) -> Tensor:
        u = self.sides[0].forward(matrix)
        return u if len(self.sides) == 1 else self.sides[1].forward(u.T).T.contiguous()

    def inverse(self, matrix: Tensor) -> Tensor:
        g = matrix if len(self.sides) == 1 else self.sides[1].inverse(matrix.T).T
        return self.sides[0].inverse(g)

    def damped(self, side: int, damping: float) -> MatrixCoordinates:
        """With another damping of one side."""
        sides = list(self.sides)
        sides[side] = sides[side].damped(damping)
        return replace(self, sides=tuple(sides))

    def packed(self) -> Tensor:
        """As one vector, float32."""
        head = [float(self.active), *astuple(self.fidelity)]
        parts = [self.sides[0].energy.new_tensor(head)]
        for side in self.sides:
            parts += [side.vectors.reshape(-1), side.energy, side.diagonal, side.energy.new_tensor([side.damping])]
        return torch.cat(parts)


def packed_size(sides: Sequence[tuple[int, int]]) -> int:
    """Numbers that coordinates take whose sides have these lengths and ranks."""
    return _HEAD + sum((rank + 1) * n + rank + 1 for n, rank in sides)


def unpacked(packed: Tensor, sides: Sequence[tuple[int, int]], power: float) -> MatrixCoordinates | None:
    """The coordinates in a vector of `packed_size`; None for zeros, which say that nothing was found yet."""
    active, *fidelity = packed[:_HEAD].tolist()
    found = []
    rest = packed[_HEAD:]
    for n, rank in sides:
        vectors, energy, diagonal, damping, rest = rest.split(
            [n * rank, rank, n, 1, len(rest) - (rank + 1) * n - rank - 1]
        )
        if not damping.item() > 0:
            return None
        vectors = vectors.view(n, rank).clone()
        found.append(Whitening(vectors, energy.clone(), diagonal.clone(), damping.item(), power))
    return MatrixCoordinates(tuple(found), bool(active), Fidelity(*fidelity))
