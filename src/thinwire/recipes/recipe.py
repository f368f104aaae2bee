"""A recipe: a method by name, one choice for each question the design asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from thinwire.collectives import Slot
from thinwire.local_update import Method
from thinwire.reducers import Reducer

LONG = 10**9
"""Steps of a run that is past every warm-up."""


@dataclass(frozen=True)
class Recipe:
    """A named method with its paper's defaults."""

    name: str

    wire: str
    """What goes over the wire, in a phrase."""

    paper: str
    """Where it comes from."""

    not_for: str
    """When not to use it."""

    reducer: Reducer | None = None
    """How gradients are averaged, every step; None: as `method` says."""

    method: Method | None = None
    """The local updates, for `tw.local_update`; None: none."""

    optimizer: Literal["adamw", "muon"] | None = None
    """The trainer's optimizer that it is made for; None: any."""

    def sent_bytes_per_step(self, slots: Sequence[Slot], world_size: int) -> float:
        """Bytes that one rank sends for `slots`, on average over the steps after a warm-up."""
        if self.reducer is not None:
            return self.reducer.sent_bytes(slots, world_size)
        assert self.method is not None
        plan = self.method.plan(LONG)
        groups = min(plan.groups or world_size, world_size)
        inner = plan.inner.sent_bytes(slots, world_size // groups) if groups < world_size else 0
        return inner + plan.reducer.sent_bytes(slots, world_size) / plan.every
