"""`thinwire bench collectives`: the compressed all-reduce against gloo's own float32, over a slow wire.

    speedup_vs_fp32 = seconds of gloo's own all-reduce / seconds
    ratio_to_limit  = seconds / (bytes sent by one rank / rate)        1: the wire is never idle

With --rate the ranks talk through an emulated network (`network.py`) that limits each rank's total egress and
total ingress; without it, over loopback, where there is no limit to compare with.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire import formats
from thinwire.bench.averaging import BASELINE, Job, Measured
from thinwire.bench.network import MAX_RANKS, NetworkUnavailable, emulated_network, parse_rate
from thinwire.bench.processes import RankFailed, run_processes
from thinwire.usage import Parser, whole_number

DEFAULT_FORMATS = "fp8_e5m2_pow2,fp8_e4m3,bf16"
LEGEND = (
    "speed-up: over gloo_fp32; x limit: seconds / (sent / rate); MB sent: per rank and call; "
    "on the wire: by its interface; error: relative"
)
STARTING_SECONDS = 300.0  # imports, and kernels that are compiled for the first time


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    name: str
    seconds: float
    speedup_vs_fp32: float
    ratio_to_limit: float | None
    sent_bytes: int
    wire_bytes: int | None
    error: float


def main(argv: list[str]) -> int:
    """Measure, print, return the exit code."""
    arguments = _parse(argv)
    try:
        rows = run(arguments)
    except (NetworkUnavailable, RankFailed) as error:
        sys.stderr.write(f"thinwire bench collectives: {error}\n")
        return 1
    if arguments.json:
        sys.stdout.write(json.dumps({**_settings(arguments), "rows": [asdict(row) for row in rows]}) + "\n")
    else:
        sys.stdout.write(table(arguments, rows))
    return 0


def run(arguments: argparse.Namespace) -> list[Row]:
    """Start the ranks, on an emulated network or on loopback, and turn what they measured into rows."""
    ranks, rate = arguments.ranks, arguments.rate
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="thinwire-bench-"))
        elements = arguments.mib * 2**18
        job = Job(elements, arguments.repeats, tuple(arguments.formats), str(Path(folder, "store")))
        command = [sys.executable, "-m", "thinwire.bench.averaging", json.dumps(asdict(job))]
        if rate is None:
            commands = [command] * ranks
            environments = [{**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}] * ranks
        else:
            hosts = stack.enter_context(emulated_network(ranks, rate=rate))
            commands = [host.command(command) for host in hosts]
            environments = [host.environment() for host in hosts]
        outputs = run_processes(
            commands,
            [
                {**environment, "RANK": str(rank), "WORLD_SIZE": str(ranks), "TORCH_CPP_LOG_LEVEL": "ERROR"}
                for rank, environment in enumerate(environments)
            ],
            timeout=_patience(job, ranks, rate),
        )
    measured = [Measured(**row) for row in json.loads(outputs[0])]
    return [_row(each, measured[0], rate) for each in measured]


def table(arguments: argparse.Namespace, rows: list[Row]) -> str:
    """The rows for people."""
    where = "over loopback"
    if arguments.rate is not None:
        where = f"each sending and receiving at most {arguments.rate / 1e6:g} Mbit/s"
    lines = [
        f"all-reduce of {arguments.mib} MiB of float32 on {arguments.ranks} ranks, {where};"
        f" median of {arguments.repeats}",
        f"{'':<14}{'seconds':>9}{'speed-up':>10}{'x limit':>9}{'MB sent':>9}{'on the wire':>13}{'error':>10}",
    ]
    for row in rows:
        limit = "-" if row.ratio_to_limit is None else f"{row.ratio_to_limit:.2f}"
        wire = "-" if row.wire_bytes is None else f"{row.wire_bytes / 1e6:.2f}"
        lines.append(
            f"{row.name:<14}{row.seconds:>9.3f}{row.speedup_vs_fp32:>9.2f}x{limit:>9}"
            f"{row.sent_bytes / 1e6:>9.2f}{wire:>13}{row.error:>10.1e}"
        )
    return "\n".join([*lines, LEGEND]) + "\n"


def _row(measured: Measured, baseline: Measured, rate: int | None) -> Row:
    limit = None if rate is None else measured.seconds / (measured.sent_bytes * 8 / rate)
    speedup = baseline.seconds / measured.seconds
    return Row(
        measured.name,
        measured.seconds,
        speedup,
        limit,
        measured.sent_bytes,
        measured.wire_bytes,
        measured.error,
    )


def _patience(job: Job, ranks: int, rate: int | None) -> float:
    """Seconds after which the ranks count as stuck: ten times what float32 would take for every call."""
    bits = 2 * job.elements * 32 * (job.repeats + 2) * (len(job.formats) + 1)
    return STARTING_SECONDS + 10 * bits / (rate or 10**9)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "ranks": arguments.ranks,
        "rate_bits_per_second": arguments.rate,
        "mib": arguments.mib,
        "repeats": arguments.repeats,
        "baseline": BASELINE,
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench collectives", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", type=parse_rate, help="limit of each rank, such as 200mbit (needs root)")
    parser.add_argument("--ranks", type=whole_number(2, MAX_RANKS), default=4, help="processes (default 4)")
    parser.add_argument("--mib", type=whole_number(1, 1024), default=32, help="MiB of float32 (default 32)")
    parser.add_argument("--repeats", type=whole_number(1, 1000), default=5, help="timed calls of each (default 5)")
    parser.add_argument("--formats", type=_formats, default=_formats(DEFAULT_FORMATS), help=DEFAULT_FORMATS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _formats(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    try:
        for name in names:
            formats.get(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names
