"""The engine of local updates: what a plan says, step by step.

Every parameter has an *anchor*, the weights that all ranks agreed on last, in float32 at least. What travels is
the pseudo-gradient, anchor - parameter, and what comes back is its mean over the ranks: the gradient with which
the outer optimizer moves the anchor. The parameter then becomes the anchor, or is merged with it.

    step:   1 ... every - delay        ... every
            inner steps   | send            | arrive: outer step on the anchor, merge

In the first steps of some methods all ranks are *alike*, because they average their gradients in every step: then
nothing is sent at the end of a round, and the anchor follows the parameter.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from thinwire.collectives import CollectiveError, Ledger, Wire
from thinwire.data_parallel import Link
from thinwire.data_parallel.agreement import ranks_that_differ
from thinwire.local_update.anchors import Anchors
from thinwire.local_update.buffers import Buffers
from thinwire.local_update.inner import Averaged, BoundInnerMean, Inner
from thinwire.local_update.method import Moment, Plan
from thinwire.local_update.tokens import Tokens
from thinwire.local_update.weights import Weights
from thinwire.reducers.reducer import BoundReducer, State

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1

FAILED, NOT_FINITE, FINE = range(3)
"""How a mean arrived, the worst first."""


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
        weights: Weights,
        anchors: Anchors,
        buffers: Buffers | None,
        plan: Plan,
        fragments: Sequence[Sequence[str]],
        reducer: BoundReducer,
        wire: Wire,
        across: Wire,
        optimizers: Sequence[Optimizer],
        total_steps: int | None,
        inner: Inner | None,
        frozen: Mapping[str, nn.Parameter],
        resources: ExitStack,
        method: str,
    ) -> None:
        self.outer = anchors.outer
        """The outer optimizer, of the anchors; a `torch.optim.lr_scheduler` of it counts rounds: step it whenever
        `step()` returns True."""
        self.steps = 0
        """Calls of `step()` so far."""
        self.verified = 0
        """After which of them the agreed weights were compared last."""
        self.exposed_seconds = 0.0
        """Seconds in which training waited for what a round sends; gradients apart."""
        self._weights = weights
        self._anchors = anchors
        self._buffers = buffers
        self._plan = plan
        self._fragments = fragments
        self._reducer = reducer
        self._wire = wire
        self._across = across
        self._optimizers = optimizers
        self._total_steps = total_steps
        self._inner = inner
        self._frozen = frozen
        self._identity = {
            "format_version": FORMAT_VERSION,
            "rank": wire.ranks[wire.rank],  # in the world: shards differ, too
            "world_size": wire.world_size,
            "total_steps": total_steps,
            "method": method,
            "every": plan.every,
            "delay": plan.delay,
        }
        self._resources = resources
        self._sent = [0] * len(fragments)  # after which step
        self._tokens = Tokens(len(fragments), weights, wire)
        self._inner_lr = self._inner_lr_now()  # when the last outer step was taken
        self._flight: _Flight | None = None
        self._closed = False
        self._settle_who_averages()
        weakref.finalize(self, wire.release).atexit = False  # where nobody calls close()

    @property
    def ledger(self) -> Ledger:
        """The bytes that this rank has sent for local updates."""
        return self._wire.ledger

    @property
    def link(self) -> Link | None:
        """What averages the gradients of a DDP or FSDP2 model, if anything does."""
        return self._inner if isinstance(self._inner, Link) else None

    @property
    def between_rounds(self) -> bool:
        """Whether a round has ended and the next has not begun."""
        return self.steps % self._plan.every == 0

    @property
    def encode_seconds(self) -> float:
        """Seconds spent encoding, decoding and copying what rounds send; gradients apart."""
        return self._across.busy_seconds

    @property
    def sending_seconds(self) -> float:
        """Seconds in which what rounds send was under way; gradients apart."""
        return self._across.sending_seconds

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's parameters."""
        return tuple(map(tuple, self._fragments))

    def step(self, tokens: float | Tensor | None = None) -> bool:
        """Count a step of the inner optimizer, and do what is due after it; returns whether a round has ended.

        Due is, in most steps, nothing. Otherwise one fragment's pseudo-gradient is sent, or its mean is waited
        for and applied. `tokens`: how many this rank's step was made of, in all steps or in none; then ranks
        count in the mean by their tokens, which costs one control all-reduce of a float64 number per fragment
        and round. Raises CollectiveError where a rank fails: the model then holds the weights agreed last;
        RuntimeError after `close()`, or where gradients are to be averaged and no optimizer took a step;
        ValueError for a parameter that takes gradients now and did not when this was made.
        """
        if self._closed:
            raise RuntimeError("step: this local update was closed; make a new one with tw.local_update")
        if isinstance(self._inner, Averaged):
            self._inner.check_averaged()
        self._check_frozen()
        self._tokens.count(tokens)
        self.steps += 1
        self._settle_who_averages()
        for fragment in self._plan.sending(self.steps):
            if self.steps + self._plan.delay > self._plan.alike:
                self._send(fragment)
        for fragment in self._plan.arriving(self.steps):
            if self.steps <= self._plan.alike:
                self._follow(fragment)
            else:
                self._arrive(self._plan.merge)
        ended = self.steps % self._plan.every == 0
        if ended:
            self._average_buffers()
        return ended

    def finish(self) -> None:
        """Average what was done since each fragment was sent last, be it less than a round; all ranks then hold
        the agreed weights. Sends a whole round's bytes unless nothing was done. Raises as `step` does."""
        if self._closed:
            raise RuntimeError("finish: this local update was closed; make a new one with tw.local_update")
        self._check_frozen()
        self._arrive(self._plan.merge)
        if self._alike:
            self._anchors.follow(self._weights.names)
            self._average_buffers()
            return
        late = [fragment for fragment, step in enumerate(self._sent) if step < self.steps]
        for fragment in late:
            self._send(fragment)
            self._arrive(0.0)
        self._average_buffers()
        self._restore()

    def wait(self) -> None:
        """Until what is in flight has arrived, and its bytes are counted; it is applied when it is due."""
        if self._flight is not None and self._flight.future is not None:
            started = time.perf_counter()
            with self._rolled_back():
                self._flight.future.wait()
            self.exposed_seconds += time.perf_counter() - started
            self._flight.future = None

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """A context in which the model holds the weights and buffers agreed on last, the same on all ranks: for
        evaluation and export. Takes a copy of the model's parameters. While all ranks average their gradients,
        those are the weights of now. Where ranks share the anchors, they all call it."""
        own = {} if self._alike else self._weights.copies()
        own_buffers = self._buffers.copies() if self._buffers is not None else {}
        if not self._alike:
            self._restore()
        elif self._buffers is not None:
            self._buffers.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                self._weights.restore(own)
                if self._buffers is not None:
                    self._buffers.restore(own_buffers)

    def verify(self) -> None:
        """Compare a hash of the agreed weights across ranks; 8 bytes of control traffic to each. Raises
        RuntimeError on every rank, naming those that differ from most."""
        self.verified = self.steps
        if differing := ranks_that_differ(self._across, self._anchors.tensors):
            ranks = ", ".join(map(str, differing))
            raise RuntimeError(f"the agreed weights of rank {ranks} differ from those of the other ranks")

    def state_dict(self) -> State:
        """This rank's state: plain tensors and numbers. The ranks' models differ within a round: save each
        rank's model and inner optimizer too. All ranks call this alike; it waits for what is in flight.

        `anchor.<name>`, `buffer.<name>`, `outer.<name>.<key>`, `arriving.<name>` (means that are not due yet),
        those of the reducer after `reducer.`, of what averages gradients after `inner.`.
        """
        self.wait()
        state: State = {
            **self._identity,
            "steps": self.steps,
            "fragments": list(map(list, self._fragments)),
            "sent": list(self._sent),
            **self._tokens.state_dict(),
            "inner_lr": self._inner_lr,
        }
        state |= self._anchors.state_dict()
        state |= self._buffers.state_dict() if self._buffers is not None else {}
        if self._flight is not None:
            state["in_flight"] = self._flight.fragment
            state |= {f"arriving.{name}": mean.clone() for name, mean in self._flight.named.items()}
        state |= {f"reducer.{key}": value for key, value in self._reducer.state_dict().items()}
        inner = self._inner.state_dict() if self._inner is not None else {}
        return state | {f"inner.{key}": value for key, value in inner.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank. Raises ValueError naming what does not fit."""
        if (there := {key: state.get(key) for key in self._identity}) != self._identity:
            raise ValueError(
                f"this local-update state is of {there}, expected {self._identity}: load each rank's own"
            )
        fragments = list(map(list, self._fragments))
        if state.get("fragments") != fragments:
            raise ValueError(
                f"the local-update state has fragments {state.get('fragments')!r:.200}, not {fragments!r:.200}"
            )
        if missing := {"steps", "sent", "tokens", "weighted", "inner_lr"} - state.keys():
            raise ValueError(f"the local-update state has no {min(missing)!r}")
        flying = state.get("in_flight")
        arriving = [] if flying is None else self._weights.kept(self._fragments[flying])
        self._anchors.check(state, arriving)
        self.wait()
        self._reducer.load_state_dict(_under("reducer.", state))
        if self._inner is not None:
            self._inner.load_state_dict(_under("inner.", state))
        if self._buffers is not None:
            self._buffers.load_state_dict(state)
        self._anchors.load_state_dict(state)
        self._tokens.load_state_dict(state)
        self.steps, self._sent, self._inner_lr = state["steps"], list(state["sent"]), state["inner_lr"]
        self._settle_who_averages()
        self._flight = None
        if flying is not None:
            means = {name: state[f"arriving.{name}"].to(self._wire.device, copy=True) for name in arriving}
            self._flight = _Flight(flying, means, None)

    def memory_bytes(self) -> int:
        """Bytes held on this rank beside the model and the inner optimizer: anchors, outer optimizer, what is in
        flight, and the reducer's."""
        flying = self._flight.named.values() if self._flight else []
        inner = self._inner.memory_bytes() if self._inner is not None else 0
        buffers = self._buffers.nbytes if self._buffers is not None else 0
        own = self._anchors.nbytes + sum(tensor.nbytes for tensor in flying)
        return own + buffers + self._reducer.memory_bytes() + inner

    def close(self) -> None:
        """Give a DDP model its own gradient averaging back. What is in flight is dropped. Inner optimizers stay as
        they are, each rank's its own: average or make them anew before training as one model again."""
        self._closed = True
        self._resources.close()

    def _check_frozen(self) -> None:
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{name!r} takes gradients now and was frozen when tw.local_update was called: call finish() "
                    "and close() before unfreezing, and tw.local_update again after"
                )

    # -- a fragment's way ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, fragment: int) -> None:
        with self._rolled_back():
            weight = self._tokens.weight(fragment)
            named, future = self._anchors.pseudo_gradient(self._fragments[fragment]), None
            if named:  # a rank of a small sharded model may hold nothing of it
                self._reducer.begin()
                future = self._reducer.all_reduce(named, weight=weight)
            self._flight = _Flight(fragment, named, future)
        self._sent[fragment] = self.steps
        self._tokens.sent(fragment)

    @torch.no_grad()
    def _arrive(self, merge: float) -> None:
        """Move the anchors of what is in flight, if anything is, and merge."""
        self.wait()
        flight, self._flight = self._flight, None
        if flight is None:
            return
        with self._rolled_back(tell=False):
            verdict = self._weights.worst(self._verdict(flight.named))
            if verdict == FAILED:
                raise CollectiveError(
                    f"rank {self._wire.ranks[self._wire.rank]}: the mean of fragment {flight.fragment} did not "
                    "reach a rank that holds other parts of the same weights; the agreed ones are kept"
                )
        if verdict == FINE:
            self._move(flight.named)
        else:
            logger.warning(
                "step %d: the mean of fragment %d is not finite: all ranks go back to its agreed weights",
                self.steps,
                flight.fragment,
            )
            self._reducer.rollback()  # also where this rank's parts are finite
            merge = 0.0
        self._anchors.lead(flight.named, merge)
        with self._rolled_back(tell=False):
            self._weights.spread(self._fragments[flight.fragment])

    @torch.no_grad()
    def _follow(self, fragment: int) -> None:
        """Of ranks that are alike: the anchors become the weights, and the outer optimizer sees the way there."""
        if self._plan.settings is not None:
            moved = self._anchors.pseudo_gradient(self._fragments[fragment])
            with self._rolled_back(tell=False):
                fine = self._weights.worst(self._verdict(moved)) == FINE
            if fine:
                self._move(moved)
        self._anchors.follow(self._fragments[fragment])
        self._sent[fragment] = self.steps
        self._tokens.sent(fragment)

    def _verdict(self, means: Mapping[str, Tensor]) -> int:
        return FINE if all(bool(mean.isfinite().all()) for mean in means.values()) else NOT_FINITE

    def _move(self, means: Mapping[str, Tensor]) -> None:
        """Take a step of the outer optimizer along these."""
        settings: Mapping[str, float] = {}
        if self._plan.settings is not None:
            progress = self.steps / self._total_steps if self._total_steps else None
            inner_lr = self._inner_lr_of_all()
            settings = self._plan.settings(Moment(progress, inner_lr, self._inner_lr, self._alike))
            self._inner_lr = inner_lr
        self._anchors.move(means, settings)

    @property
    def _alike(self) -> bool:
        """Whether the ranks have averaged their gradients in all steps so far."""
        return self.steps <= self._plan.alike and self._plan.alike > 0

    def _settle_who_averages(self) -> None:
        """In the step that comes: all ranks while they are alike, then the ranks of a group."""
        if self._inner is not None and isinstance(self._inner.reducer, BoundInnerMean):
            self._inner.reducer.alike = self.steps < self._plan.alike
        if isinstance(self._inner, Averaged):
            self._inner.next_step()

    def _inner_lr_now(self) -> float:
        return float(self._optimizers[0].param_groups[0]["lr"])

    def _inner_lr_of_all(self) -> float:
        """The largest over the ranks, whose schedulers may differ: outer steps must not."""
        own = torch.tensor([self._inner_lr_now()], dtype=torch.float64, device=self._wire.device)
        with self._rolled_back(tell=False):
            return float(self._wire.control_all_reduce(own, dist.ReduceOp.MAX))

    @torch.no_grad()
    def _average_buffers(self) -> None:
        if self._buffers is not None:
            with self._rolled_back(tell=False):
                self._buffers.average()

    @contextmanager
    def _rolled_back(self, *, tell: bool = True) -> Iterator[None]:
        """If a collective fails in here, the model holds the agreed weights before the caller hears of it.

        `tell`: the ranks that hold other parts of the same weights, who wait for this rank's verdict on the mean
        and may have got theirs: all of them move, or none.
        """
        try:
            yield
        except CollectiveError:
            self._flight = None
            try:
                with suppress(CollectiveError):
                    if tell:
                        self._weights.worst(FAILED)
                self._restore()
            except CollectiveError as error:  # of ranks that hold other parts
                logger.error("the weights agreed last cannot be put together: %s", error)
            raise

    @torch.no_grad()
    def _restore(self) -> None:
        """The agreed weights."""
        self._anchors.lead_all()
        if self._buffers is not None:
            self._buffers.restore()
        self._weights.spread(self._weights.names)


def _under(prefix: str, state: Mapping[str, Any]) -> State:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
