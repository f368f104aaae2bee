"""The two-phase mean on real ranks, against a written-out single-process version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.collectives import oracle
from tests.support.ranks import run_ranks
from thinwire.collectives import CHUNK, Chunk, Layout, Slot, Wire
from thinwire.collectives.two_phase import Buffers, TwoPhase
from thinwire.formats import BlockScaled, Cast, Format, get, names

SLOTS = (
    Slot("uneven", (33, 47)),
    Slot("fewer than ranks", (2,)),
    Slot("scalar", ()),
    Slot("empty", (0, 4)),
    Slot("conv", (3, 5, 7, 2)),
    Slot("exact", (1024,)),
)
LONG = (Slot("long", (4 * CHUNK + 12345,)), Slot("short", (100,)))
"""Several chunks and spans per message at up to 4 ranks."""


def contribution(slot: Slot, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + slot.numel)
    return torch.randn(slot.shape, generator=generator) * (1.0 + rank)


class Run:
    """The two phases over all chunks of some slots; results as the owner's pieces arrive."""

    def __init__(self, wire: Wire, slots: tuple[Slot, ...], format: Format, inputs: list[Tensor]) -> None:
        self.wire, self.format, self.slots = wire, format, slots
        self.layout = Layout(slots, wire.world_size, format.block)
        rows = torch.zeros(wire.world_size, self.layout.length)
        for place, x in zip(self.layout.places, inputs):
            for owner in range(wire.world_size):
                part = x.reshape(-1)[owner * place.piece : owner * place.piece + place.length(owner)]
                rows[owner, place.offset : place.offset + len(part)] = part
        self.received = torch.full((wire.world_size, self.layout.length), float("nan"))

        def fill(chunk: Chunk) -> None:
            rows[:, chunk.start : chunk.stop].mul_(1.0 / wire.world_size)

        self.step = TwoPhase(wire, format, Buffers(wire.device), fill, rows, None)

    def deliver(self, chunk: Chunk, owner: int, write: Callable[[Tensor], object]) -> None:
        write(self.received[owner, chunk.start : chunk.stop])

    def all_reduce(self) -> dict[str, Tensor]:
        """Means by slot."""
        self.wire.submit([self.step.all_reduce(c, self.deliver) for c in self.layout.chunks], "all").wait()
        means = {}
        for place in self.layout.places:
            columns = self.received[:, place.offset : place.offset + place.piece]
            means[place.slot.name] = columns.reshape(-1)[: place.slot.numel].view(place.slot.shape).clone()
        return means

    def reduce_scatter(self) -> dict[str, Tensor]:
        """This rank's pieces of the sums."""
        self.wire.submit([self.step.reduce_scatter(c, self.deliver) for c in self.layout.chunks], "half").wait()
        own = self.received[self.wire.rank]
        return {
            p.slot.name: own[p.offset : p.offset + p.length(self.wire.rank)].clone() for p in self.layout.places
        }


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def bits(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: x.reshape(-1).numpy().copy() for name, x in tensors.items()}


FORMATS: tuple[Format, ...] = (
    *map(get, names()),
    BlockScaled("e4m3", block=48),
    BlockScaled("e5m2", block=16, per_span=True),
)


def agree_with_the_oracle() -> list[dict[str, Any]]:
    """Means of all formats over SLOTS and of some over LONG; raises where the oracle differs."""
    wire = Wire()
    found = []
    for slots, formats in ((SLOTS, FORMATS), (LONG, (get("fp8_e4m3"), get("fp8_e5m2_span"), FORMATS[-2]))):
        for format in formats:
            inputs = [[contribution(slot, rank) for slot in slots] for rank in range(wire.world_size)]
            means = Run(wire, slots, format, inputs[wire.rank]).all_reduce()
            for i, slot in enumerate(slots):
                expected = oracle.mean([own[i] for own in inputs], format)
                assert same_bits(means[slot.name], expected), f"{format} {slot.name}"
            found.append(bits(means))
    wire.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_mean_is_that_of_the_written_out_version_on_every_rank_bit_for_bit(world_size: int) -> None:
    first, *others = run_ranks(agree_with_the_oracle, world_size)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            for name in mine:
                assert np.array_equal(mine[name].view(np.uint8), theirs[name].view(np.uint8)), name


def reduce_by_hand() -> None:
    """fp32 is the rank-ordered sum; reduce-scatter is the first half; NaN and inf arrive; inputs are only read."""
    wire = Wire()
    rank, world_size = wire.rank, wire.world_size
    inputs = [[contribution(slot, r) for slot in SLOTS] for r in range(world_size)]

    means = Run(wire, SLOTS, get("fp32"), inputs[rank]).all_reduce()
    for i, slot in enumerate(SLOTS):
        total = inputs[0][i] * (1.0 / world_size)
        for r in range(1, world_size):
            total = total + inputs[r][i] * (1.0 / world_size)
        assert same_bits(means[slot.name], total), slot.name

    for format in FORMATS:
        halves = Run(wire, SLOTS, format, inputs[rank]).reduce_scatter()
        for i, slot in enumerate(SLOTS):
            total = oracle.sums([own[i] for own in inputs], format)[rank]
            assert same_bits(halves[slot.name], total[: len(halves[slot.name])]), f"{format} {slot.name}"

    for format in FORMATS:
        for bad in (float("nan"), float("inf"), float("-inf")):
            mine = [x.clone() for x in inputs[rank]]
            if rank == world_size - 1:
                mine[0][20, 3] = bad
            means = Run(wire, SLOTS, format, mine).all_reduce()
            assert not means["uneven"][20, 3].isfinite(), f"{format} {bad}"
            assert means["exact"].isfinite().all()
            if isinstance(format, Cast):
                assert means["uneven"].isfinite().sum() == 33 * 47 - 1
    wire.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_fp32_is_the_ordered_sum_the_scatter_is_the_first_half_and_nan_reaches_every_rank(world_size: int) -> None:
    run_ranks(reduce_by_hand, world_size)


def subgroup() -> list[float] | None:
    import torch.distributed as dist

    pair = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    wire = Wire(pair, scope="pair")
    slot = (Slot("x", (5,)),)
    mean = Run(wire, slot, get("fp32"), [torch.full((5,), float(dist.get_rank()))]).all_reduce()["x"]
    assert {row.scope for row in wire.ledger.rows()} == {"pair"}
    wire.close()
    return mean.tolist()


def test_a_wire_may_span_some_of_the_ranks() -> None:
    assert run_ranks(subgroup, 3) == [[1.0] * 5, None, [1.0] * 5]
