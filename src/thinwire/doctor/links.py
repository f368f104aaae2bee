"""How fast two ranks talk: latency by ping-pong, bandwidth by one message that is long enough to measure.

    latency   = round trip of one byte / 2                       median of many
    bandwidth = bytes / (time until the receiver confirms - latency)

The message doubles until it takes a fifth of a second, so a wire of 10 Mbit/s and one of 10 Gbit/s are both
measured in about a second. Pairs are measured one after another, so they do not share the wire.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

PINGS = 100
ENOUGH_SECONDS = 0.2
FIRST_BYTES = 1 << 16
LAST_BYTES = 1 << 28
ALL_PAIRS_UP_TO = 6  # ranks; beyond that only neighbours in a ring are measured


@dataclass(frozen=True)
class Link:
    source: int
    target: int
    latency_us: float
    bandwidth_mbit: float


def measure_links() -> list[dict[str, Any]]:
    """Measure the links between the ranks of the default group, a gloo group; every rank gets the same list."""
    world = dist.get_world_size()
    if world <= ALL_PAIRS_UP_TO:
        pairs = list(itertools.permutations(range(world), 2))
    else:
        pairs = [(rank, (rank + 1) % world) for rank in range(world)]
    own = []
    for source, target in pairs:
        if dist.get_rank() == source:
            own.append(asdict(_measure(source, target)))
        elif dist.get_rank() == target:
            _answer(source)
        dist.barrier()
    gathered: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    dist.all_gather_object(gathered, own)
    return [link for rank_links in gathered for link in rank_links]


def _measure(source: int, target: int) -> Link:
    byte = torch.zeros(1, dtype=torch.uint8)
    round_trips = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        dist.send(byte, target)
        dist.recv(byte, target)
        round_trips.append(time.perf_counter() - begin)
    latency = statistics.median(round_trips) / 2
    nbytes, seconds = FIRST_BYTES, 0.0
    while True:
        message = torch.zeros(nbytes, dtype=torch.uint8)
        _announce(nbytes, target)
        begin = time.perf_counter()
        dist.send(message, target)
        dist.recv(byte, target)
        seconds = time.perf_counter() - begin
        if seconds >= ENOUGH_SECONDS or nbytes >= LAST_BYTES:
            break
        nbytes *= 2
    _announce(0, target)
    return Link(source, target, latency * 1e6, nbytes * 8 / max(seconds - latency, 1e-9) / 1e6)


def _answer(source: int) -> None:
    byte = torch.zeros(1, dtype=torch.uint8)
    for _ in range(PINGS):
        dist.recv(byte, source)
        dist.send(byte, source)
    while nbytes := _announced(source):
        dist.recv(torch.empty(nbytes, dtype=torch.uint8), source)
        dist.send(byte, source)


def _announce(nbytes: int, target: int) -> None:
    dist.send(torch.tensor([nbytes]), target)


def _announced(source: int) -> int:
    nbytes = torch.zeros(1, dtype=torch.int64)
    dist.recv(nbytes, source)
    return int(nbytes.item())
