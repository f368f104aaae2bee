"""`thinwire bench local-updates`: what averaging now and then does to a loss, method by method, beside `ddp`'s.

Four ranks of a small model, 4 sequences of 64 bytes each, AdamW; rounds of 20 steps. Losses are of the agreed
weights, compared in pairs, seed by seed; nothing that was finished is run again. The learning rate decides: outer
momentum makes up for one below the best and makes one near it too large.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from thinwire.bench.jobs import BASELINE, LEAST_STEPS, Job, Trained, plus_minus, run_job, spread
from thinwire.bench.methods import LOCAL_UPDATES
from thinwire.bench.network import MAX_RANKS
from thinwire.bench.processes import RankFailed
from thinwire.usage import Parser, whole_number

MODEL, SEQUENCE_LENGTH, WARMUP_STEPS = "llama-nano", 64, 50
SEQUENCES_PER_RANK = 4


@dataclass(frozen=True)
class Row:
    """One method over all seeds."""

    method: str
    val_loss: float
    """Mean over seeds, nats per byte."""
    val_loss_spread: float | None
    """Standard deviation over seeds; None: one seed."""
    ratio_to_ddp: float
    """Mean over seeds of val_loss / ddp's val_loss of the same seed."""
    ratio_spread: float | None
    sent_ratio_to_ddp: float


def main(argv: list[str]) -> int:
    """Train, compare, print; returns the exit code."""
    arguments = _parse(argv)
    trained: dict[str, list[Trained]] = {}
    try:
        for seed in range(arguments.seeds):
            for method in [BASELINE, *arguments.methods]:
                result = run_job(_job(method, seed, arguments), arguments.out, "trained", arguments.ranks)
                trained.setdefault(method, []).append(result)
    except RankFailed as error:
        print(f"thinwire bench local-updates: {method}, seed {seed}: {error}", file=sys.stderr)
        return 1
    rows = compare(trained)
    if arguments.json:
        settings = {key: getattr(arguments, key) for key in ("ranks", "seeds", "steps")}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 0


def compare(trained: Mapping[str, Sequence[Trained]]) -> list[Row]:
    """A row per method from what each gave, seed by seed in the same order."""
    base = trained[BASELINE]
    rows = []
    for method, runs in trained.items():
        losses = [run.losses[-1][1] for run in runs]
        ratios = [loss / ddp.losses[-1][1] for loss, ddp in zip(losses, base)]
        sent = runs[0].sent_bytes / base[0].sent_bytes
        loss, ratio = statistics.mean(losses), statistics.mean(ratios)
        rows.append(Row(method, loss, spread(losses), ratio, spread(ratios), sent))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [f"{'method':26} {'val_loss':>16} {'/ ddp':>17} {'sent / ddp':>11}"]
    for row in rows:
        lines.append(
            f"{row.method:26} {row.val_loss:7.4f}{plus_minus(row.val_loss_spread)} "
            f"{row.ratio_to_ddp:8.4f}{plus_minus(row.ratio_spread)} {row.sent_ratio_to_ddp:11.4f}"
        )
    return "\n".join(lines)


def _job(method: str, seed: int, arguments: argparse.Namespace) -> Job:
    steps = arguments.steps
    batch_size = SEQUENCES_PER_RANK * arguments.ranks
    return Job(method, seed, steps, steps, steps, arguments.lr, batch_size, MODEL, SEQUENCE_LENGTH, WARMUP_STEPS)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench local-updates", description=__doc__.split("\n")[0])
    parser.add_argument(
        "methods",
        nargs="*",
        default=list(LOCAL_UPDATES),
        metavar="METHOD",
        help=f"of {', '.join(LOCAL_UPDATES)} (default: all); ddp always runs",
    )
    parser.add_argument("--ranks", type=whole_number(2, MAX_RANKS), default=4, help="even (default 4)")
    parser.add_argument("--seeds", type=whole_number(1, 1000), default=3, help="seeds 0, 1, … (default 3)")
    parser.add_argument(
        "--steps",
        type=whole_number(max(LEAST_STEPS, WARMUP_STEPS), 10**9),
        default=1000,
        help="of each run (default 1000: 50 rounds)",
    )
    parser.add_argument("--lr", type=float, default=5e-4, help="peak learning rate (default 0.0005)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-local-updates"), help="directory of what was run"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    for name in arguments.methods:
        if name not in LOCAL_UPDATES:
            parser.error(f"unknown method {name!r}; choose of {', '.join(LOCAL_UPDATES)}")
    if arguments.ranks % 2:
        parser.error(f"--ranks {arguments.ranks}: two of the methods have two groups of ranks, so it must be even")
    return arguments
