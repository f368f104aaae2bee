"""LowRank: the mean as the product of two narrow factors, PowerSGD (Vogels et al., arXiv 1905.13727).

    M  = gradient + error              (rows, columns), each rank's own
    P  = basis(mean M Q)               (rows, rank)
    R  = mean M^T P                    (columns, rank)
    M' = P R^T                         the mean that all ranks apply
    error = M - M'                     Q = R / |its columns|, where the next reduction starts

One step of power iteration per reduction: as gradients change slowly, Q follows their largest singular vectors.
A tensor of more than two dimensions is the matrix (first, all others). What its factors would not make smaller,
vectors among them, is averaged by `Dense`. Each mean is over the group, by `factors`: so a factor may travel in
FP8, and what that rounds away is in the error as well, since it is measured against what all ranks apply.

The second factor's mean is started when the first one's has arrived, by a worker of its own: it has other process
groups, on which all ranks make the calls in the order in which they made their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.futures import Future

from thinwire.collectives import Slot, Wire
from thinwire.collectives.pipeline import Task
from thinwire.geometry import Fidelity, Observer
from thinwire.reducers.alone import BoundAlone
from thinwire.reducers.basis import orthonormal_basis
from thinwire.reducers.dense import Dense
from thinwire.reducers.feedback import memory_of
from thinwire.reducers.finite import FiniteWatch
from thinwire.reducers.parts import Parts
from thinwire.reducers.pieces import Pieces
from thinwire.reducers.reducer import (
    BoundReducer,
    Reducer,
    State,
    check_loss_scale,
    check_reducer,
    check_tensors,
    done,
    label,
    reductions_in,
    residuals_in,
)
from thinwire.reducers.routed import both

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LowRank:
    """The mean of matrices by factors of `rank` columns: what `factors` sends of (rows + columns) x rank elements
    per matrix, in two calls, and of everything else 2 (W-1)/W x 4 bytes per element.

    Memory: 8 bytes per element of a matrix and rank (4 without feedback), and columns x rank numbers. Raises
    ValueError at bind for slots that are not floating point of at most 32 bits.
    """

    rank: int = 4
    """Columns of the factors. Higher: a smaller error, more bytes. A matrix has at most its shorter side."""

    factors: Reducer = field(default_factory=Dense)
    """Averages the factors, slots `left.<name>` (rows, rank) and `right.<name>` (columns, rank); no feedback."""

    feedback: Literal["none", "error"] = "error"
    """"error" adds what the factors leave out to the next reduction. Without, small singular values are lost."""

    warm_start: bool = True
    """Start from the last reduction's right factor; False: from a new random one every time."""

    seed: int = 0
    """Of the first right factors."""

    def __post_init__(self) -> None:
        check_reducer(self.factors, "LowRank factors")
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"LowRank rank must be a whole number of at least 1, got {self.rank!r}")
        if self.feedback not in ("none", "error"):
            raise ValueError(f"LowRank feedback must be 'none' or 'error', got {self.feedback!r}")

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundReducer:
        for slot in slots:
            if slot.dtype not in FLOATS:
                raise ValueError(
                    f"LowRank needs float32, bfloat16 or float16, got {slot.dtype} for {slot.name!r}; "
                    "send it through Dense() with Routed"
                )
        if wire.world_size == 1:
            kept = [matrix.slot for matrix in self.matrices(slots).values()]
            return BoundAlone(slots, wire.device, memory=memory_of(self.feedback), kept=kept)
        return BoundLowRank(self, slots, wire)

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        matrices = self.matrices(slots)
        rest = [slot for slot in slots if slot.name not in matrices]
        sides = [[matrix.left for matrix in matrices.values()], [matrix.right for matrix in matrices.values()]]
        return sum(self.factors.sent_bytes(side, world_size) for side in sides) + Dense().sent_bytes(
            rest, world_size
        )

    def matrices(self, slots: Sequence[Slot]) -> dict[str, Matrix]:
        """The slots that factors make smaller, by name."""
        found = {}
        for slot in slots:
            if len(slot.shape) < 2 or not slot.numel:
                continue
            rows, columns = slot.shape[0], slot.numel // slot.shape[0]
            matrix = Matrix(slot, rows, columns, min(self.rank, rows, columns))
            if (rows + columns) * matrix.rank < rows * columns:
                found[slot.name] = matrix
        return found


@dataclass(frozen=True)
class Matrix:
    """A slot as a matrix, and its factors."""

    slot: Slot
    rows: int
    columns: int
    rank: int

    @property
    def left(self) -> Slot:
        return Slot(f"left.{self.slot.name}", (self.rows, self.rank))

    @property
    def right(self) -> Slot:
        return Slot(f"right.{self.slot.name}", (self.columns, self.rank))


class BoundLowRank:
    """The right factors, and a work matrix and an error memory per slot that has factors."""

    def __init__(self, config: LowRank, slots: Sequence[Slot], wire: Wire) -> None:
        self._config = config
        self._wire = wire
        self._slots = {slot.name: slot for slot in slots}
        self._matrices = config.matrices(slots)
        self._pieces = Pieces(slots, wire)
        rest = [slot for slot in slots if slot.name not in self._matrices]
        wire.keeps_memory |= config.feedback == "error"
        second = wire.second()
        self._second = second
        self._parts = Parts(
            left=config.factors.bind([matrix.left for matrix in self._matrices.values()], wire),
            right=config.factors.bind([matrix.right for matrix in self._matrices.values()], second),
            rest=Dense().bind(rest, wire),
        )
        if any("residual." in key for part in self._parts.each() for key in part.state_dict()):
            raise ValueError("LowRank keeps what its factors leave out itself: use factors without feedback")
        self._work = {name: self._zeros(matrix) for name, matrix in self._matrices.items()}
        self._error = {name: self._zeros(m) for name, m in self._matrices.items() if config.feedback == "error"}
        self._q = {name: self._random(matrix) for name, matrix in self._matrices.items()}  # (columns, rank)
        self._next_q: dict[str, Tensor] = {}  # of the open reduction
        self._open: dict[str, Future[None]] = {}  # by slot
        self._forgotten: set[str] = set()
        self._watch = FiniteWatch(wire.device)
        self._reductions = 0
        self._loss_scale = 1.0

    replicas: Literal["identical", "drift"] = "identical"

    @property
    def observers(self) -> Mapping[str, Observer]:
        return {}

    @property
    def fidelity(self) -> Mapping[str, Fidelity]:
        return {}

    def begin(self) -> None:
        self.settle()
        self._reductions += 1
        for part in self._parts.each():
            part.begin()

    def all_reduce(self, named: Mapping[str, Tensor], *, weight: float = 1.0) -> Future[None]:
        def deliver(name: str, mean: Tensor) -> None:
            named[name].detach().copy_(mean.view(named[name].shape))

        rest = {name: tensor for name, tensor in named.items() if name not in self._matrices}
        return self._reduce(named, weight, deliver, lambda: self._parts["rest"].all_reduce(rest, weight=weight))

    def reduce_scatter(
        self, named: Mapping[str, Tensor], out: Mapping[str, Tensor], *, weight: float = 1.0
    ) -> Future[None]:
        """An all-reduce of the factors, of whose product this rank keeps its piece."""
        self._pieces.check(out)

        def deliver(name: str, mean: Tensor) -> None:
            self._pieces.write({name: mean}, {name: out[name]})

        rest = {name: tensor for name, tensor in named.items() if name not in self._matrices}
        pieces = {name: out[name] for name in rest}
        return self._reduce(
            named, weight, deliver, lambda: self._parts["rest"].reduce_scatter(rest, pieces, weight=weight)
        )

    def finite(self) -> bool:
        for future in self._open.values():
            future.wait()
        return self._parts["rest"].finite() and self._watch.all_finite()

    def rollback(self, names: Sequence[str] | None = None) -> None:
        self._forgotten |= set(self._matrices) if names is None else set(names)

    def settle(self) -> None:
        """Commit error and right factors of the open reduction, or drop them where any mean was non-finite."""
        if self.finite():
            for name in self._open.keys() - self._forgotten:
                self._q[name] = self._next_q[name]
                if self._error:
                    self._error[name], self._work[name] = self._work[name], self._error[name]
        for part in self._parts.each():
            part.settle()
        self._open.clear()
        self._next_q.clear()
        self._forgotten.clear()
        self._watch.reset()

    def set_loss_scale(self, scale: float) -> None:
        check_loss_scale(scale)
        self._loss_scale = scale

    def state_dict(self) -> State:
        self.settle()
        state = self._parts.state_dict(self._reductions)
        for name in self._matrices:
            state[f"same.right.{name}"] = self._q[name].clone()
            if self._error:
                state[f"residual.{name}"] = self._error[name].view(self._slots[name].shape).clone()
        return state

    def load_state_dict(self, state: State) -> None:
        """A state of a world of one rank has no right factors: they start anew."""
        residuals = residuals_in(state, {name: self._slots[name] for name in self._error})
        rights = {name: state.get(f"same.right.{name}", self._random(m)) for name, m in self._matrices.items()}
        for name, right in rights.items():
            if tuple(right.shape) != tuple(self._q[name].shape):
                raise ValueError(
                    f"the right factor of {name!r} has shape {tuple(right.shape)}, expected "
                    f"{tuple(self._q[name].shape)}: the state is of another rank= than {self._config.rank}"
                )
        self.settle()
        of_several = "left.reductions" in state
        self._reductions = self._parts.load_state_dict(state) if of_several else reductions_in(state)
        for name, right in rights.items():
            self._q[name] = right.to(self._wire.device, torch.float32, copy=True)
        for name, residual in residuals.items():
            self._error[name].copy_(residual.view(self._error[name].shape))

    def memory_bytes(self) -> int:
        own = [*self._work.values(), *self._error.values(), *self._q.values()]
        return sum(tensor.nbytes for tensor in own) + self._parts.memory_bytes()

    def _reduce(
        self,
        named: Mapping[str, Tensor],
        weight: float,
        deliver: Callable[[str, Tensor], None],
        average_rest: Callable[[], Future[None]],
    ) -> Future[None]:
        check_tensors(named, self._slots)
        if not named:
            return done(self._wire.device)
        rest = average_rest()
        names = [name for name in named if name in self._matrices]
        if not names:
            return rest
        lefts = {}
        for name in names:
            m = self._contribution(name, named[name], weight)
            lefts[f"left.{name}"] = m @ self._start(name)  # (rows, rank)
        first = self._parts["left"].all_reduce(lefts)
        factors = Future[None](devices=[self._wire.device] if self._wire.device.type == "cuda" else [])
        task = self._from_left(names, lefts, first, deliver, factors)
        self._second.submit([task], label(names)).add_done_callback(partial(_pass_on_failure, factors))
        self._open |= dict.fromkeys(names, factors)
        return both([rest, factors], self._wire)

    def _contribution(self, name: str, tensor: Tensor, weight: float) -> Tensor:
        """M, (rows, columns): W x what this rank adds to the mean."""
        m = self._work[name]
        m.copy_(tensor.detach().reshape(m.shape))
        if weight != 1.0:
            m.mul_(weight)
        if self._error:
            m.add_(self._error[name], alpha=self._wire.world_size * self._loss_scale)
        return m

    def _from_left(
        self,
        names: Sequence[str],
        lefts: Mapping[str, Tensor],
        first: Future[None],
        deliver: Callable[[str, Tensor], None],
        result: Future[None],
    ) -> Task:
        """On the second worker, when the mean of M Q is there: P, R, and the means."""
        first.wait()
        ps = _bases({name: lefts[f"left.{name}"] for name in names})
        rights = {f"right.{name}": self._work[name].T @ ps[name] for name in names}  # (columns, rank)

        def finish(second: Future[None]) -> None:
            try:
                second.wait()
                for name in names:
                    self._finish(name, ps[name], rights[f"right.{name}"], deliver)
            except Exception as error:  # it belongs to the caller, not to the worker that runs this
                result.set_exception(error)  # type: ignore[arg-type]  # torch annotates T
            else:
                on_cuda = self._wire.device.type == "cuda"
                value = torch.empty(0, device=self._wire.device) if on_cuda else None
                result.set_result(value)  # type: ignore[arg-type]

        self._parts["right"].all_reduce(rights).add_done_callback(finish)
        yield from ()

    def _finish(self, name: str, p: Tensor, r: Tensor, deliver: Callable[[str, Tensor], None]) -> None:
        """Deliver P R^T and keep M - P R^T; Q where R is zero is as it was."""
        mean = (p @ r.T).to(self._slots[name].dtype)  # (rows, columns)
        self._watch.see(mean.float())
        deliver(name, mean)
        if self._error:
            scale = 1.0 / (self._wire.world_size * self._loss_scale)
            self._work[name].sub_(mean).mul_(scale)
        length = torch.linalg.vector_norm(r, dim=0)  # (rank,)
        self._next_q[name] = torch.where(length > 0, r / length.clamp_min(torch.finfo().tiny), self._q[name])

    def _start(self, name: str) -> Tensor:
        return self._q[name] if self._config.warm_start else self._random(self._matrices[name], self._reductions)

    def _zeros(self, matrix: Matrix) -> Tensor:
        return torch.zeros(matrix.rows, matrix.columns, device=self._wire.device)

    def _random(self, matrix: Matrix, draw: int = 0) -> Tensor:
        """A standard normal right factor, the same on all ranks."""
        digest = hashlib.sha256(f"{self._config.seed} {draw} {matrix.slot.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        return torch.randn(matrix.columns, matrix.rank, generator=generator).to(self._wire.device)


def _bases(lefts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An orthonormal basis of the columns of each left factor, those of one shape in one batch."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, left in lefts.items():
        by_shape.setdefault(tuple(left.shape), []).append(name)
    found: dict[str, Tensor] = {}
    for names in by_shape.values():
        lengths = [torch.linalg.vector_norm(lefts[name]) for name in names]  # tiny ones would lose their squares
        stacked = torch.stack([lefts[name] / _not_zero(n) for name, n in zip(names, lengths)])
        found |= zip(names, orthonormal_basis(stacked, "qr"))
    return found


def _not_zero(length: Tensor) -> Tensor:
    return torch.where(length > 0, length, torch.ones_like(length))


def _pass_on_failure(factors: Future[None], task: Future[None]) -> None:
    """What went wrong before the second mean was started."""
    try:
        task.wait()
    except Exception as error:  # it belongs to the caller of the reduction
        factors.set_exception(error)  # type: ignore[arg-type]
