"""Snapshots in the memory of the machine, from which a run goes on when torchrun starts its workers again.

`--checkpoint.snapshots /dev/shm` saves the run at the end of every round of local updates, or every 50 steps
without, as a checkpoint like those on disk. `torchrun --max-restarts N` starts all workers again when one dies;
they go on from the newest snapshot or checkpoint. The last two snapshots are kept while the run lasts.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from datetime import timedelta
from pathlib import Path

from thinwire.train.checkpoint.checkpointer import Checkpointer
from thinwire.train.checkpoint.manifest import checkpoints_in, order
from thinwire.train.config import TrainConfig
from thinwire.train.output import OutputError, checkpoints, started
from thinwire.train.run import Run

KEPT = 2
EVERY = 50
"""Steps between snapshots without local updates."""
_BYTES_PER_PARAMETER = 40
"""Of each rank at most: its weights, AdamW's two averages, the agreed weights, anchors, outer momentum, two kinds
of error memory, what is in flight."""


def was_restarted(config: TrainConfig) -> bool:
    """Whether torchrun has started these workers again, and there is something to go on from."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return restarts > 0 and config.out is not None and started(config.out)


class Savers:
    """Where a run is saved: on disk, and perhaps in memory. Every method is called on all ranks."""

    def __init__(self, run: Run, out: Path) -> None:
        """Raises OutputError where there is no room for snapshots. Those that an earlier run in `out` left are
        removed unless this one goes on with it."""
        config = run.config
        self._run = run
        self._memory_directory = _directory(config, out)
        if (directory := self._memory_directory) is not None:
            if run.rank == 0 and not config.resume:
                shutil.rmtree(directory, ignore_errors=True)
            run.agree([0.0])  # nobody counts files while they are removed
            _check_space(directory, run)
        self.disk = self._saver(checkpoints(out), config.checkpoint.keep)
        self.memory = None if directory is None else self._saver(directory, KEPT)

    def newest(self) -> Checkpointer:
        """The one that has saved the later step."""
        if self.memory is None:
            return self.disk
        found = [checkpoints_in(saver.directory) for saver in (self.memory, self.disk)]
        memory, disk = (order(newest[0])[0] if newest else -1 for newest in found)
        own = float(memory > disk) if self._run.rank == 0 else 0.0
        return self.memory if self._run.agree([own])[0] else self.disk

    def snapshot_is_due(self, step: int) -> bool:
        """After this step."""
        if self.memory is None:
            return False
        sync = self._run.sync
        return sync.between_rounds if sync is not None else step % EVERY == 0

    def wait(self) -> None:
        """Until what is being saved is; raises its CheckpointError."""
        self.disk.wait()

    def close(self, *, over: bool = False) -> None:
        """Wait and give the process groups back; `over`: the snapshots are not needed any more."""
        self.disk.close()
        if self.memory is not None:
            self.memory.close()
            if over and self._run.rank == 0:
                shutil.rmtree(self.memory.directory, ignore_errors=True)

    def _saver(self, directory: Path, keep: int) -> Checkpointer:
        run = self._run
        timeout = timedelta(seconds=run.config.timeout)
        tokenizer = run.train_data.tokenizer
        return Checkpointer(directory, keep=keep, identity=run.identity, tokenizer=tokenizer, timeout=timeout)


def _directory(config: TrainConfig, out: Path) -> Path | None:
    where = config.checkpoint.snapshots
    if where is None:
        return None
    return where / f"thinwire-{hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]}"


def _check_space(directory: Path, run: Run) -> None:
    """One snapshot is written while two are kept."""
    needed = (KEPT + 1) * _BYTES_PER_PARAMETER * run.parameters * run.world_size
    try:
        present = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        free = shutil.disk_usage(directory.parent).free + present
    except OSError as error:
        raise OutputError(f"checkpoint.snapshots: {directory.parent}: {error.strerror or error}") from error
    if free < needed:
        raise OutputError(
            f"checkpoint.snapshots: {directory.parent} has {free / 1e6:.0f} MB free, and three snapshots of this "
            f"run take up to {needed / 1e6:.0f} MB: make room, or leave the snapshots out"
        )
