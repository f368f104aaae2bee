"""The training loop.

Each step:
    1. control all-reduce: the tokens of all ranks in this step, and whether a rank was asked to stop
    2. forward and backward of every micro-batch, all but the last under `no_sync`; the last one's backward
       averages the gradients. Losses are scaled by W / (tokens of all ranks), so the mean over ranks is the
       mean over tokens
    3. a norm that is not finite is the same on every rank: all skip the step together, and say which rank's
       loss it was
    4. clip, optimizer step; now and then log, validate, checkpoint

A stop request (SIGTERM, SIGINT) reaches every rank in 1, so all of them checkpoint the same step.
"""

from __future__ import annotations

import logging
import math
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from thinwire.data_parallel.fsdp import reshard
from thinwire.local_update import LocalUpdate
from thinwire.train import files, metrics
from thinwire.train.arguments import to_table, to_toml
from thinwire.train.checkpoint.checkpointer import Checkpointer, CheckpointError
from thinwire.train.checkpoint.state import TrainState
from thinwire.train.config import TrainConfig
from thinwire.train.optimizer import gradient_norm, learning_rate, set_learning_rate, set_settings, settings
from thinwire.train.output import CONFIG, resuming
from thinwire.train.parallel import accumulating, is_in_shards
from thinwire.train.progress import Progress
from thinwire.train.run import Run, assemble, count_targets, fetch, summed_loss
from thinwire.train.snapshots import Savers

logger = logging.getLogger(__name__)


class TrainingError(RuntimeError):
    """Training cannot go on; one line that says at which step and why."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended on this rank."""

    step: int
    finished: bool  # False: stopped by a signal, to be resumed
    summary: dict[str, Any] | None = None  # of a finished run


@dataclass(frozen=True)
class Step:
    """What one step did, on this rank."""

    loss_sum: float  # over this rank's targets
    targets: int  # of all ranks
    norm: float  # of the mean gradient, the same on all ranks
    own: bool = False  # under local updates: targets and norm are this rank's

    @property
    def skipped(self) -> bool:
        """Whether this rank has thrown the gradient away."""
        return not math.isfinite(self.norm)

    @property
    def bad(self) -> bool:
        """Whether all have."""
        return self.skipped and not self.own


def train(
    config: TrainConfig, out: Path, device: torch.device, *, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Train as configured, in a process group that is up. Every rank calls this; `out` is the same directory."""
    run = assemble(config, device)
    progress = Progress()
    state = TrainState(run.model, run.optimizers, run.sync or run.link, progress.numbers(), seed=config.seed)
    savers = Savers(run, out)
    if config.resume:
        progress = _resume(run, savers.newest(), state)
    log = _open_log(run, out, progress)
    try:
        finished = _steps(run, progress, savers, state, log, stop)
        savers.wait()
        summary = _summary(run, progress) if finished else None
    except TrainingError:  # on all ranks alike, so a save in flight can still end well
        savers.close()
        raise
    finally:
        if log is not None:
            log.close()
    if log is not None:
        if summary is not None:
            log.finish(summary, progress.ddp_bytes)
        else:
            log.say(f"stopped at step {progress.step} of {config.steps}; {resuming(out)}")
    savers.close(over=True)
    run.averaging.detach()
    return Outcome(progress.step, finished, summary)


def _steps(
    run: Run,
    progress: Progress,
    savers: Savers,
    state: TrainState,
    log: metrics.RunLog | None,
    stop: Callable[[], bool],
) -> bool:
    """Steps until the last one (True) or a request to stop (False); the state is saved in both cases."""
    config = run.config
    logged, tokens = time.perf_counter(), progress.tokens
    while progress.step < config.steps:
        started = time.perf_counter()
        sent, waited = run.averaging.sent_bytes, run.averaging.exposed_seconds
        step = training_step(run, progress, stop)
        if step is None:
            _save(run, progress, savers.disk, state)
            return False
        _count(run, progress, step)
        last = progress.step == config.steps
        validates = last or (config.validation_every and progress.step % config.validation_every == 0)
        now = time.perf_counter()
        if validates or step.bad or progress.step % config.logging.every == 0:
            loss = _mean_loss(run, progress, step)
            progress.train_loss = progress.train_loss if step.bad else loss
            progress.val_loss = validate(run) if validates else progress.val_loss
            if log is not None:
                log.step(
                    metrics.StepMetrics(
                        step=progress.step,
                        loss=loss,
                        lr=learning_rate(progress.step - 1, config),
                        gradient_norm=step.norm,
                        sent_bytes=run.averaging.sent_bytes - sent,
                        step_seconds=now - started,
                        comm_seconds=run.averaging.exposed_seconds - waited,
                        tokens_per_second=(progress.tokens - tokens) / (now - logged),
                        tokens=progress.tokens,
                        skipped_steps=progress.skipped_steps,
                        val_loss=progress.val_loss if validates else None,
                    )
                )
                log.fidelity(progress.step, run.link.fidelity)
            logged, tokens = time.perf_counter(), progress.tokens
        if progress.bad_in_a_row >= config.max_bad_steps:
            raise TrainingError(
                f"step {progress.step}: {progress.bad_in_a_row} steps in a row (max_bad_steps) had a loss or "
                "gradient that is not finite; checkpoints of earlier steps are untouched"
            )
        if last and step.bad:
            _end_in_a_bad_step(run, progress)
        every = config.checkpoint.every
        # In a bad streak nothing is saved: one more checkpoint of a diverged run would displace a good one.
        if last or (every and progress.step % every == 0 and not step.bad):
            _save(run, progress, savers.disk, state)
        elif savers.memory is not None and savers.snapshot_is_due(progress.step) and not step.bad:
            _save(run, progress, savers.memory, state)
    return True


def training_step(run: Run, progress: Progress, stop: Callable[[], bool]) -> Step | None:
    """One optimizer step; None if a rank was asked to stop, and then nothing has happened."""
    config = run.config
    batches = [fetch(run.train_data, ids, run.device) for ids in run.shares(progress.position)]
    targets = float(sum(count_targets(batch) for batch in batches))
    if run.sync is None:
        targets, stops = run.agree([targets, stop()])
        if stops:
            return None
        scale = run.world_size / max(1.0, targets)
    else:  # the mean over its own tokens
        if run.sync.between_rounds and run.agree([stop()])[0]:
            return None
        scale = 1 / max(1.0, targets)
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.device)
    for n, batch in enumerate(batches):
        # The forward belongs under no_sync too: DDP prepares the reduction there.
        with nullcontext() if n == len(batches) - 1 else accumulating(run.wrapped):
            with run.autocast():
                loss = summed_loss(run.wrapped, batch)
            (loss * scale).backward()
        loss_sum += loss.detach()
    norm = gradient_norm(run.model.parameters(), config.optimizer.clip)
    step = Step(float(loss_sum), max(1, int(targets)), norm, own=run.sync is not None)
    set_learning_rate(run.optimizers, learning_rate(progress.step, config))
    if step.skipped:
        run.link.rollback()  # every mean may be finite and the norm of all of them not
    else:
        for optimizer in run.optimizers:
            optimizer.step()
    run.wrapped.zero_grad(set_to_none=True)
    if run.sync is not None:
        _end_of_own_step(run, run.sync, progress, step)
    return step


def _end_of_own_step(run: Run, sync: LocalUpdate, progress: Progress, step: Step) -> None:
    """Under local updates: count the step, and average what is due after it."""
    progress.count_own(step.targets, skipped=step.skipped)
    if step.skipped:
        logger.warning("step %d skipped here: loss or gradient is not finite", progress.step + 1)
    ended = sync.step(step.targets if run.uneven else None)
    last, every = progress.step + 1 == run.config.steps, run.config.verify_every
    if last:
        sync.finish()
    if every and (ended or last) and (sync.steps // every > sync.verified // every or last):
        sync.verify()


def _mean_loss(run: Run, progress: Progress, step: Step) -> float:
    """The loss of the step over all ranks' tokens. A collective call."""
    if run.sync is None:
        (loss_sum,) = run.agree([step.loss_sum])
        return loss_sum / step.targets
    progress.add_up(run)
    loss_sum, targets = run.agree([step.loss_sum, step.targets])
    return loss_sum / targets


def validate(run: Run) -> float:
    """The mean loss of the validation samples in nats per byte of text, each rank taking its share."""
    count = run.validation_data.num_sequences
    own = list(range(count))[run.rank :: run.world_size]
    # A pass over shards is collective: a rank without samples of its own takes part.
    most = -(-count // run.world_size) if is_in_shards(run.wrapped) else len(own)
    at_once = max(1, run.config.batch_size // (run.world_size * run.config.accumulation))
    loss_sum, targets = 0.0, 0
    run.model.eval()
    agreed = run.sync.agreed() if run.sync is not None else nullcontext()
    with agreed, torch.no_grad(), run.autocast():
        for start in range(0, most, at_once):
            ids = own[start : start + at_once]
            batch = fetch(run.validation_data, ids or [0], run.device)
            loss = float(summed_loss(run.model, batch))
            if ids:
                loss_sum += loss
                targets += count_targets(batch)
    run.model.train()
    reshard(run.model)
    total, among = run.agree([loss_sum, targets])
    return total / max(1.0, among) / run.validation_data.bytes_per_token


def _count(run: Run, progress: Progress, step: Step) -> None:
    """Move the counters past a step, and say whose loss was bad if it was."""
    progress.step += 1
    progress.position += run.config.batch_size
    if not step.own:
        progress.tokens += step.targets
    progress.bad_in_a_row = progress.bad_in_a_row + 1 if step.skipped else 0
    if step.bad:
        progress.skipped_steps += 1
        rows = run.table([not math.isfinite(step.loss_sum)])
        ranks = [str(rank) for rank, (bad,) in enumerate(rows) if bad]
        cause = f"the loss on rank {', '.join(ranks)}" if ranks else "the gradient (every rank's loss was finite)"
        if run.rank == 0:
            logger.warning(
                "step %d skipped on all ranks: %s is not finite (%d in a row, at most %d)",
                progress.step,
                cause,
                progress.bad_in_a_row,
                run.config.max_bad_steps,
            )


def _end_in_a_bad_step(run: Run, progress: Progress) -> None:
    """Say what the result is, if there is one: a step that was skipped has trained nothing."""
    if progress.skipped_steps == progress.step:
        raise TrainingError(
            f"step {progress.step}: no step of this run had a finite loss and gradient, so nothing was trained"
        )
    if run.rank == 0:
        logger.warning(
            "steps skipped at the end of the run: %d; the result is the parameters after step %d",
            progress.bad_in_a_row,
            progress.step - progress.bad_in_a_row,
        )


def _save(run: Run, progress: Progress, checkpointer: Checkpointer, state: TrainState) -> None:
    run.link.settle()  # what that sends is of the steps before
    if run.sync is not None:
        run.sync.wait()  # likewise
        progress.add_up(run)
    progress.measure(run)
    state.numbers.update(progress.numbers())
    checkpointer.save(progress.step, state)


def _resume(run: Run, checkpointer: Checkpointer, state: TrainState) -> Progress:
    chosen = settings(run.optimizers)
    step = checkpointer.load_latest(state)
    set_settings(run.optimizers, chosen)  # a weight decay that a flag has changed is not to be the saved one
    if step is None:
        if run.rank == 0:
            logger.warning("%s has no checkpoint yet: starting from the beginning", checkpointer.directory)
        return Progress()
    if step > run.config.steps:
        raise CheckpointError(
            f"the newest checkpoint is of step {step}, after the last of --steps {run.config.steps}"
        )
    return Progress.of(state.numbers, run)


def _open_log(run: Run, out: Path, progress: Progress) -> metrics.RunLog | None:
    if run.rank != 0:
        return None
    config = run.config
    baseline = metrics.Baseline.of(run.parameters, run.world_size, config.precision, config.parallel)
    out.mkdir(parents=True, exist_ok=True)
    files.replace(out / CONFIG, to_toml(replace(config, out=None, resume=False)))  # first: --resume relies on it
    log = metrics.RunLog(out, config.logging, baseline, first_step=progress.step, steps=config.steps)
    workers = "worker" if run.world_size == 1 else "workers"
    start = f"resuming after step {progress.step}" if progress.step else "starting"
    log.say(
        f"{start}: {config.model.name} with {run.parameters:,} parameters, recipe {config.recipe}, "
        f"{run.world_size} {workers} on {run.device.type}, {run.train_data.num_tokens:,} tokens of text; {out}"
    )
    return log


def _summary(run: Run, progress: Progress) -> dict[str, Any]:
    """The contents of summary.json. A collective call."""
    if progress.val_loss is None:
        progress.val_loss = validate(run)
    progress.measure(run)
    peak = max(row[0] for row in run.table([_peak_memory(run)]))
    config, sent = run.config, max(progress.sent_bytes)
    return {
        "recipe": config.recipe,
        "world_size": run.world_size,
        "steps": progress.step,
        "tokens": progress.tokens,
        "final_train_loss": progress.train_loss,
        "val_loss": progress.val_loss,
        "sent_bytes_per_rank": sent,
        "sent_bytes_between_groups_per_rank": max(progress.between_groups_bytes),
        "sent_bytes_per_param_per_step": sent / run.parameters / max(1, progress.step),
        "wall_seconds": progress.wall_seconds,
        "comm_seconds": max(progress.comm_seconds),
        "hidden_comm_seconds": max(
            max(0.0, sending - exposed)
            for sending, exposed in zip(progress.sending_seconds, progress.comm_seconds)
        ),
        "encode_seconds": max(progress.encode_seconds),
        "tokens_per_second": progress.tokens / max(1e-9, progress.wall_seconds),
        "peak_memory_bytes": int(peak),
        "parameters": run.parameters,
        "seed": config.seed,
        "param_hash": metrics.parameter_hash(run.model),
        "skipped_steps": progress.skipped_steps,
        "corpus_hash": run.train_data.corpus_hash,
        "torch_version": torch.__version__,
        "config": to_table(config),
    }


def _peak_memory(run: Run) -> float:
    """Bytes: of the device on CUDA, else the largest resident size of this process."""
    if run.device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(run.device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
