"""One rank of `thinwire bench collectives`: time gloo's own all-reduce and compressed ones, alternately.

Alternating makes a disturbance of the machine hit all methods alike. A call's time is that of its slowest rank.
Every result is checked: within the format's error of the float32 mean, and the same bits on all ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import formats
from thinwire.collectives import CHUNK, Slot, Wire, all_reduce_bytes
from thinwire.reducers import Quantized

BASELINE = "gloo_fp32"
TWO_ENCODINGS = 2.0  # two independent errors add to sqrt(2); the rest is margin


@dataclass(frozen=True)
class Job:
    """What all ranks measure."""

    elements: int
    repeats: int
    formats: tuple[str, ...]
    store: str
    """Path of the file through which ranks meet."""


@dataclass(frozen=True)
class Measured:
    """One method on this run: median seconds, bytes per call and rank, relative error of the result."""

    name: str
    seconds: float
    sent_bytes: int
    """By the ledger (gloo's own: by the formula of its ring)."""
    wire_bytes: int | None
    """By the interface's own counter; None on loopback, which all ranks share."""
    error: float


@dataclass(frozen=True)
class Method:
    name: str
    average: Callable[[Tensor], None]
    """Replaces a tensor by its mean over the ranks (gloo's own: by the sum)."""
    sent_bytes: Callable[[], int]
    """Bytes sent since the method was made."""
    tolerance: float


def main() -> None:
    """Run as one rank; rank 0 writes what was measured to stdout."""
    settings = json.loads(sys.argv[1])
    job = Job(**{**settings, "formats": tuple(settings["formats"])})
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=600),
    )
    rows = measure(job)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        sys.stdout.write(json.dumps([asdict(row) for row in rows]))


def measure(job: Job) -> list[Measured]:
    """Time every method `job.repeats` times, after one round that warms up and gives the exact mean.

    Each timed call follows an untimed one, as calls follow each other in training: a connection that idled
    while other methods ran would start slowly again.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    values = torch.randn(job.elements, generator=torch.Generator().manual_seed(rank))
    buffer = values.clone()
    dist.all_reduce(buffer)
    mean = buffer / world_size
    methods = [_gloo(job.elements), *(_compressed(name, values) for name in job.formats)]
    for method in methods:
        buffer.copy_(values)
        method.average(buffer)
    samples: dict[str, list[tuple[float, int | None]]] = {method.name: [] for method in methods}
    sent = {method.name: -method.sent_bytes() for method in methods}
    errors = {}
    for _ in range(job.repeats):
        for method in methods:
            buffer.copy_(values)
            method.average(buffer)
            buffer.copy_(values)
            samples[method.name].append(_timed(method, buffer))
            errors[method.name] = _check(method, buffer, mean)
    rows = []
    for method in methods:
        seconds, wire_bytes = zip(*samples[method.name])
        calls = sent[method.name] + method.sent_bytes()
        wire = None if None in wire_bytes else int(statistics.median(wire_bytes))
        rows.append(
            Measured(
                method.name, statistics.median(seconds), calls // (2 * job.repeats), wire, errors[method.name]
            )
        )
    return rows


def _gloo(elements: int) -> Method:
    sent = 0

    def average(buffer: Tensor) -> None:
        nonlocal sent
        dist.all_reduce(buffer)
        sent += all_reduce_bytes(buffer.nbytes, dist.get_world_size())

    return Method(BASELINE, average, lambda: sent, tolerance=1e-6)


def _compressed(name: str, values: Tensor) -> Method:
    wire = Wire()
    reducer = Quantized(name).bind([Slot("bench", tuple(values.shape))], wire)

    def average(buffer: Tensor) -> None:
        reducer.begin()
        reducer.all_reduce({"bench": buffer}).wait()

    sample = values[: min(len(values), CHUNK)]
    tolerance = TWO_ENCODINGS * _encoding_error(name, sample) + 1e-6
    return Method(name, average, wire.ledger.sent_bytes, tolerance)


def _encoding_error(name: str, x: Tensor) -> float:
    """Relative error of one encoding of `x`."""
    format = formats.get(name)
    x = x[: len(x) // format.block * format.block]
    spans = (len(x),)
    buffer, decoded = torch.empty(format.nbytes(spans), dtype=torch.uint8), torch.empty_like(x)
    format.encode(x, buffer, spans=spans, key=torch.tensor(0))
    format.decode(buffer, decoded, spans=spans)
    return _relative(decoded, x)


def _relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _timed(method: Method, buffer: Tensor) -> tuple[float, int | None]:
    """Seconds of the slowest rank, and bytes that left the busiest rank's interface."""
    dist.barrier()
    before = interface_bytes()
    begin = time.perf_counter()
    method.average(buffer)
    seconds = time.perf_counter() - begin
    wire_bytes = -1 if before is None else (interface_bytes() or 0) - before
    worst = torch.tensor([seconds, wire_bytes], dtype=torch.float64)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst[0]), None if before is None else int(worst[1])


def interface_bytes() -> int | None:
    """Bytes that have left the interface that gloo uses; None on loopback."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return None if name == "lo" else int(Path("/sys/class/net", name, "statistics/tx_bytes").read_text())


def _check(method: Method, buffer: Tensor, mean: Tensor) -> float:
    """The result's relative error; raises if it is too large or if the ranks hold different bits."""
    if method.name == BASELINE:
        buffer.div_(dist.get_world_size())
    error = _relative(buffer, mean)
    if not error <= method.tolerance:
        raise RuntimeError(
            f"{method.name}: relative error {error:.2e} of the mean, expected {method.tolerance:.2e}"
        )
    bits = buffer.view(torch.int32).to(torch.int64)
    low = (bits * torch.arange(1, 2 * len(bits), 2)).sum().reshape(1)  # depends on every bit and its place
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    if low.item() != high.item():
        raise RuntimeError(f"{method.name}: the ranks hold different bits")
    return error


if __name__ == "__main__":
    main()
