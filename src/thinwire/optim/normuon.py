"""NorMuon: Muon whose updates are evened out over neurons (arXiv 2510.05491, as in the code of Dion).

    O as in Muon            V = beta V + (1 - beta) mean over inputs of O^2     a number per output
    N = O / (sqrt V + eps)  X <- (1 - lr wd) X - lr s N |O| / |N|

Orthonormalised updates have equal singular values, and still rows of very different length. What is sent is what
Muon sends: V follows from O, which all ranks have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import Slot
from thinwire.optim.muon import MuonRule, Scale, move
from thinwire.optim.optimizer import Average, Matrix, MatrixOptimizer
from thinwire.optim.polar import Method
from thinwire.optim.replicas import Replicas, Replicate
from thinwire.optim.rest import AdamW, Rest, State
from thinwire.reducers import Reducer


@dataclass(frozen=True)
class NorMuonRule:
    """How NorMuon moves matrices."""

    muon: MuonRule
    beta: float
    eps: float

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1 or not self.eps > 0:
            raise ValueError(
                f"beta must be from 0 to less than 1 and eps positive, got {self.beta} and {self.eps}"
            )

    def settings(self) -> dict[str, Any]:
        return {**self.muon.settings(), "beta": self.beta}

    def new_state(self, matrix: Matrix) -> State:
        momentum = self.muon.new_state(matrix)
        parts = matrix.blocks.cut(momentum["momentum"])  # (count, rows, columns)
        return {**momentum, **{f"second_{i}": torch.zeros_like(part[..., :1]) for i, part in enumerate(parts)}}

    def slots(self, matrix: Matrix) -> Sequence[Slot]:
        return ()

    def step(self, matrices: Sequence[Matrix], replicas: Replicas, average: Average) -> None:
        updates = [
            [self._even(matrix, i, o) for i, o in enumerate(parts)]
            for matrix, parts in zip(matrices, self.muon.updates(matrices, replicas))
        ]
        move(matrices, updates, self.muon.scale)

    def _even(self, matrix: Matrix, part: int, o: Tensor) -> Tensor:
        second = matrix.state[f"second_{part}"]
        o = o.to(second.dtype)
        second.lerp_(o.square().mean(-1, keepdim=True), 1 - float(matrix.group["beta"]))
        n = o / (second.sqrt() + self.eps)  # (count, rows, columns)
        before, after = (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (o, n))
        return n.mul_(before / after.clamp(min=torch.finfo(n.dtype).tiny))


class NorMuon(MatrixOptimizer):
    """As `Muon`, with every output's update divided by the running size of its updates (`beta`, `eps`), the norm
    of the whole kept. Holds a number per output more. Everything else is as there."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        beta: float = 0.95,
        eps: float = 1e-8,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns: Method = "jordan",
        scale: Scale = "jordan",
        dtype: torch.dtype = torch.bfloat16,
        rest: Rest = AdamW(lr=3e-4, eps=1e-10),  # noqa: B008  # frozen
        replicate: Replicate = None,
        reducer: Reducer | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        rule = NorMuonRule(MuonRule(momentum, nesterov, ns, scale, dtype), beta, eps)
        options: dict[str, Any] = {"rest": rest, "replicate": replicate, "reducer": reducer, "timeout": timeout}
        super().__init__(groups, rule, lr=lr, weight_decay=weight_decay, **options)


def even_reference(o: Tensor, second: Tensor, beta: float, eps: float = 1e-8) -> tuple[Tensor, Tensor]:
    """The update of one matrix, (rows, columns), and its V, (rows,): the formula and nothing else."""
    second = beta * second + (1 - beta) * (o**2).mean(dim=1)
    n = o / (second.sqrt() + eps)[:, None]
    return n * o.norm() / n.norm(), second
