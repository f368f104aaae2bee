"""`thinwire bench peers`: local updates of thinwire beside those of torch, accelerate and torchft.

Each library trains the same model on the same data, one after the other in processes of their own: the seconds of
a round beyond its steps, the memory beyond that of training alone, and how far its weights end from thinwire's.
Pier, which no other has, stands beside itself with its two ways to save memory. What is not installed is left
out; `pip install accelerate torchft` gets both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import thinwire as tw
from thinwire.bench.network import MAX_RANKS
from thinwire.bench.processes import RankFailed, run_processes
from thinwire.local_update import Method
from thinwire.usage import Parser, whole_number

OWN, ALONE = "thinwire", "alone"
LR, MOMENTUM = 0.01, 0.9
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
FRAGMENTS, DELAY, MERGE = 2, 1, 0.5
LAYERS, BATCH = 8, 8


@dataclass(frozen=True)
class Job:
    """What all ranks do."""

    method: str
    library: str
    width: int
    """Of the square matrices, LAYERS of them."""
    every: int
    rounds: int
    folder: str
    """Where rank 0 leaves its weights, and ranks meet."""


@dataclass(frozen=True)
class Row:
    """One method as one library has it."""

    method: str
    library: str
    round_seconds: float
    """Median over rounds, their steps included."""
    seconds_beyond_steps: float
    """The same without what the steps take alone."""
    memory_bytes: int
    """Peak resident memory of a rank beyond that of training alone."""
    difference: float
    """Largest difference of a weight from thinwire's, relative to the largest weight."""


class Trained(NamedTuple):
    round_seconds: float
    peak_memory: int


class Loop(NamedTuple):
    """What a training loop calls."""

    model: nn.Module
    optimizer: Any
    after_step: Callable[[], object]


def main(argv: list[str]) -> int:
    """Train with every library, compare, print; returns the exit code."""
    arguments = _parse(argv)
    try:
        rows = measure(arguments)
    except RankFailed as error:
        print(f"thinwire bench peers: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        keys = ("ranks", "every", "rounds", "repeats")
        settings = {**{key: getattr(arguments, key) for key in keys}, "parameters": LAYERS * arguments.width**2}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 0


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Rows of what is installed; libraries alternate, so that a disturbance of the machine hits all alike."""
    chosen = [pair for pair in LOOPS if pair[0] in arguments.methods and _installed(pair[1])]
    runs: dict[tuple[str, str], list[Trained]] = {}
    ends: dict[tuple[str, str], Tensor] = {}
    for _ in range(arguments.repeats):
        for pair in [(ALONE, ALONE), *chosen]:
            with tempfile.TemporaryDirectory(prefix="thinwire-bench-") as folder:
                job = Job(*pair, arguments.width, arguments.every, arguments.rounds, folder)
                print(f"running {job.method} of {job.library}", file=sys.stderr, flush=True)
                runs.setdefault(pair, []).append(_run(job, arguments.ranks))
                ends[pair] = torch.load(Path(folder, "weights"), weights_only=True)
    alone = runs[ALONE, ALONE]
    rows = []
    for method, library in chosen:
        own, reference = ends[method, library], ends[method, OWN]
        rows.append(
            Row(
                method,
                library,
                statistics.median(run.round_seconds for run in runs[method, library]),
                statistics.median(
                    run.round_seconds - base.round_seconds for run, base in zip(runs[method, library], alone)
                ),
                int(
                    statistics.median(
                        run.peak_memory - base.peak_memory for run, base in zip(runs[method, library], alone)
                    )
                ),
                float((own - reference).abs().max() / reference.abs().max()),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'method':17} {'library':17} {'s/round':>8} {'beyond steps':>12} {'memory':>9} {'difference':>10}"]
    for row in rows:
        lines.append(
            f"{row.method:17} {row.library:17} {row.round_seconds:8.3f} {row.seconds_beyond_steps:12.3f} "
            f"{row.memory_bytes / 1e6:6.0f} MB {row.difference:10.1e}"
        )
    return "\n".join(lines)


def _installed(library: str) -> bool:
    name = library.partition(",")[0]
    return name in (OWN, "torch") or find_spec(name) is not None


def _run(job: Job, ranks: int) -> Trained:
    command = [sys.executable, "-m", "thinwire.bench.peers", json.dumps(asdict(job))]
    settings = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate looks whether they are there
    environments = [
        {**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]
    outputs = run_processes([command] * ranks, environments, timeout=600)
    return Trained(*json.loads(outputs[0].splitlines()[-1]))


# -- one rank --------------------------------------------------------------------------------------------


def rank_main() -> None:
    """Run as one rank; rank 0 writes what it measured to stdout."""
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    weights, trained = train(job)
    dist.barrier()
    if rank == 0:
        torch.save(weights, Path(job.folder, "weights"))
        sys.stdout.write(f"\n{json.dumps(trained)}\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # torchft's servers are in no hurry


def train(job: Job) -> tuple[Tensor, Trained]:
    """The weights after `job.rounds` rounds, flat, and what the rounds took. Every rank calls this."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(job.width, job.width, bias=False) for _ in range(LAYERS)))
    optimizer = SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    generator = torch.Generator().manual_seed(1 + rank)
    seconds = []
    with LOOPS.get((job.method, job.library), _alone)(model, optimizer, job) as loop:
        for _ in range(job.rounds):
            begin = time.perf_counter()
            for _ in range(job.every):
                x = torch.randn(BATCH, job.width, generator=generator)  # (batch, width)
                (loop.model(x) - x).square().mean().backward()
                loop.optimizer.step()
                loop.after_step()  # torch's averager leaves out what has no gradient
                loop.optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return weights, Trained(statistics.median(seconds[1:] or seconds), peak)


# -- the libraries' loops --------------------------------------------------------------------------------


@contextmanager
def _alone(model: nn.Module, optimizer: Optimizer, job: Job) -> Iterator[Loop]:
    yield Loop(model, optimizer, lambda: None)


@contextmanager
def _thinwire(method: Callable[[Job], Method], model: nn.Module, optimizer: Optimizer, job: Job) -> Iterator[Loop]:
    ddp = isinstance(method(job), tw.PostLocalSGD)
    module = DistributedDataParallel(model) if ddp else model
    sync = tw.local_update(module, optimizer, method(job), total_steps=job.every * job.rounds)
    yield Loop(module, optimizer, sync.step)
    sync.close()


@contextmanager
def _periodic_averager(model: nn.Module, optimizer: Optimizer, job: Job) -> Iterator[Loop]:
    # It averages before it counts: a round ends after its `every`-th call.
    averager = PeriodicModelAverager(period=job.every, warmup_steps=job.every - 1)
    yield Loop(model, optimizer, lambda: averager.average_parameters(model.parameters()))


@contextmanager
def _post_local_hook(model: nn.Module, optimizer: Optimizer, job: Job) -> Iterator[Loop]:
    start = _start(job)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(PostLocalSGDState(None, alone, start), post_localSGD_hook)
    averager = PeriodicModelAverager(period=job.every, warmup_steps=start - 1)
    yield Loop(ddp, optimizer, lambda: averager.average_parameters(model.parameters()))


@contextmanager
def _accelerate(model: nn.Module, optimizer: Optimizer, job: Job) -> Iterator[Loop]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    with LocalSGD(accelerator=accelerator, model=prepared, local_sgd_steps=job.every) as local_sgd:
        yield Loop(prepared, prepared_optimizer, local_sgd.step)


@contextmanager
def _torchft(fragments: int, model: nn.Module, optimizer: Optimizer, job: Job) -> Iterator[Loop]:
    """`fragments`: 0 for local SGD."""
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo, LocalSGD

    with _torchft_manager(Manager, ProcessGroupGloo, model, job) as manager:
        parts: list[nn.Module] = [
            nn.Sequential(*list(model)[LAYERS * i // fragments : LAYERS * (i + 1) // fragments])  # type: ignore[call-overload]
            for i in range(fragments)
        ]
        outer = [SGD(part.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True) for part in parts]
        streaming = {"fragment_sync_delay": DELAY, "fragment_update_alpha": MERGE} if fragments > 1 else {}
        local: AbstractContextManager[Any] = (
            DiLoCo(manager, parts, optimizer, outer, sync_every=job.every, **streaming)
            if fragments
            else LocalSGD(manager, model, optimizer, sync_every=job.every)
        )
        with local:
            yield Loop(model, optimizer, lambda: None)  # its hooks on the optimizer count


@contextmanager
def _torchft_manager(manager: Any, group: Any, model: nn.Module, job: Job) -> Iterator[Any]:
    """Every rank a replica group of its own; rank 0 has the lighthouse."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    address = [None]
    lighthouse = None
    if rank == 0:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=world_size)
        address = [lighthouse.address().rpartition(":")[2]]
    dist.broadcast_object_list(address)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = manager(
        pg=group(timeout=timedelta(seconds=60)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=world_size,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{address[0]}",
        hostname="127.0.0.1",
        replica_id=f"rank{rank}",
        init_sync=False,  # all replicas start alike; else only the first one's first round would count
    )
    yield made
    dist.barrier()
    made.shutdown(wait=False)


def _start(job: Job) -> int:
    """Of post-local SGD: data parallelism for half of the rounds."""
    return job.rounds // 2 * job.every


def _local_sgd(job: Job) -> Method:
    return tw.LocalSGD(every=job.every)


def _post_local_sgd(job: Job) -> Method:
    return tw.PostLocalSGD(start=_start(job), every=job.every)


def _diloco(job: Job) -> Method:
    return tw.DiLoCo(every=job.every, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM)


def _streaming(job: Job) -> Method:
    return tw.StreamingDiLoCo(
        every=job.every,
        fragments=FRAGMENTS,
        order="sequential",
        delay=DELAY,
        merge=MERGE,
        outer_lr=OUTER_LR,
        outer_momentum=OUTER_MOMENTUM,
        reducer=tw.Dense(),
    )


def _pier(**options: Any) -> Callable[[Job], Method]:
    """All ranks in one group, which may share anchors and outer momentum."""
    return lambda job: tw.Pier(every=job.every, groups=1, **options)


LOOPS: Mapping[tuple[str, str], Callable[[nn.Module, Optimizer, Job], AbstractContextManager[Loop]]] = {
    ("local-sgd", OWN): partial(_thinwire, _local_sgd),
    ("local-sgd", "torch"): _periodic_averager,
    ("local-sgd", "accelerate"): _accelerate,
    ("local-sgd", "torchft"): partial(_torchft, 0),
    ("post-local-sgd", OWN): partial(_thinwire, _post_local_sgd),
    ("post-local-sgd", "torch"): _post_local_hook,
    ("diloco", OWN): partial(_thinwire, _diloco),
    ("diloco", "torchft"): partial(_torchft, 1),
    ("streaming-diloco", OWN): partial(_thinwire, _streaming),
    ("streaming-diloco", "torchft"): partial(_torchft, FRAGMENTS),
    ("pier", OWN): partial(_thinwire, _pier()),
    ("pier", f"{OWN}, offload"): partial(_thinwire, _pier(offload=True)),
    ("pier", f"{OWN}, shared"): partial(_thinwire, _pier(shard_reference=True)),
}
METHODS = tuple(dict.fromkeys(method for method, _ in LOOPS))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench peers", description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--ranks", type=whole_number(2, MAX_RANKS), default=2, help="default 2")
    parser.add_argument(
        "--width", type=whole_number(8, 2**14), default=1024, help=f"of {LAYERS} square matrices (default 1024)"
    )
    parser.add_argument("--every", type=whole_number(4, 10**4), default=10, help="steps of a round (default 10)")
    parser.add_argument("--rounds", type=whole_number(2, 10**4), default=12, help="default 12")
    parser.add_argument("--repeats", type=whole_number(1, 100), default=3, help="of every run (default 3)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    for name in arguments.methods:
        if name not in METHODS:
            parser.error(f"unknown method {name!r}; choose of {', '.join(METHODS)}")
    return arguments


if __name__ == "__main__":
    rank_main()
