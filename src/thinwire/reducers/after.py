"""After: a warm-up. The first `steps` reductions go through `before` (dense unless told), then `reducer`.

Early gradients are large and change quickly, so lossy reducers often start after some dense steps; reductions
are counted, and the count is part of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thinwire.collectives import Slot, Wire
from thinwire.reducers.dense import Dense
from thinwire.reducers.parts import Parts
from thinwire.reducers.reducer import Reducer, check_reducer
from thinwire.reducers.switch import Switch


@dataclass(frozen=True)
class After:
    """`before`, which must keep no error memory, for the first `steps` reductions (synchronised backwards), then
    `reducer`. Bytes and memory are theirs."""

    steps: int
    reducer: Reducer
    before: Reducer = field(default_factory=Dense)

    def __post_init__(self) -> None:
        check_reducer(self.reducer, "After")
        check_reducer(self.before, "After before")
        if self.steps < 0:
            raise ValueError(f"After needs a number of reductions of at least 0, got {self.steps}")

    def bind(self, slots: Sequence[Slot], wire: Wire) -> Switch:
        before = self.before.bind(slots, wire)
        if any("residual." in key for key in before.state_dict()):
            raise ValueError(
                "After's `before` keeps error memory, and what it still owes at the switch would never be sent: "
                "use one without feedback"
            )
        parts = Parts(before=before, after=self.reducer.bind(slots, wire))
        return Switch(parts, lambda reduction: "before" if reduction <= self.steps else "after")

    def sent_bytes(self, slots: Sequence[Slot], world_size: int) -> int:
        """After the warm-up."""
        return self.reducer.sent_bytes(slots, world_size)
