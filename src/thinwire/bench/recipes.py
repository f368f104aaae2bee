"""`thinwire bench recipes`: the same training job under each recipe and seed; loss, bytes and time beside `ddp`'s.

Every run is a `thinwire train` with its directory under --out, so a run that is finished is never repeated and
a benchmark that was stopped goes on where it was. Losses are compared in pairs, seed by seed: the weights and
the order of the data depend on the seed alone, so what is left is the recipe. The learning rate is 1e-3, not the
default job's 3e-3: there a run is so sensitive that the rounding of bfloat16 alone moves its loss by a percent,
either way. With --rate, times on a slow network instead: `throttled.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thinwire import recipes
from thinwire.bench import throttled
from thinwire.bench.jobs import BASELINE, LEAST_STEPS, fingerprint, plus_minus, spread
from thinwire.bench.methods import TORCH_HOOKS
from thinwire.bench.network import MAX_RANKS, NetworkUnavailable, parse_rate
from thinwire.bench.processes import RankFailed
from thinwire.train.checkpoint.manifest import checkpoints_in
from thinwire.train.config import TrainConfig
from thinwire.train.data.samples import DataConfig
from thinwire.usage import Parser, whole_number


@dataclass(frozen=True)
class Row:
    """One recipe over all seeds."""

    recipe: str
    seeds: int
    val_loss: float
    """Mean over seeds, nats per byte."""
    val_loss_spread: float | None
    """Standard deviation over seeds; None: one seed."""
    ratio_to_ddp: float
    """Mean over seeds of val_loss / ddp's val_loss of the same seed."""
    ratio_spread: float | None
    sent_bytes_per_rank: int
    sent_ratio_to_ddp: float
    seconds: float
    """Median over seeds of the wall time of the loop."""
    step_seconds: float
    """Median over seeds of wall seconds / steps."""
    ratio_to_ddp_step: float
    comm_share: float
    """Exposed communication / wall seconds."""
    seconds_to_target: None = None
    """This and what follows: with --rate only."""
    speedup_vs_ddp: None = None
    ratio_to_limit: None = None


def main(argv: list[str]) -> int:
    """Train, compare, print; returns the exit code."""
    arguments = _parse(argv)
    if arguments.rate is not None:
        return _throttled(arguments)
    finished: dict[str, list[dict[str, Any]]] = {name: [] for name in arguments.recipes}
    for seed in range(arguments.seeds):
        for name in arguments.recipes:  # alternating, so that a disturbance of the machine hits all alike
            summary = _run(name, seed, arguments)
            if summary is None:
                return 1
            finished[name].append(summary)
    rows = compare(finished)
    (arguments.out / "rows.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    tokens = arguments.batch_size * DataConfig.sequence_length // arguments.ranks
    if arguments.json:
        settings = {"steps": arguments.steps, "workers": arguments.ranks, "tokens_per_rank_and_step": tokens}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{arguments.ranks} ranks, {tokens} tokens per rank and step, {arguments.steps} steps")
        print(table(rows))
    return 0


def _throttled(arguments: argparse.Namespace) -> int:
    try:
        rows = throttled.measure(arguments)
    except (NetworkUnavailable, RankFailed) as error:
        print(f"thinwire bench recipes: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        keys = ("rate", "ranks", "seeds", "steps", "timed_steps", "batch_size")
        settings = {key: getattr(arguments, key) for key in keys}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(throttled.table(rows, arguments))
    return 0


def compare(finished: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Rows from the summaries of each recipe, seed by seed in the same order."""
    rows = []
    for name, runs in finished.items():
        pairs = list(zip(runs, finished[BASELINE]))
        losses = [run["val_loss"] for run in runs]
        ratios = [run["val_loss"] / base["val_loss"] for run, base in pairs]
        steps = [run["wall_seconds"] / run["steps"] for run in runs]
        rows.append(
            Row(
                recipe=name,
                seeds=len(runs),
                val_loss=statistics.mean(losses),
                val_loss_spread=spread(losses),
                ratio_to_ddp=statistics.mean(ratios),
                ratio_spread=spread(ratios),
                sent_bytes_per_rank=runs[0]["sent_bytes_per_rank"],
                sent_ratio_to_ddp=runs[0]["sent_bytes_per_rank"] / pairs[0][1]["sent_bytes_per_rank"],
                seconds=statistics.median(run["wall_seconds"] for run in runs),
                step_seconds=statistics.median(steps),
                ratio_to_ddp_step=statistics.median(
                    run["wall_seconds"] / base["wall_seconds"] for run, base in pairs
                ),
                comm_share=statistics.median(run["comm_seconds"] / run["wall_seconds"] for run in runs),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    lines = [
        f"{'recipe':12} {'val_loss':>16} {'/ ddp':>17} {'sent / ddp':>11} {'s/step':>8} {'/ ddp':>6} {'comm':>6}"
    ]
    for row in rows:
        lines.append(
            f"{row.recipe:12} {row.val_loss:7.4f}{plus_minus(row.val_loss_spread)} "
            f"{row.ratio_to_ddp:8.4f}{plus_minus(row.ratio_spread)} {row.sent_ratio_to_ddp:11.4f} "
            f"{row.step_seconds:8.3f} {row.ratio_to_ddp_step:6.2f} {row.comm_share:6.1%}"
        )
    return "\n".join(lines)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(prog="thinwire bench recipes", description=__doc__.split("\n")[0])
    parser.add_argument(
        "recipes", nargs="*", help=f"of {', '.join(recipes.names())} (default: all); ddp always runs"
    )
    parser.add_argument(
        "--rate",
        type=parse_rate,
        help="limit of each rank's egress and ingress, such as 10mbit; adds torch's own hooks",
    )
    parser.add_argument("--ranks", "--workers", type=whole_number(2, MAX_RANKS), help="default 2, with --rate 4")
    parser.add_argument(
        "--timed-steps",
        type=whole_number(LEAST_STEPS, 10**6),
        default=63,
        help="with --rate, on that network (default 63)",
    )
    parser.add_argument("--seeds", type=whole_number(1, 1000), default=3, help="seeds 0, 1, … (default 3)")
    parser.add_argument(
        "--steps", type=whole_number(1, 10**9), default=400, help="optimizer steps of each run (default 400)"
    )
    parser.add_argument(
        "--batch-size",
        type=whole_number(1, 2**20),
        default=TrainConfig.batch_size,
        help=f"sequences per step over all ranks (default {TrainConfig.batch_size}); more: steps bound by compute",
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default 0.001)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-recipes"), help="directory of the runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args(argv)
    arguments.ranks = arguments.ranks or (2 if arguments.rate is None else 4)
    if arguments.rate is not None and arguments.steps < LEAST_STEPS:
        parser.error(f"--steps {arguments.steps} are too few to be timed; with --rate at least {LEAST_STEPS}")
    hooks = tuple(TORCH_HOOKS) if arguments.rate is not None else ()
    for name in arguments.recipes:
        if name not in (*recipes.names(), *hooks):
            parser.error(f"unknown recipe {name!r}; choose of {', '.join((*recipes.names(), *hooks))}")
    chosen = [*(arguments.recipes or recipes.names()), *hooks]
    arguments.recipes = list(dict.fromkeys([BASELINE, *chosen]))
    return arguments


def _run(name: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The summary of one run, trained now unless it is there."""
    job = f"workers{arguments.ranks}-batch{arguments.batch_size}-steps{arguments.steps}-lr{arguments.lr:g}"
    directory = arguments.out / f"{name}-{job}-seed{seed}-{fingerprint(name)}"
    summary = directory / "summary.json"
    if not summary.exists():
        print(f"training {directory}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "thinwire", "train", "--recipe", name, "--seed", str(seed)]
        command += ["--workers", str(arguments.ranks), "--steps", str(arguments.steps), "--out", str(directory)]
        command += ["--batch-size", str(arguments.batch_size)]
        command += ["--optimizer.lr", str(arguments.lr), "--checkpoint.every", "0"]
        command += ["--validation-every", "0", "--logging.no-progress"]
        if checkpoints_in(directory / "checkpoints"):
            command.append("--resume")
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode or not summary.exists():  # none: it was asked to stop
            reason = done.stderr.strip()[-400:] or "stopped before its last step; start the bench again to go on"
            print(f"thinwire bench recipes: {directory}: {reason}", file=sys.stderr)
            return None
    result: dict[str, Any] = json.loads(summary.read_text())
    return result
