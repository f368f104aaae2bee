"""`thinwire bench faults`: what a run of local updates survives, and what that costs it.

Every run is a `thinwire train` under torchrun on nodes of its own, namespaces with a wire between them, saved in
memory at the end of every round. In the middle of a round something happens to the last node:

    kill    SIGKILL to one of its workers
    stop    SIGSTOP to one, SIGCONT after --stop-seconds
    cut     its link goes down, and up after --cut-seconds
    slow    its link is ten times slower from then on

and the run is compared with one that was left alone. At the end the trainer checks that all ranks hold the same
parameters. Nodes share the machine's memory here: the directory of snapshots is one for all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from thinwire.bench.jobs import fingerprint
from thinwire.bench.network import MAX_RANKS, Host, NetworkUnavailable, emulated_network, parse_rate
from thinwire.train.arguments import to_toml
from thinwire.train.config import (
    CheckpointConfig,
    LocalUpdateConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from thinwire.train.data.samples import DataConfig
from thinwire.usage import Parser, whole_number

METHODS = ("diloco", "pier", "streaming-diloco")
FAULTS = ("kill", "stop", "cut", "slow")
NOTHING = "none"
EVERY = 20
"""Steps of a round."""
SLOWER = 10
RENDEZVOUS_PORT = 29_400
MAX_RESTARTS = 3
POLL_SECONDS = 0.01
LONGEST_SECONDS = 900.0
"""A run that takes longer is one that hangs."""


@dataclass(frozen=True)
class Row:
    """One method and one fault."""

    method: str
    fault: str
    survived: bool
    """Every launcher ended well, and the result is there."""
    rounds_lost: float | None
    """Steps that were taken again / steps of a round; None: not survived."""
    seconds_to_resume: float | None
    """The longest time without a step after the fault began, without the time that the fault itself lasted."""
    identical_replicas: bool
    """All ranks ended with the same parameters."""
    val_loss_ratio: float | None
    """Of the final validation loss to that of the run that was left alone."""


def main(argv: list[str]) -> int:
    """Run what has not been run yet, compare, print; returns the exit code."""
    arguments = _parse(argv)
    rows = []
    try:
        for method in arguments.methods:
            alone = _run(method, NOTHING, arguments)
            if not alone["survived"]:
                print(f"thinwire bench faults: {method}: {alone['problem']}", file=sys.stderr)
                return 1
            rows += [compare(method, fault, _run(method, fault, arguments), alone) for fault in arguments.faults]
    except NetworkUnavailable as error:
        print(f"thinwire bench faults: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        keys = ("ranks", "nodes", "steps", "rate", "stop_seconds", "cut_seconds")
        settings = {key: getattr(arguments, key) for key in keys}
        print(json.dumps({**settings, "every": EVERY, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 0


def compare(method: str, fault: str, run: dict[str, Any], alone: dict[str, Any]) -> Row:
    """The row of a run beside the one without a fault."""
    survived = run["survived"]
    return Row(
        method=method,
        fault=fault,
        survived=survived,
        rounds_lost=run["repeated_steps"] / EVERY if survived else None,
        seconds_to_resume=run["stalled_seconds"] if survived else None,
        identical_replicas=survived,  # the trainer fails where they are not
        val_loss_ratio=run["val_loss"] / alone["val_loss"] if survived else None,
    )


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [
        f"{'method':18} {'fault':6} {'survived':>8} {'rounds lost':>11} {'resumes after':>13} {'loss / alone':>12}"
    ]
    for row in rows:
        if row.survived:
            assert row.seconds_to_resume is not None
            lines.append(
                f"{row.method:18} {row.fault:6} {'yes':>8} {row.rounds_lost:11.2f} "
                f"{row.seconds_to_resume:11.1f} s {row.val_loss_ratio:12.6f}"
            )
        else:
            lines.append(f"{row.method:18} {row.fault:6} {'no':>8}")
    return "\n".join(lines)


def worker_of(launcher: int, local_rank: int) -> int | None:
    """The process of this worker of a torchrun; None: not there (yet)."""
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if f"\0LOCAL_RANK={local_rank}\0".encode() in environment:
            return int(pid)
    return None


# -- one run ---------------------------------------------------------------------------------------------


def _run(method: str, fault: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a run gave, from its directory in --out if it was made before."""
    settings = [f"{key}={getattr(arguments, key)}" for key in ("ranks", "nodes", "steps", "rate", "timeout")]
    settings += [f"{fault}={getattr(arguments, f'{fault}_seconds', None)}"]
    directory = arguments.out / f"{method}-{fault}-{fingerprint(method, *settings)}"
    file = directory / "result.json"
    if not file.exists():
        print(f"running {directory}", file=sys.stderr, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        result = _train(directory, _config(method, arguments), fault, arguments)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(result))
        partial.replace(file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _config(method: str, arguments: argparse.Namespace) -> TrainConfig:
    return TrainConfig(
        recipe=method,
        steps=arguments.steps,
        batch_size=2 * arguments.ranks,
        threads=1,
        timeout=arguments.timeout,
        verify_every=arguments.steps,
        validation_every=0,
        data=DataConfig(sequence_length=64),
        model=ModelConfig(name="llama-nano"),
        optimizer=OptimizerConfig(lr=5e-4),
        local_update=LocalUpdateConfig(every=EVERY, groups=arguments.nodes if method == "pier" else None),
        checkpoint=CheckpointConfig(every=0, snapshots=arguments.snapshots),
        logging=LoggingConfig(every=1),
    )


def _train(directory: Path, config: TrainConfig, fault: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, and let the fault happen after the middle of the run, in the middle of a round."""
    job, out = directory / "job.toml", directory / "run"
    job.write_text(to_toml(config))
    moment = config.steps // EVERY // 2 * EVERY + EVERY // 2
    seen = Steps(out / "metrics.jsonl")
    began, lasted = None, 0.0
    with (
        emulated_network(arguments.nodes, rate=arguments.rate) as hosts,
        _launched(hosts, job, out, arguments.ranks // arguments.nodes) as launchers,
    ):
        deadline = time.monotonic() + LONGEST_SECONDS
        while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if seen.look() >= moment and began is None and fault != NOTHING:
                began = time.monotonic()
                _HAPPEN[fault](launchers[-1].pid, hosts[-1], seen, arguments)
                lasted = time.monotonic() - began
        codes = [launcher.poll() for launcher in launchers]
    summary = out / "summary.json"
    if any(code != 0 for code in codes) or not summary.exists():
        return {"survived": False, "problem": _problem(out, codes)}
    if fault != NOTHING and began is None:
        return {"survived": False, "problem": "the run was over before the fault"}
    return {
        "survived": True,
        **{key: json.loads(summary.read_text())[key] for key in ("val_loss", "param_hash")},
        "repeated_steps": seen.repeated,
        "stalled_seconds": 0.0 if began is None else max(0.0, seen.longest_gap(began) - lasted),
    }


@contextmanager
def _launched(
    hosts: Sequence[Host], job: Path, out: Path, workers: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A torchrun on every host; what each says goes to a file beside the job."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
    torchrun += ["--nproc-per-node", str(workers), "--max-restarts", str(MAX_RESTARTS), "--rdzv-backend", "c10d"]
    torchrun += ["--rdzv-id", "faults", "--rdzv-endpoint", f"{hosts[0].address}:{RENDEZVOUS_PORT}"]
    train = ["-m", "thinwire", "train", "--config", str(job.resolve()), "--out", str(out.resolve())]
    launchers = []
    for host in hosts:
        place = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(host is hosts[0])}"]
        with (job.parent / f"node{host.rank}.txt").open("wb") as said:
            launchers.append(
                subprocess.Popen(
                    host.command([*torchrun, *place, *train]),
                    env={**host.environment(), "HF_HUB_OFFLINE": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        yield launchers
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()


def _problem(out: Path, codes: Sequence[int | None]) -> str:
    """The last line of thinwire's own, else how the launchers ended."""
    lines = [line for path in sorted(out.parent.glob("node*.txt")) for line in path.read_text().splitlines()]
    own = [line for line in lines if line.startswith("thinwire")]
    return own[-1] if own else f"exit codes {codes} after at most {LONGEST_SECONDS:.0f} s"


class Steps:
    """What a metrics.jsonl tells while it is written."""

    def __init__(self, file: Path) -> None:
        self.repeated = 0
        """Steps that were taken again after a restart."""
        self._file = file
        self._last = 0
        self._furthest: list[tuple[float, int]] = []

    def look(self) -> int:
        """The last step that it has."""
        last = self._read()
        if last < self._last:
            self.repeated += self._last - last
        self._last = last
        if not self._furthest or last > self._furthest[-1][1]:
            self._furthest.append((time.monotonic(), last))
        return last

    def watch(self, seconds: float) -> None:
        """Look for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.look()
            time.sleep(POLL_SECONDS)

    def longest_gap(self, since: float) -> float:
        """Seconds without a new step, of those that began before it and ended after it, or later."""
        times = [moment for moment, _ in self._furthest]
        return max((after - before for before, after in pairwise(times) if after > since), default=0.0)

    def _read(self) -> int:
        try:
            with self._file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().split(b"\n")[:-1]  # what comes after the last newline is not whole
        except FileNotFoundError:
            return self._last
        return int(json.loads(lines[-1])["step"]) if lines else 0


# -- what happens ----------------------------------------------------------------------------------------


def _kill(launcher: int, host: Host, seen: Steps, arguments: argparse.Namespace) -> None:
    os.kill(_worker(launcher), signal.SIGKILL)


def _stop(launcher: int, host: Host, seen: Steps, arguments: argparse.Namespace) -> None:
    worker = _worker(launcher)
    os.kill(worker, signal.SIGSTOP)
    seen.watch(arguments.stop_seconds)
    os.kill(worker, signal.SIGCONT)


def _cut(launcher: int, host: Host, seen: Steps, arguments: argparse.Namespace) -> None:
    host.cut()
    seen.watch(arguments.cut_seconds)
    host.mend()


def _slow(launcher: int, host: Host, seen: Steps, arguments: argparse.Namespace) -> None:
    host.limit(arguments.rate // SLOWER)


_HAPPEN: dict[str, Callable[[int, Host, Steps, argparse.Namespace], None]] = {
    "kill": _kill,
    "stop": _stop,
    "cut": _cut,
    "slow": _slow,
}


def _worker(launcher: int) -> int:
    worker = worker_of(launcher, 0)
    assert worker is not None  # it has just written a step
    return worker


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench faults", description=__doc__.split("\n")[0])
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="METHOD", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS, help="default: all")
    parser.add_argument("--nodes", type=whole_number(2, MAX_RANKS), default=2, help="default 2")
    parser.add_argument("--ranks", type=whole_number(2, MAX_RANKS), default=4, help="on all nodes (default 4)")
    parser.add_argument("--rate", type=parse_rate, default=parse_rate("20mbit"), help="of a node (default 20mbit)")
    parser.add_argument("--steps", type=whole_number(2 * EVERY, 10**6), default=400, help="of a run (default 400)")
    parser.add_argument("--stop-seconds", type=whole_number(1, 600), default=60, help="default 60")
    parser.add_argument("--cut-seconds", type=whole_number(1, 600), default=15, help="default 15")
    parser.add_argument(
        "--timeout",
        type=whole_number(5, 3600),
        default=90,
        help="of a collective; a shorter one has workers start again where they would have waited (default 90)",
    )
    parser.add_argument(
        "--snapshots", type=Path, default=Path("/dev/shm"), help="directory in memory (default /dev/shm)"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench-faults"), help="directory of the runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    for name in arguments.methods:
        if name not in METHODS:
            parser.error(f"unknown method {name!r}; choose of {', '.join(METHODS)}")
    if arguments.ranks % arguments.nodes:
        parser.error(f"--nodes {arguments.nodes}: {arguments.ranks} ranks cannot be shared out equally over them")
    return arguments
