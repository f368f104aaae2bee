"""After: one reducer for the first reductions, then another; the count is part of the state."""

from __future__ import annotations

import pytest
import torch

from tests.reducers.gradients import gradients, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import Slot, Wire
from thinwire.reducers import After, Dense, Quantized


class Counted:
    """Which phases a reduction used."""

    def __init__(self, wire: Wire) -> None:
        self._wire, self._before = wire, {}

    def phases(self) -> set[str]:
        now = {row.phase: row.calls for row in self._wire.ledger.rows()}
        used = {phase for phase, calls in now.items() if calls > self._before.get(phase, 0)}
        self._before: dict[str, int] = now
        return used


def warmed_up() -> list[list[str]]:
    """Phases by reduction, straight and resumed after the first."""
    slots = [Slot("w", (64, 64))]
    wire = Wire()
    config = After(2, Quantized("fp8_e4m3", feedback="error"))
    bound = config.bind(slots, wire)
    counted, found = Counted(wire), []
    states = []
    for number in range(4):
        mean = reduce(bound, gradients(slots, number, wire.rank))["w"]
        expected = (Dense() if number < 2 else Quantized("fp8_e4m3")).bind(slots, wire)
        found.append(sorted(counted.phases()))
        if number < 3:  # from the second lossy reduction on there is feedback
            assert torch.equal(mean, reduce(expected, gradients(slots, number, wire.rank))["w"])
            counted.phases()
        states.append(bound.state_dict())
    for resumed_after in (1, 2, 3):
        resumed = config.bind(slots, wire)
        resumed.load_state_dict(states[resumed_after - 1])
        counted.phases()
        for number in range(resumed_after, 4):
            reduce(resumed, gradients(slots, number, wire.rank))
            assert sorted(counted.phases()) == found[number]
        assert torch.equal(resumed.state_dict()["after.residual.w"], states[-1]["after.residual.w"])
    wire.close()
    return found


def test_after_changes_the_reducer_at_its_reduction_and_remembers_where_it_was() -> None:
    dense, lossy = ["dense"], ["gather", "scatter"]
    assert run_ranks(warmed_up, 2) == [[dense, dense, lossy, lossy]] * 2


def test_after_refuses_a_negative_count() -> None:
    with pytest.raises(ValueError, match="After needs a number of reductions of at least 0, got -1"):
        After(-1, Quantized("fp8_e5m2"))
