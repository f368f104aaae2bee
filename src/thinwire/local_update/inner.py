"""Between the rounds: gradients averaged in every step, over all ranks at first and over a group of them later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thinwire.collectives import Slot, Wire
from thinwire.data_parallel.parameters import local_part
from thinwire.reducers import Local, Reducer
from thinwire.reducers.local import BoundLocal
from thinwire.reducers.parts import Parts
from thinwire.reducers.reducer import BoundReducer, State
from thinwire.reducers.switch import Switch


class Inner(Protocol):
    """What averages gradients: a link, or `Averaged`."""

    @property
    def reducer(self) -> BoundReducer: ...

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def memory_bytes(self) -> int: ...

    def detach(self) -> None: ...


def members_of_group(groups: int, wire: Wire) -> range:
    """The ranks of this rank's group, by their numbers in `wire`. Raises ValueError unless groups are equal."""
    if wire.world_size % groups:
        raise ValueError(f"groups must divide the {wire.world_size} ranks into equal parts, got {groups}")
    size = wire.world_size // groups
    first = wire.rank // size * size
    return range(first, first + size)


@dataclass(frozen=True)
class InnerMean:
    """The mean of gradients: over all ranks while they are `alike`, then over those of a group, where there are
    groups, counted under that scope. Sends what `reducer` sends."""

    reducer: Reducer
    groups: int | None
    alike: bool

    def bind(self, slots: Sequence[Slot], wire: Wire) -> BoundInnerMean:
        everybody = self.reducer if self.alike else Local()
        bound = everybody.bind(slots, wire)
        if any("residual." in key for key in bound.state_dict()):
            raise ValueError(
                "inner keeps error memory, and what it still owes when all ranks stop averaging gradients would "
                "never be sent: use a reducer without feedback"
            )
        if self.groups is None:
            return BoundInnerMean(Parts(everybody=bound, group=Local().bind(slots, wire)))
        group = wire.part(members_of_group(self.groups, wire), "group")
        return BoundInnerMean(Parts(everybody=bound, group=self.reducer.bind(slots, group)))

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        """Within a group."""
        return self.reducer.sent_bytes(slots, world_size // self.groups) if self.groups else 0


class BoundInnerMean(Switch):
    """Two reducers, and which of them it is now."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts, lambda reduction: "everybody" if self.alike else "group")
        self.alike = False
        """Whether all ranks average. To be set between two reductions, on all ranks at once."""

    @property
    def replicas(self) -> Literal["identical", "drift"]:
        return "identical" if self.alike else "drift"


class Averaged:
    """Gradients of a model without a hook of its own, averaged when the first of its optimizers takes a step."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, nn.Parameter],
        reducer: BoundInnerMean,
    ) -> None:
        self.reducer = reducer
        self._parameters = parameters
        self._averaged = False  # in this step
        self._handles = [optimizer.register_step_pre_hook(self._before) for optimizer in optimizers]

    def check_averaged(self) -> None:
        """Raises RuntimeError where the others wait for this rank's gradients."""
        if self._parameters and not self._averaged and not isinstance(self.reducer.now, BoundLocal):
            raise RuntimeError(
                "step: no optimizer took a step since the last one, and gradients are averaged when it does: the "
                "other ranks wait for this rank's. Where a step is skipped, as by a GradScaler, all ranks have to "
                "skip it, and sync.step() too"
            )

    def next_step(self) -> None:
        """The optimizers have taken a step."""
        self._averaged = False

    def state_dict(self) -> State:
        return self.reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reducer.load_state_dict(dict(state))

    def memory_bytes(self) -> int:
        return self.reducer.memory_bytes()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._averaged:
            return
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise ValueError(
                "the gradients that an optimizer's closure makes cannot be averaged on a bare model: call "
                "backward() before step(), or wrap the model in DistributedDataParallel"
            )
        self._averaged = True
        self._average()

    @torch.no_grad()
    def _average(self) -> None:
        """A parameter that this rank did not use counts as a gradient of zeros, also where no rank did."""
        if isinstance(self.reducer.now, BoundLocal):
            return
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self._parameters:
            self.reducer.begin()
            named = {name: local_part(_placed_alike(p)) for name, p in self._parameters.items()}
            self.reducer.all_reduce(named).wait()


def _placed_alike(parameter: nn.Parameter) -> Tensor:
    """The gradient, placed as its parameter is: a tensor-parallel layer may leave a sum still to be taken."""
    gradient = parameter.grad
    assert gradient is not None
    placements = getattr(parameter, "placements", None)
    if placements is not None and gradient.placements != placements:  # type: ignore[attr-defined]
        parameter.grad = gradient = gradient.redistribute(placements=placements)  # type: ignore[attr-defined]
    return gradient
