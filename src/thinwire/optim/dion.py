"""Dion: orthonormalised low-rank updates whose factors are averaged in place of the gradient (arXiv 2504.05295).

    M += G                          P = basis(mean M Q)             (rows, r)
    R = mean M^T P  (columns, r)    M -= (1 - mu) P R^T
    Q = R / |its columns|           X <- (1 - lr wd) X - lr sqrt(outputs / inputs) P Q^T

`mean` is over the replicas, whose M differ: each has the sum of its own gradients less what was used of them, and
X and Q are the same. As everything is linear in M, the replicas move as one would that had the mean gradient. What
a step does not use of M stays for later ones (error feedback). With r = all columns and a momentum that stays,
P Q^T becomes the polar factor of M.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from thinwire.collectives import Slot
from thinwire.optim.muon import move
from thinwire.optim.optimizer import Average, Matrix, MatrixOptimizer
from thinwire.optim.replicas import Replicas, Replicate
from thinwire.optim.rest import AdamW, Rest, State
from thinwire.reducers import Dense, Reducer
from thinwire.reducers.basis import Algorithm, check_algorithm, orthonormal_basis


def dion_reference(
    x: Tensor, m: Tensor, q: Tensor, gradient: Tensor, *, lr: float, mu: float, wd: float = 0.0, eps: float = 1e-8
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of one matrix on one rank: the formula and nothing else. Returns X, M and Q."""
    m = m + gradient  # (rows, columns)
    p = torch.linalg.qr(m @ q).Q  # (rows, r)
    r = m.T @ p  # (columns, r)
    m = m - (1 - mu) * p @ r.T
    q = r / (r.norm(dim=0) + eps)
    scale = math.sqrt(x.shape[0] / x.shape[1])
    return (1 - lr * wd) * x - lr * scale * p @ q.T, m, q


@dataclass(frozen=True)
class DionRule:
    """How Dion moves matrices."""

    mu: float
    rank_fraction: float
    rank_multiple_of: int
    eps: float
    basis: Algorithm
    seed: int

    def __post_init__(self) -> None:
        check_algorithm(self.basis)
        if not 0 <= self.mu < 1:
            raise ValueError(f"mu must be from 0 to less than 1, got {self.mu!r}")
        if not 0 < self.rank_fraction <= 1:
            raise ValueError(f"rank_fraction must be above 0 and at most 1, got {self.rank_fraction!r}")
        if not isinstance(self.rank_multiple_of, int) or self.rank_multiple_of < 1:
            raise ValueError(f"rank_multiple_of must be a number of at least 1, got {self.rank_multiple_of!r}")

    def settings(self) -> dict[str, Any]:
        return {"mu": self.mu}

    def rank(self, rows: int, columns: int) -> int:
        """Of the updates of such a matrix: a multiple of `rank_multiple_of`, or all there is."""
        least = min(rows, columns)
        wanted = math.ceil(self.rank_fraction * least / self.rank_multiple_of) * self.rank_multiple_of
        return min(wanted, least)

    def new_state(self, matrix: Matrix) -> State:
        parameter = matrix.parameter.detach()
        wide = torch.promote_types(parameter.dtype, torch.float32)
        momentum = torch.zeros_like(parameter, dtype=wide)
        right = {
            f"right_{i}": self._random(f"{matrix.name} {i}", part.shape).to(momentum)
            for i, part in enumerate(upright(matrix, momentum))
        }
        return {"momentum": momentum, **right}

    def slots(self, matrix: Matrix) -> Sequence[Slot]:
        """P and R of each part, where they are less than the gradient."""
        momentum = matrix.state["momentum"]
        found = []
        for i, (count, rows, columns) in enumerate(part.shape for part in upright(matrix, momentum)):
            rank = self.rank(rows, columns)
            found.append(Slot(f"left_{i}.{matrix.name}", (count, rows, rank), momentum.dtype))
            found.append(Slot(f"right_{i}.{matrix.name}", (count, columns, rank), momentum.dtype))
        less = sum(slot.numel for slot in found) < momentum.numel()
        return found if less and self.rank_fraction < 1 else ()

    def step(self, matrices: Sequence[Matrix], replicas: Replicas, average: Average) -> None:
        for matrix in matrices:
            matrix.state["momentum"].add_(matrix.gradient)
        sent = {matrix.name for matrix in matrices if self.slots(matrix)}
        batches = in_batches(matrices)
        lefts = [batch.m @ batch.q for batch in batches]  # (batch, rows, r)
        self._mean("left", batches, lefts, sent, average)
        alive = [left.ne(0).any(-1).any(-1)[:, None, None] for left in lefts]  # (batch, 1, 1)
        ps = [orthonormal_basis(left, self.basis) * some for left, some in zip(lefts, alive)]
        rights = [batch.m.mT @ p for batch, p in zip(batches, ps)]  # (batch, columns, r)
        self._mean("right", batches, rights, sent, average)
        used: dict[tuple[str, int], Tensor] = {}
        updates: dict[tuple[str, int], Tensor] = {}
        for batch, p, r, some in zip(batches, ps, rights, alive):
            q = torch.where(some, r / (torch.linalg.vector_norm(r, dim=-2, keepdim=True) + self.eps), batch.q)
            batch.keep(q)
            used |= batch.apart(p @ r.mT)  # (batch, rows, columns)
            updates |= batch.apart(p @ q.mT)
        for matrix in matrices:
            momentum = matrix.state["momentum"]
            decay = 1 - float(matrix.group["mu"])
            momentum.sub_(matrix.blocks.join(_of(matrix, used), momentum.shape), alpha=decay)
        move(matrices, [_of(matrix, updates) for matrix in matrices], "spectral")

    def _mean(
        self, side: str, batches: Sequence[Batch], tensors: Sequence[Tensor], sent: set[str], average: Average
    ) -> None:
        """The mean over the replicas of what belongs to the parameters that send their factors, in place."""
        named = {
            f"{side}_{i}.{name}": tensor[at]
            for batch, tensor in zip(batches, tensors)
            for (name, i), (_, at) in batch.places.items()
            if name in sent
        }
        average(named).wait()

    def _random(self, name: str, shape: Sequence[int]) -> Tensor:
        """A standard normal start of Q, (count, columns, r), the same on all ranks."""
        count, rows, columns = shape
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(count, columns, self.rank(rows, columns), generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Batch:
    """Matrices of one shape, each on its longer side."""

    m: Tensor
    """(batch, rows, columns), rows >= columns."""
    q: Tensor
    """(batch, columns, r)."""
    places: Mapping[tuple[str, int], tuple[Matrix, slice]]
    """By parameter and part, where in the batch its matrices are."""

    def apart(self, x: Tensor) -> dict[tuple[str, int], Tensor]:
        """By parameter and part."""
        return {place: x[at] for place, (_, at) in self.places.items()}

    def keep(self, q: Tensor) -> None:
        """As the state of the parameters."""
        for (_, i), (matrix, at) in self.places.items():
            matrix.state[f"right_{i}"].copy_(q[at])


def in_batches(matrices: Sequence[Matrix]) -> list[Batch]:
    """The momenta of all parts, by shape."""
    parts: dict[tuple[Any, ...], list[tuple[Matrix, int, Tensor]]] = {}
    for matrix in matrices:
        for i, part in enumerate(upright(matrix, matrix.state["momentum"])):
            key = (part.shape[1:], part.dtype, matrix.state[f"right_{i}"].shape[-1])
            parts.setdefault(key, []).append((matrix, i, part))
    batches = []
    for same in parts.values():
        places, start = {}, 0
        for matrix, i, part in same:
            places[matrix.name, i] = (matrix, slice(start, start + part.shape[0]))
            start += part.shape[0]
        m = same[0][2] if len(same) == 1 else torch.cat([part for _, _, part in same])
        batches.append(Batch(m, torch.cat([matrix.state[f"right_{i}"] for matrix, i, _ in same]), places))
    return batches


def upright(matrix: Matrix, tensor: Tensor) -> list[Tensor]:
    """Each part of a tensor like the parameter, (count, rows, columns), turned so that rows >= columns."""
    return [part.mT if part.shape[1] < part.shape[2] else part for part in matrix.blocks.cut(tensor)]


def _of(matrix: Matrix, found: Mapping[tuple[str, int], Tensor]) -> list[Tensor]:
    """What belongs to each part, (count, rows, columns), turned back."""
    shapes = [part.shape for part in matrix.blocks.cut(matrix.state["momentum"])]
    parts = [found[matrix.name, i] for i in range(len(shapes))]
    return [part if part.shape == shape else part.mT for part, shape in zip(parts, shapes)]


class Dion(MatrixOptimizer):
    """Dion for the matrices, AdamW (or `rest`) for everything else, of models replicated over ranks.

    `groups` are `tw.optim.param_groups(model)`. Updates have rank `rank_fraction` x min(rows, columns), rounded up
    to `rank_multiple_of`. `replicate`: the ranks that hold the same weights (None: all); the model's own averaging
    must be off (`tw.attach(model, tw.Local())`, or a bare model), which is checked in the first step. `reducer`
    averages the factors P and R, and the gradients of everything else: slots `left_0.<parameter>`,
    `right_0.<parameter>` and `gradient.<parameter>`. `basis`: how P is made orthonormal (`basis.py`).

    Sends per step and rank: what `reducer` sends of (rows + columns) r elements per matrix, where that is less
    than rows x columns and `rank_fraction` below 1, and of the gradient otherwise; a byte of control traffic per
    parameter. Holds rows x columns + min(rows, columns) r numbers of 4 bytes per matrix. The momentum of a rank is
    its own: save it on every rank, or call `synchronize_for_checkpoint()` first.

    Collective to make and to step. Raises TypeError or ValueError for parameters that it cannot move, by name.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float = 0.01,
        *,
        rank_fraction: float = 1.0,
        rank_multiple_of: int = 1,
        mu: float = 0.95,
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        basis: Algorithm = "rcqr",
        rest: Rest = AdamW(),  # noqa: B008  # frozen
        replicate: Replicate = None,
        reducer: Reducer = Dense(),  # noqa: B008  # frozen
        seed: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        rule = DionRule(mu, rank_fraction, rank_multiple_of, eps, basis, seed)
        options: dict[str, Any] = {"rest": rest, "replicate": replicate, "reducer": reducer, "timeout": timeout}
        super().__init__(groups, rule, lr=lr, weight_decay=weight_decay, **options)
        several = self._replicas.wire.world_size > 1
        self._decoupled = several and any(rule.slots(matrix) for matrix in self._matrices())
        self._same_momentum = True

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self._same_momentum = not self._decoupled
        return loss

    @torch.no_grad()
    def synchronize_for_checkpoint(self) -> None:
        """Replace every rank's momentum by their mean, so that the state of any rank does for all, also for
        another number of them; weights move as they would have. Collective; sends 2 (W-1)/W x 4 bytes per
        element."""
        named = {matrix.name: matrix.state["momentum"] for matrix in self._matrices()}
        reducer = Dense().bind([Slot(n, tuple(m.shape), m.dtype) for n, m in named.items()], self._replicas.wire)
        reducer.begin()
        reducer.all_reduce(named).wait()
        self._same_momentum = True

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["thinwire"]["same_momentum"] = self._same_momentum
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._same_momentum = bool(state_dict.get("thinwire", {}).get("same_momentum", True))

    def _check_place(self, own: Mapping[str, Any]) -> None:
        super()._check_place(own)
        wire = self._replicas.wire
        if not own.get("same_momentum") and (own["rank"], own["world_size"]) != (wire.rank, wire.world_size):
            raise ValueError(
                f"Dion: the state has the momentum of rank {own['rank']} of {own['world_size']} alone, "
                f"this is rank {wire.rank} of {wire.world_size}: load on each rank what that rank saved, or call "
                "synchronize_for_checkpoint() before saving"
            )
