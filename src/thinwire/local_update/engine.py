"""The engine of local updates: what a plan says, step by step.

Every parameter has an *anchor*, the weights that all ranks agreed on last, in float32 at least. What travels is
the pseudo-gradient, anchor - parameter, and what comes back is its mean over the ranks: the gradient with which
the outer optimizer moves the anchor. The parameter then becomes the anchor, or is merged with it.

    step:   1 ... every - delay        ... every
            inner steps   | send            | arrive: outer step on the anchor, merge
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from thinwire.collectives import CollectiveError, Ledger, Wire
from thinwire.data_parallel.agreement import ranks_that_differ
from thinwire.local_update.method import Plan
from thinwire.reducers.reducer import BoundReducer, State

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass
class _Flight:
    """Pseudo-gradients on their way, of which the means arrive in the same tensors."""

    fragment: int
    named: dict[str, Tensor]
    future: Future[None] | None
    """None: they have arrived."""


class LocalUpdate:
    """What `tw.local_update` returns. All ranks call `step()` after every step of their inner optimizer."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        plan: Plan,
        fragments: Sequence[Sequence[str]],
        anchors: Mapping[str, Tensor],
        outer: Optimizer,
        reducer: BoundReducer,
        wire: Wire,
        on_close: Callable[[], None],
    ) -> None:
        self.outer = outer
        """The outer optimizer, of the anchors; a `torch.optim.lr_scheduler` of it counts rounds: step it whenever
        `step()` returns True."""
        self.steps = 0
        """Calls of `step()` so far."""
        self._parameters = parameters
        self._plan = plan
        self._fragments = fragments
        self._anchors = anchors
        self._reducer = reducer
        self._wire = wire
        self._on_close = on_close
        self._sent = [0] * len(fragments)  # after which step
        self._tokens = [0.0] * len(fragments)  # since then
        self._weighted: bool | None = None
        self._flight: _Flight | None = None
        weakref.finalize(self, wire.release).atexit = False  # where nobody calls close()

    @property
    def ledger(self) -> Ledger:
        """The bytes that this rank has sent for local updates."""
        return self._wire.ledger

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's parameters."""
        return tuple(map(tuple, self._fragments))

    def step(self, tokens: float | None = None) -> bool:
        """Count a step of the inner optimizer, and do what is due after it; returns whether a round has ended.

        Due is, in most steps, nothing. Otherwise one fragment's pseudo-gradient is sent, or its mean is waited
        for and applied. `tokens`: how many this rank's step was made of, in all steps or in none; then ranks
        count in the mean by their tokens, which costs one control all-reduce of a float64 number per fragment
        and round. Raises CollectiveError where a rank fails: the model then holds the weights agreed last.
        """
        if self._weighted not in (None, tokens is not None):
            raise ValueError("step: tokens are given in some steps and not in others")
        if tokens is not None and not 0 <= tokens < float("inf"):
            raise ValueError(f"step: tokens cannot be {tokens!r}")
        self._weighted = tokens is not None
        self.steps += 1
        self._tokens = [count + (tokens or 0.0) for count in self._tokens]
        for fragment in self._plan.sending(self.steps):
            self._send(fragment)
        for _ in self._plan.arriving(self.steps):
            self._arrive(self._plan.merge)
        return self.steps % self._plan.every == 0

    def finish(self) -> None:
        """Average what was done since each fragment was sent last, be it less than a round; all ranks then hold
        the agreed weights. Sends a whole round's bytes unless nothing was done."""
        self._arrive(self._plan.merge)
        late = [fragment for fragment, step in enumerate(self._sent) if step < self.steps]
        for fragment in late:
            self._send(fragment)
            self._arrive(0.0)
        self._restore()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A context in which the model holds the weights that were agreed on last, the same on all ranks: for
        evaluation and export. Takes a copy of the model's parameters."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(own[name])

    def verify(self) -> None:
        """Compare a hash of the agreed weights across ranks; 8 bytes of control traffic to each. Raises
        RuntimeError on every rank, naming those that differ from most."""
        if differing := ranks_that_differ(self._wire, self._anchors.values()):
            ranks = ", ".join(map(str, differing))
            raise RuntimeError(f"the agreed weights of rank {ranks} differ from those of the other ranks")

    def state_dict(self) -> State:
        """This rank's state: plain tensors and numbers. The ranks' models differ within a round: save each
        rank's model and inner optimizer too. All ranks call this alike; it waits for what is in flight.

        `anchor.<name>`, `outer.<name>.<key>`, `arriving.<name>` (means that are not due yet), those of the
        reducer after `reducer.`.
        """
        self._wait()
        state: State = {
            "format_version": FORMAT_VERSION,
            "rank": self._wire.rank,
            "world_size": self._wire.world_size,
            "steps": self.steps,
            "sent": list(self._sent),
            "tokens": list(self._tokens),
        }
        state |= {f"anchor.{name}": anchor.clone() for name, anchor in self._anchors.items()}
        if self._flight is not None:
            state["in_flight"] = self._flight.fragment
            state |= {f"arriving.{name}": mean.clone() for name, mean in self._flight.named.items()}
        outer = self.outer.state_dict()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in outer["param_groups"]]
        state["outer_groups"] = groups
        for index, name in enumerate(self._anchors):
            for key, value in outer["state"].get(index, {}).items():
                state[f"outer.{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
        return state | {f"reducer.{key}": value for key, value in self._reducer.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Raises ValueError naming what does not fit."""
        here = {
            "format_version": FORMAT_VERSION,
            "rank": self._wire.rank,
            "world_size": self._wire.world_size,
        }
        if (there := {key: state.get(key) for key in here}) != here:
            raise ValueError(f"this local-update state is of {there}, expected {here}: load each rank's own")
        if len(state["sent"]) != len(self._fragments):
            raise ValueError(
                f"the local-update state has {len(state['sent'])} fragments, expected {len(self._fragments)}"
            )
        flying = state.get("in_flight")
        expected = {f"anchor.{name}": anchor for name, anchor in self._anchors.items()}
        if flying is not None:
            expected |= {f"arriving.{name}": self._anchors[name] for name in self._fragments[flying]}
        for key, tensor in expected.items():
            if not isinstance(state.get(key), Tensor) or state[key].shape != tensor.shape:
                raise ValueError(f"the local-update state has no {key!r} of shape {tuple(tensor.shape)}")
        self._wait()
        prefix = "reducer."
        self._reducer.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        for name, anchor in self._anchors.items():
            anchor.copy_(state[f"anchor.{name}"])
        self._load_outer(state)
        self.steps, self._sent, self._tokens = state["steps"], list(state["sent"]), list(state["tokens"])
        self._flight = None
        if flying is not None:
            means = {
                name: state[f"arriving.{name}"].to(self._wire.device, copy=True)
                for name in self._fragments[flying]
            }
            self._flight = _Flight(flying, means, None)

    def memory_bytes(self) -> int:
        """Bytes held on this rank beside the model and the inner optimizer: anchors, outer optimizer, what is in
        flight, and the reducer's."""
        states = [value for state in self.outer.state.values() for value in state.values()]
        flying = list(self._flight.named.values()) if self._flight else []
        tensors = [*self._anchors.values(), *flying, *(v for v in states if isinstance(v, Tensor))]
        return sum(tensor.nbytes for tensor in tensors) + self._reducer.memory_bytes()

    def close(self) -> None:
        """Give a DDP model its own gradient averaging back. What is in flight is dropped."""
        self._on_close()
        self._wire.close()

    # -- a fragment's way ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        with self._rolled_back():
            weight = self._weight(fragment)
            self._reducer.begin()
            named = {name: self._anchors[name] - self._parameters[name] for name in self._fragments[fragment]}
            self._flight = _Flight(fragment, named, self._reducer.all_reduce(named, weight=weight))
        self._sent[fragment], self._tokens[fragment] = self.steps, 0.0

    @torch.no_grad()
    def _arrive(self, merge: float) -> None:
        """Move the anchors of what is in flight, if anything is, and merge."""
        self._wait()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if all(bool(mean.isfinite().all()) for mean in flight.named.values()):
            for name, mean in flight.named.items():
                self._anchors[name].grad = mean
            self.outer.step()
            self.outer.zero_grad()
        else:
            logger.warning(
                "step %d: the mean of fragment %d is not finite: all ranks go back to its agreed weights",
                self.steps,
                flight.fragment,
            )
            merge = 0.0
        for name in flight.named:
            parameter, anchor = self._parameters[name], self._anchors[name]
            parameter.copy_(anchor.lerp(parameter.to(anchor.dtype), merge) if merge else anchor)

    def _wait(self) -> None:
        if self._flight is not None and self._flight.future is not None:
            with self._rolled_back():
                self._flight.future.wait()
            self._flight.future = None

    def _weight(self, fragment: int) -> float:
        """Of this rank in the mean; all ranks' sum to the world size."""
        if not self._weighted:
            return 1.0
        own = torch.tensor([self._tokens[fragment]], dtype=torch.float64, device=self._wire.device)
        total = self._wire.control_all_reduce(own.clone())
        return float(own / total) * self._wire.world_size if float(total) > 0 else 1.0

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        """If a collective fails in here, the model holds the agreed weights before the caller hears of it."""
        try:
            yield
        except CollectiveError:
            self._flight = None
            self._restore()
            raise

    @torch.no_grad()
    def _restore(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._anchors[name])

    def _load_outer(self, state: Mapping[str, Any]) -> None:
        """By name, into the optimizer's own order."""
        own = self.outer.state_dict()
        groups = [
            {**saved, "params": group["params"]}
            for saved, group in zip(state["outer_groups"], own["param_groups"])
        ]
        states: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(self._anchors):
            prefix = f"outer.{name}."
            if found := {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}:
                states[index] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in found.items()}
        self.outer.load_state_dict({"state": states, "param_groups": groups})
