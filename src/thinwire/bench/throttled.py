"""`thinwire bench recipes --rate`: how much sooner a recipe reaches DDP's loss when the wire is slow.

Loss against steps does not depend on the wire: runs are bit-identical on any. So each method is trained once
without a limit, which gives the steps it takes to the target, 1.01 x ddp's final validation loss; then some steps
are timed on the limited network, and the two are multiplied.

    seconds_to_target = steps to the target x seconds of a limited step
    ratio_to_limit    = limited step / (the step without a limit + bytes / rate)
    comm_share        = 1 - the step without a limit / limited step
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from thinwire.bench.jobs import BASELINE, Job, Trained, run_job
from thinwire.bench.network import emulated_network

TARGET = 1.01
"""Of ddp's final validation loss."""
VALIDATIONS = 40
"""Per training run."""


@dataclass(frozen=True)
class Row:
    """One method on the limited network; losses and times to the target are means over seeds."""

    recipe: str
    val_loss: float
    seconds: float
    """Of all steps, validation left out."""
    seconds_to_target: float | None
    """None: not reached within the run by every seed."""
    speedup_vs_ddp: float | None
    step_seconds: float
    ratio_to_ddp_step: float
    sent_bytes_per_rank: int
    """Of all steps, by the interface's counter."""
    comm_share: float
    ratio_to_limit: float


def measure(arguments: argparse.Namespace) -> list[Row]:
    """Train and time every method; what is already in `arguments.out` is not repeated."""
    rate, ranks, out = arguments.rate, arguments.ranks, arguments.out
    steps, every = arguments.steps, max(1, arguments.steps // VALIDATIONS)
    trained: dict[str, list[Trained]] = {}
    limited, free = {}, {}
    with emulated_network(ranks, rate=rate) as slow, emulated_network(ranks) as fast:
        for method in arguments.recipes:
            timed = Job(method, 0, arguments.timed_steps, steps, 0, arguments.lr, arguments.batch_size)
            limited[method] = run_job(timed, out, f"{rate}bit", ranks, slow)
            free[method] = run_job(timed, out, "unlimited", ranks, fast)
        for seed in range(arguments.seeds):
            for method in arguments.recipes:
                job = Job(method, seed, steps, steps, every, arguments.lr, arguments.batch_size)
                trained.setdefault(method, []).append(run_job(job, out, "trained", ranks, fast))
    return compare(trained, limited, free, steps, rate)


def compare(
    trained: dict[str, list[Trained]],
    limited: dict[str, Trained],
    free: dict[str, Trained],
    steps: int,
    rate: int,
) -> list[Row]:
    """Rows from what was measured: of every method its runs of all seeds, and its steps on both networks."""
    targets = [TARGET * run.losses[-1][1] for run in trained[BASELINE]]
    reached = {method: _steps_to(targets, runs) for method, runs in trained.items()}
    rows = []
    for method, runs in trained.items():
        step, base = limited[method].step_seconds, limited[BASELINE].step_seconds
        compute, sent = free[method].step_seconds, limited[method].sent_bytes
        own, ddp = reached[method], reached[BASELINE]
        rows.append(
            Row(
                recipe=method,
                val_loss=statistics.mean(run.losses[-1][1] for run in runs),
                seconds=steps * step,
                seconds_to_target=None if own is None else own * step,
                speedup_vs_ddp=None if own is None or ddp is None else ddp * base / (own * step),
                step_seconds=step,
                ratio_to_ddp_step=step / base,
                sent_bytes_per_rank=steps * sent,
                comm_share=1 - compute / step,
                ratio_to_limit=step / (compute + 8 * sent / rate),
            )
        )
    return rows


def table(rows: Sequence[Row], arguments: argparse.Namespace) -> str:
    """The rows as aligned text."""
    lines = [
        f"{arguments.ranks} ranks, each sending and receiving at most {arguments.rate / 1e6:g} Mbit/s: times of"
        f" {arguments.timed_steps} steps, losses of {arguments.steps} without a limit, {arguments.seeds} seed(s)",
        f"{'recipe':15} {'val_loss':>9} {'MB/step':>8} {'s/step':>8} {'/ ddp':>6} {'comm':>6} {'x limit':>8}"
        f" {'to target':>10} {'sooner':>7}",
    ]
    for row in rows:
        to_target = "-" if row.seconds_to_target is None else f"{row.seconds_to_target:.0f} s"
        sooner = "-" if row.speedup_vs_ddp is None else f"{row.speedup_vs_ddp:.2f}x"
        lines.append(
            f"{row.recipe:15} {row.val_loss:9.4f} {row.sent_bytes_per_rank / arguments.steps / 1e6:8.3f}"
            f" {row.step_seconds:8.3f} {row.ratio_to_ddp_step:6.3f} {row.comm_share:6.1%}"
            f" {row.ratio_to_limit:8.2f} {to_target:>10} {sooner:>7}"
        )
    lines.append(
        f"target: {TARGET} x the final validation loss of ddp with the same seed; sooner: than ddp gets there"
    )
    return "\n".join(lines)


def _steps_to(targets: Sequence[float], runs: Sequence[Trained]) -> float | None:
    """Mean over seeds of the first validated step at or below the target; None if a seed never gets there."""
    first: list[int] = []
    for target, run in zip(targets, runs):
        there = [step for step, loss in run.losses if loss <= target]
        if not there:
            return None
        first.append(there[0])
    return sum(first) / len(first)
