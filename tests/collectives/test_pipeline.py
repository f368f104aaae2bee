"""The pipeline: one order on every lane, whatever the timing, and an error that reaches everybody."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.futures import Future

from tests.support.ranks import run_ranks
from thinwire.collectives import Wire
from thinwire.collectives.pipeline import DEPTH, Pending, Pipeline, Task


class FakeWork:
    """A collective that takes its time, or fails."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self._done_at = time.monotonic() + seconds
        self._error = error

    def is_completed(self) -> bool:
        return time.monotonic() >= self._done_at

    def wait(self) -> None:
        time.sleep(max(0.0, self._done_at - time.monotonic()))
        if self._error is not None:
            raise self._error


class Journal:
    """What was issued on which lane, and how many collectives were under way at most."""

    def __init__(self, seed: int) -> None:
        self.issued: dict[str, list[object]] = {lane: [] for lane in DEPTH}
        self.most = dict.fromkeys(DEPTH, 0)
        self._under_way = dict.fromkeys(DEPTH, 0)
        self._random = random.Random(seed)

    def nap(self) -> None:
        time.sleep(self._random.random() * 0.002)

    def collective(self, lane: str, tag: object, error: Exception | None = None) -> Iterator[Pending]:
        self.issued[lane].append(tag)
        self._under_way[lane] += 1
        self.most[lane] = max(self.most[lane], self._under_way[lane])
        work: Any = FakeWork(self._random.random() * 0.004, error)
        yield Pending(lane, f"{lane} op", work)
        self._under_way[lane] -= 1

    def two_phases(self, tag: object) -> Task:
        self.nap()
        yield from self.collective("scatter", tag)
        self.nap()
        yield from self.collective("gather", tag)

    def dense(self, tag: object) -> Task:
        self.nap()
        yield from self.collective("dense", tag)

    def failing(self, lane: str) -> Task:
        yield from self.collective(lane, "failing", RuntimeError("Connection closed by peer"))


def pipeline() -> Pipeline:
    return Pipeline(torch.device("cpu"), lambda op, label, error: RuntimeError(f"{op} of {label}: {error}"))


def submit(pipe: Pipeline, tasks: list[Task], label: str = "job") -> Future[None]:
    return pipe.submit(tasks, label, lambda: None)


def wait(future: Future[None], seconds: float = 20.0) -> None:
    """Future.wait with an end, so that a lost future fails the test and does not hang it."""
    deadline = time.monotonic() + seconds
    while not future.done():
        assert time.monotonic() < deadline, "the future was never completed"
        time.sleep(0.001)
    future.wait()


@pytest.mark.parametrize("seed", range(3))
def test_collectives_are_issued_in_the_order_of_submission_on_every_lane(seed: int) -> None:
    journal, pipe = Journal(seed), pipeline()
    futures = []
    for job in range(12):
        kind = journal.dense if job % 3 == 1 else journal.two_phases
        futures.append(submit(pipe, [kind((job, chunk)) for chunk in range(1 + job % 4)]))
    for future in futures:
        wait(future)
    pipe.close()
    for lane, issued in journal.issued.items():
        assert issued == sorted(issued), lane
    assert journal.issued["scatter"] == journal.issued["gather"]


def test_no_more_collectives_than_the_depth_of_a_lane_are_under_way_and_more_than_one() -> None:
    journal, pipe = Journal(0), pipeline()
    wait(submit(pipe, [journal.two_phases(i) for i in range(60)] + [journal.dense(i) for i in range(20)]))
    pipe.close()
    for lane, most in journal.most.items():
        assert 1 < most <= DEPTH[lane], lane


def test_a_job_without_tasks_is_done() -> None:
    pipe = pipeline()
    wait(submit(pipe, []))
    pipe.close()


def test_closing_finishes_what_is_queued() -> None:
    journal, pipe = Journal(1), pipeline()
    futures = [submit(pipe, [journal.two_phases((i, 0))]) for i in range(10)]
    pipe.close()
    assert all(future.done() for future in futures)
    assert len(journal.issued["gather"]) == 10


def test_on_done_runs_before_the_future_and_once() -> None:
    journal, pipe = Journal(2), pipeline()
    seen: list[bool] = []
    futures: list[Future[None]] = []
    futures.append(
        pipe.submit([journal.two_phases(i) for i in range(5)], "job", lambda: seen.append(futures[0].done()))
    )
    wait(futures[0])
    pipe.close()
    assert seen == [False]


@pytest.mark.parametrize("lane", DEPTH)
def test_a_failed_collective_reaches_every_outstanding_future_and_refuses_later_jobs(lane: str) -> None:
    journal, pipe = Journal(3), pipeline()
    before = submit(pipe, [journal.two_phases(0)])
    wait(before)
    futures = [submit(pipe, [journal.failing(lane)], "'weight'")]
    futures += [submit(pipe, [journal.two_phases(i), journal.dense(i)], "later") for i in range(8)]
    for future in futures:
        with pytest.raises(RuntimeError, match=f"{lane} op of 'weight': Connection closed by peer"):
            wait(future)
    with pytest.raises(RuntimeError, match="of 'weight': Connection closed by peer"):
        submit(pipe, [journal.dense(0)])
    assert before.wait() is None  # type: ignore[func-returns-value]
    pipe.close()


def raising() -> Task:
    raise ValueError("no such luck")
    yield


def test_an_error_in_a_task_reaches_every_outstanding_future() -> None:
    journal, pipe = Journal(4), pipeline()
    futures = [submit(pipe, [journal.two_phases(0), raising(), journal.two_phases(1)], "'weight'")]
    futures += [submit(pipe, [journal.two_phases(i)]) for i in range(3)]
    for future in futures:
        with pytest.raises(RuntimeError, match="of 'weight': no such luck"):
            wait(future)
    pipe.close()


def test_an_error_in_on_done_reaches_the_future() -> None:
    """It must not end the worker silently: the caller would wait forever."""
    journal, pipe = Journal(5), pipeline()

    def on_done() -> None:
        raise ValueError("no room for the result")

    with pytest.raises(RuntimeError, match="of 'weight': no room for the result"):
        wait(pipe.submit([journal.dense(0)], "'weight'", on_done))
    pipe.close()


def test_callbacks_of_futures_may_submit_more() -> None:
    journal, pipe = Journal(6), pipeline()
    second: list[Future[None]] = []
    submitted = threading.Event()

    def submit_second(_: Future[None]) -> None:
        second.append(submit(pipe, [journal.two_phases((1, 0))]))
        submitted.set()

    submit(pipe, [journal.two_phases((0, 0))]).add_done_callback(submit_second)
    assert submitted.wait(20)
    wait(second[0])
    pipe.close()


def exchange(jobs: int) -> dict[str, Any]:
    """On a real wire: each rank dawdles in its own way; every collective must meet its like."""
    wire = Wire()
    rank, world_size = wire.rank, wire.world_size
    naps = random.Random(rank)
    issued: dict[str, list[int]] = {lane: [] for lane in DEPTH}
    wrong: list[str] = []
    for lane in DEPTH:
        wire.phase(lane)

    def two_phases(tag: int) -> Task:
        size = 64 + 8 * (tag % 5)
        send = torch.full((world_size - 1, size), tag % 251, dtype=torch.uint8)
        received = torch.zeros_like(send)
        time.sleep(naps.random() * 0.003)
        issued["scatter"].append(tag)
        yield wire.all_to_all(received, send)
        if not bool((received == tag % 251).all()):
            wrong.append(f"all_to_all {tag}")
        time.sleep(naps.random() * 0.003)
        own = torch.full((size,), (tag + rank) % 251, dtype=torch.uint8)
        gathered = torch.zeros(world_size, size, dtype=torch.uint8)
        issued["gather"].append(tag)
        yield wire.all_gather(gathered, own)
        if gathered[:, 0].tolist() != [(tag + r) % 251 for r in range(world_size)]:
            wrong.append(f"all_gather {tag}")

    def dense(tag: int) -> Task:
        time.sleep(naps.random() * 0.003)
        tensor = torch.full((16 + tag % 7,), float(tag * (rank + 1)))
        issued["dense"].append(tag)
        yield wire.all_reduce(tensor)
        if not bool((tensor == tag * sum(range(1, world_size + 1))).all()):
            wrong.append(f"all_reduce {tag}")

    futures = []
    for job in range(jobs):
        time.sleep(naps.random() * 0.002)
        first = job * 10
        futures.append(
            wire.submit(
                [dense(first)] if job % 4 == 3 else [two_phases(first + k) for k in range(1 + job % 3)], "job"
            )
        )
    for future in futures:
        future.wait()
    for lane in ("scatter", "gather", "dense"):
        dist.barrier()
        assert issued[lane] == sorted(issued[lane])
    wire.close()
    return {"issued": issued, "wrong": wrong}


def test_ranks_that_dawdle_differently_issue_in_one_order_and_no_collectives_are_mixed_up() -> None:
    results = run_ranks(exchange, 3, 40)
    assert [result["wrong"] for result in results] == [[], [], []]
    assert results[0]["issued"] == results[1]["issued"] == results[2]["issued"]
    assert len(results[0]["issued"]["scatter"]) > 40
