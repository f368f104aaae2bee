"""Muon: momentum whose matrices are orthonormalised (Keller Jordan et al. 2024; at scale arXiv 2502.16982).

    M = mu M + (1 - mu) G            u = mu M + (1 - mu) G  (nesterov), or M
    O = orthonormalize(u)            X <- (1 - lr wd) X - lr s O

The replicas hold the same M, so each orthonormalises a W-th of the matrices and gets the other updates from the
others: an all-gather of 2 bytes per element (of `dtype`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from thinwire.collectives import Slot
from thinwire.optim.optimizer import Average, Matrix, MatrixOptimizer
from thinwire.optim.polar import Method, check_method, orthonormalize_all, orthonormalize_reference
from thinwire.optim.replicas import Replicas, Replicate
from thinwire.optim.rest import AdamW, Rest, State
from thinwire.reducers import Reducer

Scale: TypeAlias = Literal["none", "jordan", "spectral", "moonshot"]

SCALES: dict[Scale, Callable[[int, int], float]] = {
    "none": lambda rows, columns: 1.0,
    "jordan": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
    "moonshot": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}
"""By what the learning rate of a matrix of `rows` outputs and `columns` inputs is multiplied. "moonshot" gives
updates as large as AdamW's, so that one learning rate and weight decay do for both."""


@dataclass(frozen=True)
class MuonRule:
    """How Muon moves matrices."""

    momentum: float
    nesterov: bool
    ns: Method
    scale: Scale
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_method(self.ns)
        if self.scale not in get_args(Scale):
            raise ValueError(f"scale must be one of {', '.join(get_args(Scale))}, got {self.scale!r}")
        if self.dtype not in (torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.bfloat16, float32 or float64, got {self.dtype}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be from 0 to less than 1, got {self.momentum!r}")

    def settings(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def new_state(self, matrix: Matrix) -> State:
        parameter = matrix.parameter.detach()
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return {"momentum": torch.zeros_like(parameter, dtype=wide)}

    def slots(self, matrix: Matrix) -> Sequence[Slot]:
        return ()

    def step(self, matrices: Sequence[Matrix], replicas: Replicas, average: Average) -> None:
        move(matrices, self.updates(matrices, replicas), self.scale)

    def updates(self, matrices: Sequence[Matrix], replicas: Replicas) -> list[list[Tensor]]:
        """O of each part of each matrix, (count, rows, columns)."""
        cut = [matrix.blocks.cut(direction(matrix, self.nesterov).to(self.dtype)) for matrix in matrices]
        parts = [part for parts in cut for part in parts]
        single = [matrix for part in parts for matrix in part.unbind()]

        def compute(indices: list[int]) -> list[Tensor]:
            return orthonormalize_all([single[i] for i in indices], self.ns, dtype=self.dtype)

        shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in single]
        ready = iter(replicas.compute_for_each_other(shapes, compute, self.dtype))
        return [[_stacked([next(ready) for _ in range(part.shape[0])]) for part in parts] for parts in cut]


class Muon(MatrixOptimizer):
    """Muon for the matrices, AdamW (or `rest`) for everything else, of models replicated over ranks.

    `groups` are `tw.optim.param_groups(model)`. `ns`: the iteration that orthonormalises (`polar.py`); `scale`:
    the learning rate's factor by shape; `dtype`: of the iteration and of the updates that travel.

    `replicate`: the ranks that hold the same weights (None: all). With `reducer` the optimizer averages all
    gradients, and the model's own averaging must be off (`tw.attach(model, tw.Local())`); with None they were
    averaged already, by DDP or `tw.attach`. Which of both is checked in the first step.

    Sends per step and rank: what `reducer` sends of the gradients, (W-1) x 2 bytes (of `dtype`) per element of the
    largest share of the matrices, 1/W of all where they are many and alike, and a byte of control traffic per
    parameter. Holds 4 bytes per element of the matrices. Collective to make and to step. Raises TypeError or
    ValueError for parameters that it cannot move, by name.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
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
        rule = MuonRule(momentum, nesterov, ns, scale, dtype)
        options: dict[str, Any] = {"rest": rest, "replicate": replicate, "reducer": reducer, "timeout": timeout}
        super().__init__(groups, rule, lr=lr, weight_decay=weight_decay, **options)


def muon_reference(
    x: Tensor,
    momentum: Tensor,
    gradient: Tensor,
    *,
    lr: float,
    mu: float,
    nesterov: bool,
    wd: float,
    ns: Method,
    scale: Scale,
) -> tuple[Tensor, Tensor]:
    """One step of one matrix, (rows, columns): the formula and nothing else."""
    momentum = mu * momentum + (1 - mu) * gradient
    u = mu * momentum + (1 - mu) * gradient if nesterov else momentum
    s = SCALES[scale](x.shape[0], x.shape[1])
    return (1 - lr * wd) * x - lr * s * orthonormalize_reference(u, ns), momentum


def direction(matrix: Matrix, nesterov: bool) -> Tensor:
    """Move the momentum; what is to be orthonormalised."""
    momentum, gradient = matrix.state["momentum"], matrix.gradient.to(matrix.state["momentum"].dtype)
    mu = float(matrix.group["momentum"])
    momentum.lerp_(gradient, 1 - mu)
    return gradient.lerp(momentum, mu) if nesterov else momentum


def move(matrices: Sequence[Matrix], updates: Sequence[Sequence[Tensor]], scale: Scale) -> None:
    """Decay and move by updates of each part, (count, rows, columns)."""
    for matrix, parts in zip(matrices, updates):
        lr = float(matrix.group["lr"])
        x = matrix.parameter
        if decay := lr * float(matrix.group["weight_decay"]):
            x.mul_(1 - decay)
        factors = [SCALES[scale](part.shape[1], part.shape[2]) for part in parts]
        if len(parts) == 1:
            x.add_(matrix.blocks.join(parts, x.shape), alpha=-lr * factors[0])
        else:
            x.add_(matrix.blocks.join([part * s for part, s in zip(parts, factors)], x.shape), alpha=-lr)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0][None] if len(matrices) == 1 else torch.stack(list(matrices))
