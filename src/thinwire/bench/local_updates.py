"""`thinwire bench local-updates`: what averaging now and then does to a loss, method by method, beside `ddp`'s.

Four ranks of a small model, 4 sequences of 64 bytes each, AdamW; rounds of 20 steps. Losses are of the agreed
weights, compared in pairs, seed by seed; nothing that was finished is run again. The learning rate decides: outer
momentum makes up for one below the best and makes one near it too large.

With --uplink the ranks belong to nodes with a thin wire between them, and the time to a loss is measured too. Loss
against steps does not depend on the wire, so each method runs once there for its clock, without validations, and
trains once per seed without a limit.

    seconds to a target = the clock after the first validated step at or below it, mean over seeds
    comm_share          = 1 - a step without a limit / a step there
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from thinwire.bench import char
from thinwire.bench.jobs import BASELINE, LEAST_STEPS, Job, Trained, plus_minus, run_job, spread
from thinwire.bench.methods import LOCAL_UPDATES
from thinwire.bench.network import MAX_RANKS, NetworkUnavailable, emulated_network, parse_rate
from thinwire.bench.processes import RankFailed
from thinwire.train.model import PRESETS
from thinwire.usage import Parser, whole_number

SEQUENCE_LENGTH, WARMUP_STEPS = 64, 50
SEQUENCES_PER_RANK = 4
TARGETS = (1.01, 1.02)
"""Of ddp's final validation loss with the same seed."""
VALIDATIONS = 40
"""Per run, with --uplink."""


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
    """Of a run's bytes, the same on all wires."""
    step_seconds: float | None = None
    """This and what follows: with --uplink only. A mean over the whole run."""
    comm_share: float | None = None
    seconds_to_target: dict[str, float | None] | None = None
    """By target; None: a seed does not get there."""
    speedup_vs_ddp: dict[str, float | None] | None = None
    """ddp's seconds to the same target / these."""


def main(argv: list[str]) -> int:
    """Train, compare, print; returns the exit code."""
    arguments = _parse(argv)
    trained: dict[str, list[Trained]] = {}
    try:
        clocks = {} if arguments.uplink is None else _timed(arguments)
        for seed in range(arguments.seeds):
            for method in [BASELINE, *arguments.methods]:
                result = run_job(_job(method, seed, arguments), arguments.out, "trained", arguments.ranks)
                trained.setdefault(method, []).append(result)
    except (NetworkUnavailable, RankFailed) as error:
        print(f"thinwire bench local-updates: {error}", file=sys.stderr)
        return 1
    rows = compare(trained, clocks)
    if arguments.json:
        keys = ("model", "ranks", "seeds", "steps", "lr", "nodes", "rate", "uplink")
        settings = {key: getattr(arguments, key) for key in keys}
        print(json.dumps({**settings, "rows": [asdict(row) for row in rows]}))
    else:
        print(table(rows))
    return 0


def _timed(arguments: argparse.Namespace) -> dict[str, Trained]:
    """Each method once on the network of nodes."""
    ranks, rate, nodes, uplink = (getattr(arguments, key) for key in ("ranks", "rate", "nodes", "uplink"))
    network = f"{nodes}nodes-{rate}bit-{uplink}bit"
    with emulated_network(ranks, rate=rate, nodes=nodes, uplink=uplink) as hosts:
        return {
            method: run_job(
                replace(_job(method, 0, arguments), validate_every=0), arguments.out, network, ranks, hosts
            )
            for method in [BASELINE, *arguments.methods]
        }


def compare(trained: Mapping[str, Sequence[Trained]], clocks: Mapping[str, Trained] | None = None) -> list[Row]:
    """A row per method from what each gave, seed by seed in the same order, and from its run among nodes."""
    base = trained[BASELINE]
    rows = []
    for method, runs in trained.items():
        losses = [run.losses[-1][1] for run in runs]
        ratios = [loss / ddp.losses[-1][1] for loss, ddp in zip(losses, base)]
        sent = runs[0].sent_bytes / base[0].sent_bytes
        loss, ratio = statistics.mean(losses), statistics.mean(ratios)
        row = Row(method, loss, spread(losses), ratio, spread(ratios), sent)
        if clocks:
            own, ddp = (
                {f"{target}": _seconds_to(target, trained[name], base, clocks[name]) for target in TARGETS}
                for name in (method, BASELINE)
            )
            row = replace(
                row,
                step_seconds=clocks[method].step_seconds,
                comm_share=1 - statistics.median(run.step_seconds for run in runs) / clocks[method].step_seconds,
                seconds_to_target=own,
                speedup_vs_ddp={
                    target: ddp[target] / seconds if seconds and ddp[target] else None  # type: ignore[operator]
                    for target, seconds in own.items()
                },
            )
        rows.append(row)
    return rows


def _seconds_to(target: float, runs: Sequence[Trained], base: Sequence[Trained], timed: Trained) -> float | None:
    """On the clock of `timed`, until a run is at `target` x ddp's final loss: mean over seeds."""
    seconds = []
    for run, ddp in zip(runs, base):
        steps = [step for step, loss in run.losses if loss <= target * ddp.losses[-1][1]]
        if not steps:
            return None
        seconds.append(timed.clock[steps[0] - 1])
    return statistics.mean(seconds)


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    timed = rows[0].step_seconds is not None
    head = f"{'method':26} {'val_loss':>16} {'/ ddp':>17} {'sent / ddp':>11}"
    if timed:
        head += f" {'s/step':>7} {'comm':>6}" + "".join(f" {f'to {t} x':>10} {'sooner':>7}" for t in TARGETS)
    lines = [head]
    for row in rows:
        lines.append(
            f"{row.method:26} {row.val_loss:7.4f}{plus_minus(row.val_loss_spread)} "
            f"{row.ratio_to_ddp:8.4f}{plus_minus(row.ratio_spread)} {row.sent_ratio_to_ddp:11.4f}"
            + (_times(row) if timed else "")
        )
    return "\n".join(lines)


def _times(row: Row) -> str:
    assert row.seconds_to_target is not None
    assert row.speedup_vs_ddp is not None
    text = f" {row.step_seconds:7.4f} {row.comm_share:6.1%}"
    for target, seconds in row.seconds_to_target.items():
        sooner = row.speedup_vs_ddp[target]
        text += f" {'-' if seconds is None else f'{seconds:.1f} s':>10}"
        text += f" {'-' if sooner is None else f'{sooner:.2f}x':>7}"
    return text


def _job(method: str, seed: int, arguments: argparse.Namespace) -> Job:
    steps = arguments.steps
    every = steps if arguments.uplink is None else max(1, steps // VALIDATIONS)
    return Job(
        method,
        seed,
        steps,
        steps,
        every,
        arguments.lr,
        batch_size=SEQUENCES_PER_RANK * arguments.ranks,
        model=arguments.model,
        sequence_length=SEQUENCE_LENGTH,
        warmup_steps=WARMUP_STEPS,
    )


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
    parser.add_argument(
        "--uplink",
        type=parse_rate,
        help="put the ranks on nodes of which each sends and receives at most this, such as 50mbit; needs root",
    )
    parser.add_argument("--nodes", type=whole_number(2, MAX_RANKS), default=2, help="with --uplink (default 2)")
    parser.add_argument(
        "--rate",
        type=parse_rate,
        default=parse_rate("1gbit"),
        help="with --uplink: limit of each rank's egress and ingress within its node (default 1gbit)",
    )
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate (default 0.002)")
    parser.add_argument(
        "--model",
        choices=[char.NAME, *PRESETS],
        default=char.NAME,
        help=f"{char.NAME}: learned positions, torch's initialization (default); or a preset of thinwire train",
    )
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
    if arguments.uplink is not None and arguments.ranks % arguments.nodes:
        parser.error(f"--nodes {arguments.nodes}: {arguments.ranks} ranks cannot be shared out equally over them")
    return arguments
