"""`thinwire bench ablation`: what coordinates and error feedback do for each format; final loss beside `ddp`'s.

The same job is trained under every combination of format, geometry and feedback, and under `ddp`. As in
`thinwire bench recipes` losses are compared in pairs, seed by seed, and nothing that was finished is run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from thinwire import formats
from thinwire.bench.jobs import BASELINE, LEAST_STEPS, Job, Trained, plus_minus, run_job, spread
from thinwire.bench.methods import FEEDBACKS, GEOMETRIES, cell
from thinwire.bench.network import MAX_RANKS
from thinwire.bench.processes import RankFailed
from thinwire.usage import Parser, whole_number

FORMATS = ("fp8_e5m2", "nvfp4", "int4_span", "int4")


@dataclass(frozen=True)
class Row:
    """One combination over all seeds."""

    format: str
    geometry: str
    feedback: str
    val_loss: float
    """Mean over seeds, nats per byte."""
    ratio_to_ddp: float
    """Mean over seeds of val_loss / ddp's val_loss of the same seed."""
    ratio_spread: float | None
    """Standard deviation over seeds; None: one seed."""
    sent_ratio_to_ddp: float


def main(argv: list[str]) -> int:
    """Train, compare, print; returns the exit code."""
    arguments = _parse(argv)
    cells = list(product(arguments.formats, arguments.geometries, arguments.feedback))
    trained: dict[str, list[Trained]] = {}
    try:
        for seed in range(arguments.seeds):
            for method in [BASELINE, *(cell(*parts) for parts in cells)]:
                job = Job(method, seed, arguments.steps, arguments.steps, arguments.steps, arguments.lr)
                result = run_job(job, arguments.out, "trained", arguments.ranks)
                trained.setdefault(method, []).append(result)
    except RankFailed as error:
        print(f"thinwire bench ablation: {job.name}: {error}", file=sys.stderr)
        return 1
    rows = compare(trained, cells)
    if arguments.json:
        settings = {key: getattr(arguments, key) for key in ("ranks", "seeds", "steps")}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 0


def compare(trained: Mapping[str, Sequence[Trained]], cells: Sequence[tuple[str, str, str]]) -> list[Row]:
    """A row per cell from what each method gave, seed by seed in the same order."""
    base = trained[BASELINE]
    rows = []
    for parts in cells:
        runs = trained[cell(*parts)]
        losses = [run.losses[-1][1] for run in runs]
        ratios = [loss / ddp.losses[-1][1] for loss, ddp in zip(losses, base)]
        sent = runs[0].sent_bytes / base[0].sent_bytes
        rows.append(Row(*parts, statistics.mean(losses), statistics.mean(ratios), spread(ratios), sent))
    return rows


def table(rows: Sequence[Row]) -> str:
    """A line per format and geometry: loss / ddp's with each feedback, and bytes / ddp's."""
    ratios = {(row.format, row.geometry, row.feedback): row for row in rows}
    feedbacks = list(dict.fromkeys(row.feedback for row in rows))
    heads = "".join(f" {f'feedback {name!r}':>18}" for name in feedbacks)
    lines = [f"{'format':10} {'geometry':10}{heads} {'sent / ddp':>11}"]
    for format, geometry in dict.fromkeys((row.format, row.geometry) for row in rows):
        columns = [ratios[format, geometry, feedback] for feedback in feedbacks]
        values = "".join(f" {row.ratio_to_ddp:9.4f}{plus_minus(row.ratio_spread)}" for row in columns)
        lines.append(f"{format:10} {geometry:10}{values} {columns[0].sent_ratio_to_ddp:11.4f}")
    return "\n".join(lines)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench ablation", description=__doc__.split("\n")[0])
    parser.add_argument(
        "formats",
        nargs="*",
        default=list(FORMATS),
        metavar="FORMAT",
        help=f"of {', '.join(formats.names())} (default: {' '.join(FORMATS)})",
    )
    parser.add_argument(
        "--geometries", nargs="+", default=list(GEOMETRIES), choices=list(GEOMETRIES), help="default: all"
    )
    parser.add_argument(
        "--feedback", nargs="+", default=["none", "error"], choices=list(FEEDBACKS), help="default: none error"
    )
    parser.add_argument("--ranks", type=whole_number(2, MAX_RANKS), default=2, help="default 2")
    parser.add_argument("--seeds", type=whole_number(1, 1000), default=3, help="seeds 0, 1, … (default 3)")
    parser.add_argument(
        "--steps", type=whole_number(LEAST_STEPS, 10**9), default=200, help="of each run (default 200)"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default 0.001)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-ablation"), help="directory of what was run")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    for name in arguments.formats:
        if name not in formats.names():
            parser.error(f"unknown format {name!r}; choose of {', '.join(formats.names())}")
    return arguments
