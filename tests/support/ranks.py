"""Run a function on several real gloo ranks, forked from a warm parent.

Importing torch costs a process some seconds. A fork server imports it once, never runs a backward pass
itself (a process that has run one breaks its forked children), and forks every rank from there.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.tensor", "tests.support.warm"])


class RankFailed(AssertionError):
    """One rank raised or died; the message holds its traceback or exit code."""


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, check: bool = True
) -> list[Any]:
    """Call `function(*args)` on `world_size` gloo ranks and return what each returned, in rank order.

    Inside it the default process group is up, with a 30 s timeout and one torch thread. `function` must be
    importable (module level). With `check=False` a rank that raised returns its exception's text as
    `RankFailed`, one that died its exit code as `RankFailed`, and nothing is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        ranks = []
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank_main, args=(function, args, rank, world_size, str(Path(folder, "store")), sender)
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            ranks.append(process)
        results = _collect(pipes, ranks, timeout)
    if check:
        failures = [f"rank {r}: {x}" for r, x in enumerate(results) if isinstance(x, RankFailed)]
        if failures:
            raise RankFailed("\n".join(failures))
    return results


def _collect(pipes: list[Connection], ranks: list[Any], timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    results: list[Any] = [None] * len(ranks)
    open_pipes = dict(zip(pipes, range(len(ranks))))
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in open_pipes.values():
                results[rank] = RankFailed(f"no result after {timeout} s")
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[index]
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr]
                results[rank] = value if ok else RankFailed(value)
            except EOFError:
                ranks[rank].join(5)
                results[rank] = RankFailed(f"died with exit code {ranks[rank].exitcode}")
    for process in ranks:
        process.join(max(0.1, min(5.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    return results


def _rank_main(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, store: str, sender: Connection
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=30)
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        sender.send((True, value))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    finally:
        sender.close()
