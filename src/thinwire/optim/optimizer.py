"""What the optimizers of matrices have in common: groups, state by name, and the order of a step.

A step: the ranks agree on which parameters have gradients; gradients that travel whole start to be averaged; the
rule moves the matrices that it averages in another form; when the gradients have arrived, the other matrices and
the rest move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.futures import Future
from torch.optim import Optimizer

from thinwire.collectives import Ledger, Slot
from thinwire.optim.blocks import Blocks
from thinwire.optim.layers import KINDS
from thinwire.optim.replicas import Replicas, Replicate
from thinwire.optim.rest import Rest, State
from thinwire.reducers import Reducer
from thinwire.reducers.reducer import BoundReducer, check_reducer, done

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Matrix:
    """A parameter of a matrix group, with its state and the group's settings as they are now."""

    name: str
    parameter: Tensor
    blocks: Blocks
    state: State
    group: Mapping[str, Any]

    @property
    def gradient(self) -> Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad


Average = Callable[[Mapping[str, Tensor]], Future[None]]
"""Replaces tensors, by slot name, by their means over the ranks."""


class Rule(Protocol):
    """What moves matrices."""

    def settings(self) -> dict[str, Any]:
        """Of a matrix group, where it does not say them itself, beside lr and weight_decay."""

    def new_state(self, matrix: Matrix) -> State:
        """Before the first step, the same on all ranks."""

    def slots(self, matrix: Matrix) -> Sequence[Slot]:
        """What is averaged in place of its gradient; empty: the gradient."""

    def step(self, matrices: Sequence[Matrix], replicas: Replicas, average: Average) -> None:
        """Move matrices of one of these two sorts, which all have gradients."""


class MatrixOptimizer(Optimizer):
    """Moves matrix groups by `rule` and the others by `rest`."""

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        rule: Rule,
        *,
        lr: float,
        weight_decay: float,
        rest: Rest,
        replicate: Replicate,
        reducer: Reducer | None,
        timeout: timedelta | None,
    ) -> None:
        self._who = type(self).__name__
        self._built = False
        self._rule, self._rest = rule, rest
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"{self._who}: lr and weight_decay must be at least 0, got {lr} and {weight_decay}")
        if reducer is not None:
            check_reducer(reducer, self._who)
        defaults = {"lr": lr, "weight_decay": weight_decay, **rule.settings()}
        super().__init__(self._prepared(groups, defaults), {"lr": lr, "weight_decay": weight_decay})
        self._built = True
        named = self._named()
        self._blocks = {
            name: Blocks.of(group)
            for group in self.param_groups
            if group["kind"] == "matrix"
            for name, parameter in zip(group["param_names"], group["params"])
            if parameter.numel()
        }
        for name, blocks in self._blocks.items():
            blocks.check(name, named[name].shape)
        self._replicas = Replicas(self._who, {n: p for n, p in named.items() if p.numel()}, replicate, timeout)
        # For an optimizer that is dropped without close().
        weakref.finalize(self, self._replicas.wire.release).atexit = False
        self._make_state()
        self._reducer: BoundReducer | None = None
        if reducer is not None:
            self._reducer = reducer.bind(self._slots(), self._replicas.wire)

    @property
    def ledger(self) -> Ledger:
        """The bytes that this rank has sent: `ledger.sent_bytes()`, `ledger.summary()`."""
        return self._replicas.wire.ledger

    def close(self) -> None:
        """End the worker that communicates. The optimizer cannot step any more where there are several ranks."""
        self._replicas.wire.close()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._built:
            raise ValueError(f"{self._who}: groups cannot be added later; build a new optimizer")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move all parameters that have a gradient on any rank. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        named = self._named()
        self._check_gradients(named)
        self._replicas.compare_gradients(averaged_here=self._reducer is not None)
        used = self._replicas.have_gradients()
        if self._reducer is not None:
            self._reducer.begin()
        matrices = [matrix for matrix in self._matrices() if matrix.name in used]
        others = [matrix for matrix in matrices if self._rule.slots(matrix)]
        whole = [matrix for matrix in matrices if not self._rule.slots(matrix)]
        alone = used - {matrix.name for matrix in others}
        sent_whole = {name: named[name].grad for name in named if name in alone}
        arrived = self._average(
            {f"gradient.{name}": grad for name, grad in sent_whole.items() if grad is not None}
        )
        if others:
            self._rule.step(others, self._replicas, self._average)
        arrived.wait()
        if whole:
            self._rule.step(whole, self._replicas, self._average)
        self._step_rest(used)
        return loss

    def memory_bytes(self) -> int:
        """Bytes of state, and of what the reducer holds, on this rank."""
        held: int = sum(tensor.nbytes for state in self.state.values() for tensor in state.values())
        return held + (self._reducer.memory_bytes() if self._reducer is not None else 0)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the names of the parameters; `thinwire` has what belongs to this rank: collective
        where a reducer keeps error memory."""
        state = super().state_dict()
        wire = self._replicas.wire
        state["thinwire"] = {
            "format_version": FORMAT_VERSION,
            "rank": wire.rank,
            "world_size": wire.world_size,
            "reducer": None if self._reducer is None else self._reducer.state_dict(),
        }
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, by the names of the parameters; bit for bit. Raises ValueError
        naming what does not fit."""
        saved = self._in_this_order(state_dict)
        own = state_dict.get("thinwire")
        if own is not None:
            self._check_place(own)
        super().load_state_dict({"state": saved["state"], "param_groups": saved["param_groups"]})
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters):
            for key, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor):  # torch casts to the parameter's dtype
                    home = torch.device("cpu") if key == "step" else parameter.device
                    self.state[parameter][key] = value.detach().to(home, copy=True)
        if own is not None and self._reducer is not None and own["reducer"] is not None:
            self._reducer.load_state_dict(dict(own["reducer"]))

    def _check_place(self, own: Mapping[str, Any]) -> None:
        """Raise ValueError for a state of another rank, where it matters whose it is."""
        if own.get("format_version") != FORMAT_VERSION:
            raise ValueError(
                f"{self._who}: the state has format_version {own.get('format_version')}, this version reads "
                f"{FORMAT_VERSION}"
            )
        wire = self._replicas.wire
        residuals = any("residual." in key for key in own.get("reducer") or ())
        if residuals and (own["rank"], own["world_size"]) != (wire.rank, wire.world_size):
            raise ValueError(
                f"{self._who}: the state has the error memory of rank {own['rank']} of {own['world_size']}, "
                f"this is rank {wire.rank} of {wire.world_size}: load on each rank what that rank saved"
            )

    def _prepared(self, groups: Iterable[Mapping[str, Any]], matrix: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Groups with all their settings. Raises TypeError or ValueError for what cannot be moved."""
        prepared, seen = [], set()
        for number, group in enumerate(groups):
            if not isinstance(group, Mapping) or group.get("kind") not in KINDS:
                raise TypeError(
                    f"{self._who} must know which parameters are matrices: give it tw.optim.param_groups(model), "
                    f"or groups with a 'kind', one of {', '.join(KINDS)}; group {number} is none"
                )
            pairs = list(group["params"])
            if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
                raise TypeError(f"{self._who}: group {number} must hold pairs of name and parameter")
            for name, parameter in pairs:
                if name in seen:
                    raise ValueError(f"{self._who}: two parameters are called {name!r}")
                seen.add(name)
                self._check_parameter(name, parameter)
            kind = group["kind"]
            defaults = matrix if kind == "matrix" else self._rest.settings(kind, float(matrix["lr"]))
            prepared.append({**defaults, **group, "params": pairs})
        if not seen:
            raise ValueError(f"{self._who} got no parameters")
        return prepared

    def _check_parameter(self, name: str, parameter: Tensor) -> None:
        if hasattr(parameter, "placements"):
            raise TypeError(
                f"{self._who}: {name!r} is sharded, a DTensor: only whole parameters are updated so far; use DDP"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{self._who}: {name!r} is {parameter.dtype}, must be real and floating point")

    def _check_gradients(self, named: Mapping[str, Tensor]) -> None:
        for name, parameter in named.items():
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{self._who}: the gradient of {name!r} is sparse: build its embedding with sparse=False"
                )

    def _named(self) -> dict[str, Tensor]:
        return {
            name: parameter
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"])
        }

    def _matrices(self) -> list[Matrix]:
        return [
            Matrix(name, parameter, self._blocks[name], self.state[parameter], group)
            for group in self.param_groups
            if group["kind"] == "matrix"
            for name, parameter in zip(group["param_names"], group["params"])
            if name in self._blocks
        ]

    def _make_state(self) -> None:
        for matrix in self._matrices():
            self.state[matrix.parameter].update(self._rule.new_state(matrix))
        for group in self.param_groups:
            for parameter in group["params"] if group["kind"] != "matrix" else ():
                self.state[parameter].update(self._rest.new_state(parameter))

    def _slots(self) -> list[Slot]:
        """Everything that is averaged in some step."""
        found: list[Slot] = []
        instead = {matrix.name: self._rule.slots(matrix) for matrix in self._matrices()}
        for name, parameter in self._named().items():
            if parameter.numel():
                whole = [Slot(f"gradient.{name}", tuple(parameter.shape), parameter.dtype)]
                found.extend(instead.get(name) or whole)
        return found

    def _average(self, named: Mapping[str, Tensor]) -> Future[None]:
        if self._reducer is None or not named:
            return done(self._replicas.wire.device)
        return self._reducer.all_reduce(named)

    def _step_rest(self, used: set[str]) -> None:
        for group in self.param_groups:
            if group["kind"] != "matrix":
                moved = [p for n, p in zip(group["param_names"], group["params"]) if n in used]
                if moved:
                    self._rest.step(moved, [self.state[p] for p in moved], group)

    def _in_this_order(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The saved state with groups' parameters in the order that they have here."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(f"{self._who}: the state has {len(saved)} groups, here are {len(self.param_groups)}")
        groups = []
        for number, (there, here) in enumerate(zip(saved, self.param_groups)):
            names = there.get("param_names", here["param_names"])
            if different := sorted(set(names) ^ set(here["param_names"])):
                where = "the saved" if different[0] in names else "this"
                raise ValueError(f"{self._who}: in group {number} only {where} optimizer has {different[0]!r}")
            if Blocks.of(there) != Blocks.of(here) or there.get("kind", here["kind"]) != here["kind"]:
                raise ValueError(
                    f"{self._who}: group {number} was of another kind, or its matrices were cut otherwise"
                )
            numbers = dict(zip(names, there["params"]))
            for name, parameter in zip(here["param_names"], here["params"]):
                self._check_saved(name, parameter, state_dict["state"].get(numbers[name], {}))
            order = [numbers[name] for name in here["param_names"]]
            groups.append({**here, **there, "params": order, "param_names": list(here["param_names"])})
        return {"state": state_dict["state"], "param_groups": groups}

    def _check_saved(self, name: str, parameter: Tensor, state: Mapping[str, Any]) -> None:
        for key, value in self.state[parameter].items():
            found = state.get(key)
            if not isinstance(found, Tensor) or found.shape != value.shape:
                what = f"of shape {tuple(found.shape)}" if isinstance(found, Tensor) else "missing"
                raise ValueError(
                    f"{self._who}: {key!r} of {name!r} is {what}, expected shape {tuple(value.shape)}"
                )
