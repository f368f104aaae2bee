"""One worker that issues every collective of a link, in one order, with encoding and sending overlapped.

A *task* is a generator: it computes, starts a collective, and yields it as `Pending`; when that is done the
task goes on. A *job* is a list of tasks (the chunks of one call) with a future. The worker starts tasks in
the order they were submitted and continues them in that order within each lane, so on each process group
collectives are issued in the same order on all ranks, whatever the timing. (Two asynchronous collectives
issued in opposite order on two ranks return wrong sums without an error.) While some chunks travel, others
are encoded or decoded.

On the CPU the worker is a thread. On CUDA tasks run in the calling thread on a side stream: there a wait
only orders streams, and the future carries the event.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.futures import Future

DEPTH = {"scatter": 4, "gather": 8, "dense": 4}
"""Collectives outstanding per lane, tuned with `thinwire bench collectives --rate 200mbit`."""

EXIT_SECONDS = 5.0
"""How long a program that ends waits for collectives under way."""


@dataclass(frozen=True)
class Pending:
    """A collective under way."""

    lane: str
    op: str
    work: dist.Work


Task: TypeAlias = Generator[Pending, None, None]


class Explain(Protocol):
    """Makes the error that callers see of a failed collective."""

    def __call__(self, op: str, label: str, error: Exception) -> Exception: ...


@dataclass
class Job:
    """The tasks of one call."""

    label: str
    tasks: Sequence[Task]
    future: Future[None]
    on_done: Callable[[], None]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = len(self.tasks)


@dataclass
class _Flight:
    job: Job
    task: Task
    pending: Pending


class Pipeline:
    """Runs jobs; `busy_seconds` is the time spent computing (encode, decode, copy), waits excluded, and
    `sending_seconds` that in which any collective was under way."""

    def __init__(self, device: torch.device, explain: Explain) -> None:
        self.busy_seconds = 0.0
        self.sending_seconds = 0.0
        self._sending_since: float | None = None
        self.error: Exception | None = None
        """What broke the wire, here or in its control traffic; every later job fails with it."""
        self._explain = explain
        self._device = device
        self._waiting: deque[tuple[Job, Task]] = deque()  # submitted tasks not yet started
        self._lanes: dict[str, deque[_Flight]] = {lane: deque() for lane in DEPTH}
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._result: torch.Tensor | None = None  # of every future: a future takes its events from its value
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._result = torch.empty(0, device=device)

    def submit(self, tasks: Sequence[Task], label: str, on_done: Callable[[], None]) -> Future[None]:
        """Queue a job; `on_done` runs on the worker when all its tasks are done, just before its future."""
        if self.error is not None:
            raise self.error
        future: Future[None] = Future(devices=[self._device] if self._stream is not None else [])
        job = Job(label, tasks, future, on_done)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._accept(job)
                while self._step():
                    pass
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="thinwire", daemon=True)
            self._thread.start()
            atexit.register(self._leave)
        self._inbox.put(job)
        return future

    def lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """On CUDA, keep a tensor of the caller's stream in memory until the worker's stream is done with it."""
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor

    def close(self) -> None:
        """Finish what is queued and end the worker."""
        thread = self._thread
        self.release()
        if thread is not None:
            thread.join()

    def release(self) -> None:
        """Let the worker end once it has finished what is queued, without waiting for that."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread = None
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """At the end of a program, perhaps by an exception in a backward pass: let what is under way arrive.
        (A thread that wakes up inside a collective while the interpreter goes away aborts the process.)"""
        thread = self._thread
        self.release()
        if thread is not None:
            thread.join(EXIT_SECONDS)

    def _main(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            idle = not self._in_flight()
            with contextlib.suppress(queue.Empty):
                while True:
                    job = self._inbox.get(block=idle)
                    if job is None:
                        while self._step():
                            pass
                        return
                    self._accept(job)
                    del job  # an idle worker keeps no tensors alive
                    idle = False
            self._step()

    def _accept(self, job: Job) -> None:
        if self.error is not None:
            job.future.set_exception(self.error)  # type: ignore[arg-type]  # torch annotates T
        elif not job.tasks:
            self._finish(job)
        else:
            self._waiting.extend((job, task) for task in job.tasks)

    def _in_flight(self) -> bool:
        return bool(self._waiting) or any(self._lanes.values())

    def _step(self) -> bool:
        """Do the next thing: continue a finished collective, start a task, or wait. False when idle."""
        for lane, flights in self._lanes.items():
            if flights and self._room_after(lane) and flights[0].pending.work.is_completed():
                self._continue(flights.popleft())
                return True
        if self._waiting and all(len(self._lanes[lane]) < DEPTH[lane] for lane in ("scatter", "dense")):
            job, task = self._waiting.popleft()
            self._advance(job, task)
            return True
        for lane in ("scatter", "dense", "gather"):
            if self._lanes[lane] and self._room_after(lane):
                self._continue(self._lanes[lane].popleft())
                return True
        return False

    def _room_after(self, lane: str) -> bool:
        return lane != "scatter" or len(self._lanes["gather"]) < DEPTH["gather"]

    def _continue(self, flight: _Flight) -> None:
        try:
            flight.pending.work.wait()
        except RuntimeError as error:
            self._fail(self._explain(flight.pending.op, flight.job.label, error), flight.job)
            return
        if self._sending_since is not None and not any(self._lanes.values()):
            self.sending_seconds += time.perf_counter() - self._sending_since
            self._sending_since = None
        self._advance(flight.job, flight.task)

    def _advance(self, job: Job, task: Task) -> None:
        begin = time.perf_counter()
        try:
            pending = next(task)
        except StopIteration:
            job.left -= 1
            if job.left == 0:
                self._finish(job)
        except Exception as error:  # whatever it is, the caller must see it: here it would only end a thread
            self._fail(self._explain("encode or send", job.label, error), job)
        else:
            self._lanes[pending.lane].append(_Flight(job, task, pending))
            if self._sending_since is None:
                self._sending_since = time.perf_counter()
        self.busy_seconds += time.perf_counter() - begin

    def _finish(self, job: Job) -> None:
        try:
            job.on_done()
        except Exception as error:  # as in _advance
            self._fail(self._explain("writing the result", job.label, error), job)
        else:
            job.future.set_result(self._result)  # type: ignore[arg-type]  # callers see a Future[None]

    def _fail(self, error: Exception, failed: Job) -> None:
        """Nothing after a failed collective can be trusted: fail every outstanding job."""
        self.error = error
        jobs = {id(failed): failed}
        for flights in self._lanes.values():
            jobs.update({id(flight.job): flight.job for flight in flights})
            flights.clear()
        jobs.update({id(job): job for job, _ in self._waiting})
        self._waiting.clear()
        for job in jobs.values():
            job.future.set_exception(error)  # type: ignore[arg-type]  # torch annotates T
