"""The ledger: bytes counted where they leave, equal to the formulas and to what the calls really move."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire.collectives import CONTROL, Ledger, LedgerRow, Slot, Wire, all_reduce_bytes
from thinwire.formats import get
from thinwire.reducers import Dense, Quantized, Reducer, Routed

SLOTS = (
    Slot("matrix", (100, 257)),
    Slot("bias", (257,)),
    Slot("scalar", ()),
    Slot("long", (700_001,)),
    Slot("empty", (0,)),
)
REDUCERS: tuple[Reducer, ...] = (
    Dense(),
    Quantized("fp32"),
    Quantized("bf16"),
    Quantized("fp8_e4m3", feedback="error"),
    Quantized("fp8_e5m2_span"),
    Quantized("fp8_e5m2_pow2"),
    Routed(Quantized("fp8_e4m3")),
)


def test_rows_add_up_by_op_phase_and_scope() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.record("all_gather", phase="gather", scope="world", payload_bytes=10, sent_bytes=30)
    ledger.record("all_gather", phase="gather", scope="node", payload_bytes=1, sent_bytes=2)
    ledger.record("all_reduce", phase=CONTROL, scope="world", payload_bytes=8, sent_bytes=16)
    assert ledger.rows() == [
        LedgerRow("all_gather", "gather", "world", calls=3, payload_bytes=30, sent_bytes=90),
        LedgerRow("all_gather", "gather", "node", calls=1, payload_bytes=1, sent_bytes=2),
        LedgerRow("all_reduce", CONTROL, "world", calls=1, payload_bytes=8, sent_bytes=16),
    ]
    assert ledger.sent_bytes() == 92
    assert ledger.sent_bytes(control=True) == 16
    summary = ledger.summary()
    assert summary["sent_bytes"] == 92
    assert summary["control_sent_bytes"] == 16
    assert [row["calls"] for row in summary["rows"]] == [3, 1, 1]
    assert json.loads(json.dumps(summary)) == summary


@pytest.mark.parametrize(("world_size", "expected"), [(1, 0), (2, 1200), (3, 1600), (4, 1800)])
def test_a_ring_all_reduce_sends_its_bytes_twice_less_a_part(world_size: int, expected: int) -> None:
    assert all_reduce_bytes(1200, world_size) == expected


class Meter:
    """Counts what calls of torch.distributed move to other ranks."""

    def __init__(self) -> None:
        self.bytes = 0
        self._all_to_all, self._all_gather = dist.all_to_all_single, dist.all_gather_single
        self._all_reduce = dist.all_reduce

    def all_to_all(self, out: Any, send: Any, out_splits: Any, in_splits: Any, **options: Any) -> Any:
        me = dist.get_rank()
        self.bytes += sum(n for rank, n in enumerate(in_splits) if rank != me) * send.element_size()
        assert sum(in_splits) == send.numel()
        return self._all_to_all(out, send, out_splits, in_splits, **options)

    def all_gather(self, out: Any, send: Any, **options: Any) -> Any:
        assert out.numel() == send.numel() * dist.get_world_size()
        self.bytes += send.nbytes * (dist.get_world_size() - 1)
        return self._all_gather(out, send, **options)

    def all_reduce(self, tensor: Any, **options: Any) -> Any:
        self.bytes += all_reduce_bytes(tensor.nbytes, dist.get_world_size())
        return self._all_reduce(tensor, **options)

    def install(self) -> None:
        dist.all_to_all_single, dist.all_gather_single = self.all_to_all, self.all_gather
        dist.all_reduce = self.all_reduce


def counted() -> list[tuple[int, int, int]]:
    """(ledger, reducer's formula, meter) of two reductions per reducer."""
    meter = Meter()
    meter.install()
    found = []
    for reducer in REDUCERS:
        wire = Wire()
        bound = reducer.bind(SLOTS, wire)
        before = meter.bytes
        for _ in range(2):
            bound.begin()
            bound.all_reduce({slot.name: torch.ones(slot.shape) for slot in SLOTS}).wait()
        found.append(
            (wire.ledger.sent_bytes(), 2 * reducer.sent_bytes(SLOTS, wire.world_size), meter.bytes - before)
        )
        wire.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ledger_agrees_with_the_formula_of_every_reducer_and_with_the_calls_made(world_size: int) -> None:
    per_rank = run_ranks(counted, world_size)
    for rows in per_rank:
        for reducer, (ledger, formula, metered) in zip(REDUCERS, rows, strict=True):
            assert ledger == formula == metered, reducer


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [
        ("fp32", 4.0),
        ("bf16", 2.0),
        ("fp16", 2.0),
        ("fp8_e4m3", 1 + 4 / 128),
        ("fp8_e5m2_pow2", 1 + 1 / 128),
        ("fp8_e5m2_span", 1.0),
    ],
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_large_slot_costs_2_w_minus_1_over_w_times_the_bytes_of_the_format(
    name: str, bytes_per_element: float, world_size: int
) -> None:
    slots = (Slot("x", (1 << 22,)),)
    expected = 2 * (world_size - 1) / world_size * bytes_per_element * (1 << 22)
    assert Quantized(name).sent_bytes(slots, world_size) == pytest.approx(expected, rel=1e-3)
    assert get(name).nbytes((128,)) >= 128 * bytes_per_element - 4


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_one_rank_sends_nothing(reducer: Reducer) -> None:
    wire = Wire()
    bound = reducer.bind(SLOTS, wire)
    bound.begin()
    named = {slot.name: torch.full(slot.shape, 1 / 3) for slot in SLOTS}
    bound.all_reduce(named).wait()
    assert all(bool((x == torch.tensor(1 / 3)).all()) for x in named.values())
    assert wire.ledger.rows() == []
    assert reducer.sent_bytes(SLOTS, 1) == 0


def control_traffic() -> tuple[float, list[list[float]], int, int, list[str]]:
    wire = Wire()
    total = wire.control_all_reduce(torch.tensor([float(wire.rank + 1)]))
    stacked = wire.control_all_gather(torch.tensor([float(wire.rank), 7.0]))
    phases = [row.phase for row in wire.ledger.rows()]
    return total.item(), stacked.tolist(), wire.ledger.sent_bytes(), wire.ledger.sent_bytes(control=True), phases


def test_control_traffic_is_counted_apart() -> None:
    for result in run_ranks(control_traffic, 3):
        expected = all_reduce_bytes(4, 3) + 2 * 8
        assert result == (6.0, [[0, 7], [1, 7], [2, 7]], 0, expected, [CONTROL, CONTROL])
