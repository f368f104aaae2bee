"""A rank that dies or hangs: the others stop with an error that names it, the op and the slots."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, run_ranks
from thinwire.collectives import CollectiveError, Slot, Wire
from thinwire.collectives.failures import describe
from thinwire.collectives.wire import abort_nccl
from thinwire.reducers import BoundReducer, Dense, Quantized, Reducer, Routed

SLOTS = (Slot("layers.0.weight", (300, 300)), Slot("layers.0.bias", (300,)))
QUANTIZED = Quantized("fp8_e5m2", feedback="error")


def another_reduction(bound: BoundReducer) -> None:
    bound.begin()
    bound.all_reduce({"layers.0.bias": torch.ones(300)})


def lose_rank_1(reducer: Reducer, how: int, timeout: float) -> None:
    """Two good reductions; then rank 1 gets a signal instead of reducing a third time."""
    wire = Wire(timeout=timedelta(seconds=timeout))
    bound = reducer.bind(SLOTS, wire)
    pids = wire.control_all_gather(torch.tensor([os.getpid()]))[:, 0].tolist()
    for step in range(3):
        if step == 2 and wire.rank == 1:
            os.kill(os.getpid(), how)
        bound.begin()
        future = bound.all_reduce({slot.name: torch.ones(slot.shape) for slot in SLOTS})
        try:
            future.wait()
        except Exception as error:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pids[1]), signal.SIGKILL)  # or a stopped process would outlast the test
            with pytest.raises(CollectiveError, match="no answer from rank 1"):
                another_reduction(bound)
            raise AssertionError(f"{type(error).__name__}|{error}") from None


def survivors(results: list[Any]) -> list[str]:
    assert all(isinstance(result, RankFailed) for result in results)
    return [
        re.findall(r"AssertionError: (.*)", str(result))[-1] for rank, result in enumerate(results) if rank != 1
    ]


@pytest.mark.parametrize(
    ("reducer", "ops"),
    [(QUANTIZED, "all_to_all|all_gather"), (Dense(), "all_reduce"), (Routed(QUANTIZED), "all_to_all|all_reduce")],
    ids=["quantized", "dense", "routed"],
)
def test_a_killed_rank_is_named_by_all_others(reducer: Reducer, ops: str) -> None:
    results = run_ranks(lose_rank_1, 3, reducer, signal.SIGKILL, 20.0, timeout=30, check=False)
    assert "died with exit code -9" in str(results[1])
    for rank, message in zip((0, 2), survivors(results)):
        assert re.match(
            rf"CollectiveError\|rank {rank}: ({ops}) of 'layers.0.(weight|bias)'( and 1 more)? failed; "
            "no answer from rank 1: .*(closed|reset|refused|read|pipe)",
            message,
            re.IGNORECASE,
        ), message


def test_a_stopped_rank_is_named_by_all_others_once_the_timeout_is_over() -> None:
    results = run_ranks(lose_rank_1, 3, QUANTIZED, signal.SIGSTOP, 2.0, timeout=25, check=False)
    for rank, message in zip((0, 2), survivors(results)):
        assert re.match(
            rf"CollectiveError\|rank {rank}: all_to_all of 'layers.0.weight' and 1 more failed; "
            "no answer from rank 1: ",
            message,
        ), message


def control_without_rank_1() -> None:
    wire = Wire(timeout=timedelta(seconds=20))
    if wire.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        wire.control_all_reduce(torch.ones(1))
    except CollectiveError as error:
        raise AssertionError(f"{type(error).__name__}|{error}") from None


def test_control_traffic_names_the_dead_rank_too() -> None:
    results = run_ranks(control_without_rank_1, 2, timeout=30, check=False)
    (message,) = survivors(results)
    assert re.match(
        r"CollectiveError\|rank 0: all_reduce of control values failed; no answer from rank 1: ", message
    ), message


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_where_the_process_group_is_destroyed_the_failure_is_told_without_asking_who_is_alive() -> None:
    line = describe("all_reduce failed", RuntimeError("no group"), rank=0, ranks=[0, 1], group_name="gone")
    assert line == "rank 0: all_reduce failed: no group"


class StandInGroup:
    """A process group of a backend that cannot run here."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.aborted = False

    def _get_backend(self, device: torch.device) -> StandInGroup:
        return self

    def name(self) -> str:
        return self.backend

    def abort(self) -> None:
        self.aborted = True


def test_what_fails_on_nccl_is_aborted_or_peers_would_wait_for_ever() -> None:
    groups: list[Any] = [StandInGroup("nccl"), StandInGroup("gloo"), StandInGroup("nccl")]
    abort_nccl(groups, torch.device("cuda"))
    assert [group.aborted for group in groups] == [True, False, True]


def wires_of_two_timeouts() -> tuple[float, float]:
    from thinwire.collectives.wire import _group_timeout

    def seconds(wire: Wire) -> float:
        return _group_timeout(wire.phase("scatter"), wire.device).total_seconds()

    return seconds(Wire()), seconds(Wire(timeout=timedelta(seconds=7)))


def test_the_timeout_of_a_wire_is_that_of_its_group_unless_given() -> None:
    assert run_ranks(wires_of_two_timeouts, 2) == [(30.0, 7.0)] * 2
    assert dist.is_available()
