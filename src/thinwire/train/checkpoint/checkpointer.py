"""Checkpoints that a kill at any instant cannot spoil.

    1. On the main thread every rank copies its share of the state to host memory (`async_save` does that
       before it returns).
    2. In the background, torch.distributed.checkpoint writes safetensors files into a directory with a
       temporary name.
    3. Every rank checksums its share; rank 0 writes the manifest last, syncs, and renames the directory.
    4. Only then is the oldest of the `keep` + 1 checkpoints removed.

Steps 2 and 3 have a process group of their own and one thread. Whatever fails on one rank before the rename
fails on all: the files are removed, the error is raised by the next `save` or `wait`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from thinwire.train.checkpoint import storage
from thinwire.train.checkpoint.manifest import (
    JSON,
    CheckpointError,
    Damaged,
    Manifest,
    checkpoints_in,
    commit,
    differences,
    order,
    remove,
    temporary,
)
from thinwire.train.checkpoint.ranks import Ranks, kind_and_line
from thinwire.train.checkpoint.saved import json_value
from thinwire.train.checkpoint.state import TrainState, collect, restore, unwrapped
from thinwire.train.checkpoint.storage import first_failure, open_saved
from thinwire.train.data.tokenizers import TokenizerInfo
from thinwire.train.files import sha256

__all__ = ["CheckpointError", "Checkpointer", "checkpoints_in"]

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves to and loads from one directory. Every method is called on all ranks, at the same step boundary,
    from the main thread."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int = 3,
        identity: Mapping[str, JSON] | None = None,
        tokenizer: TokenizerInfo | None = None,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        """`identity`: what the run is (recipe, model, tokenizer, ...); a checkpoint in which any of it
        differs is refused by name. `tokenizer`: of the data, so that export can add it to the model.
        `group`: a gloo group of its own; made here if there is none."""
        if keep < 1:
            raise ValueError(f"keep: at least one checkpoint has to be kept, got {keep}")
        self._owned = group is None and dist.is_available() and dist.is_initialized()
        if self._owned:
            group = dist.new_group(backend="gloo", timeout=timeout)
        self.directory = directory
        self._keep = keep
        self._identity = json_value("identity", identity or {})
        self._tokenizer = None if tokenizer is None else json_value("tokenizer", asdict(tokenizer))
        self._ranks = Ranks(group)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._saved: int | None = None  # the step of the last save or load
        self._damaged: set[str] = set()

    def save(self, step: int, state: TrainState) -> None:
        """Copy the state now and write it in the background; the step that was saved last is not saved again.

        Waits for the previous save, and raises its `CheckpointError` (on all ranks alike).
        """
        self.wait()
        if step == self._saved:
            return
        tensors, numbers = collect(state, self._ranks)
        manifest = Manifest(
            step=step,
            world_size=self._ranks.size,
            torch_version=torch.__version__,
            identity=self._identity,
            numbers=json_value("numbers", state.numbers),
            state=numbers,
            model_config=_config(state.model),
            tokenizer=self._tokenizer,
        )
        written = temporary(self.directory, step)
        with self._ranks.explaining(f"step {step} could not be saved"):
            upload = storage.write(tensors, written, self._ranks)
        self._saved = step
        self._pending = self._thread.submit(self._finish, upload, manifest, written)

    def wait(self) -> None:
        """Until the save in flight is a checkpoint; raises its `CheckpointError`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except BaseException:
                self._saved = None
                raise

    def close(self) -> None:
        """Wait, then give the process group back. Raises nothing: call `wait` to learn how a save ended."""
        try:
            self.wait()
        except Exception as error:
            logger.error("%s", error)
        self._thread.shutdown()
        if self._owned:
            dist.destroy_process_group(self._ranks.group)

    # -- writing -------------------------------------------------------------------------------------------

    def _finish(self, upload: Future[Any], manifest: Manifest, written: Path) -> None:
        """On the checkpoint thread of every rank: from written files to a checkpoint.

        After a lost peer it is unknown what the others see, so nothing is removed.
        """
        with self._ranks.explaining(f"step {manifest.step} could not be saved"):
            try:
                upload.result()
            except CheckpointException as error:  # the same on all ranks, and none is writing any more
                self._give_up(manifest.step, written, first_failure(error))
            problem = None
            try:
                report = self._checksums(written)
            except OSError as error:
                report, problem = {}, f"rank {self._ranks.rank}: {error}"
            reports = self._ranks.all_gather((report, problem))
            problem = self._ranks.broadcast(
                self._commit(manifest, written, reports) if not self._ranks.rank else None
            )
            if problem:
                self._give_up(manifest.step, written, problem)

    def _checksums(self, written: Path) -> dict[str, dict[str, JSON]]:
        """Size of every file, and the checksum of this rank's share of them."""
        files = sorted(written.glob("*.safetensors"))
        return {
            path.name: {
                "bytes": path.stat().st_size,
                "sha256": sha256(path) if number % self._ranks.size == self._ranks.rank else None,
            }
            for number, path in enumerate(files)
        }

    def _commit(
        self, manifest: Manifest, written: Path, reports: list[tuple[dict[str, dict[str, JSON]], str | None]]
    ) -> str | None:
        """On rank 0: manifest, rename, removal of the oldest. Returns what went wrong."""
        for _, problem in reports:
            if problem:
                return problem
        names = sorted(reports[0][0])
        for rank, (report, _) in enumerate(reports):
            if sorted(report) != names:
                return (
                    f"rank {rank} sees {len(report)} files there, rank 0 sees {len(names)}: "
                    "the directory has to be on a file system that all nodes share"
                )
        for number, name in enumerate(names):
            manifest.files[name] = reports[number % len(reports)][0][name]
        try:
            manifest.write(written)
            committed = commit(written, manifest.step)
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            return f"rank 0: {kind_and_line(error)}"
        size = sum(entry["bytes"] for entry in manifest.files.values())
        logger.info("saved step %d in %s (%.1f MB)", manifest.step, committed, size / 1e6)
        self._prune(committed)
        return None

    def _prune(self, committed: Path) -> None:
        """Remove what is older than the last `keep`; a checkpoint known as damaged is not one of those."""
        older = [path for path in checkpoints_in(self.directory) if order(path) < order(committed)]
        kept = [committed, *(path for path in older if path.name not in self._damaged)][: self._keep]
        if len(kept) < self._keep:
            return
        for path in older:
            if order(path) < order(kept[-1]):
                try:
                    remove(path)
                except OSError as error:
                    logger.warning("%s could not be removed: %s", path, error)

    def _give_up(self, step: int, written: Path, problem: str) -> None:
        if self._ranks.rank == 0:
            shutil.rmtree(written, ignore_errors=True)
        raise CheckpointError(
            f"step {step} could not be saved in {self.directory}: {problem}. The training state and the "
            "earlier checkpoints are intact, the unfinished files are removed"
        )

    # -- reading -------------------------------------------------------------------------------------------

    def load_latest(self, state: TrainState) -> int | None:
        """Fill `state` from the newest complete checkpoint and return its step; None where there is none.

        Damaged checkpoints are skipped with a line that says why, and left where they are. Call this last
        before the loop: it sets the random generators. Raises `CheckpointError` where there are checkpoints
        and none is usable, or where the newest complete one is another run's.
        """
        self.wait()
        with self._ranks.explaining(f"the checkpoints in {self.directory} could not be read"):
            found, damaged = self._find()
            self._damaged |= damaged.keys()
            if found is not None:
                for name, problem in damaged.items() if self._ranks.rank == 0 else ():
                    logger.warning("skipping the damaged checkpoint %s: %s", self.directory / name, problem)
                directory, manifest = found
                self._load(directory, manifest, state)
                self._saved = manifest.step
                return manifest.step
        if damaged:
            problems = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
            raise CheckpointError(f"no usable checkpoint in {self.directory}: {problems}")
        return None

    def _find(self) -> tuple[tuple[Path, Manifest] | None, dict[str, str]]:
        """The newest complete checkpoint, and the newer ones that are damaged: what is wrong, by name."""
        damaged: dict[str, str] = {}
        for name in self._names():
            manifest, problem = self._examine(self.directory / name)
            if manifest is not None:
                return (self.directory / name, manifest), damaged
            damaged[name] = problem
        return None, damaged

    def _names(self) -> list[str]:
        """Newest first, as rank 0 sees them."""
        names: list[str] = []
        problem = None
        if self._ranks.rank == 0:
            try:
                names = [path.name for path in checkpoints_in(self.directory)]
            except OSError as error:
                problem = f"the checkpoints in {self.directory} cannot be read: {error}"
        names, problem = self._ranks.broadcast((names, problem))
        if problem:
            raise CheckpointError(problem)
        return names

    def _examine(self, directory: Path) -> tuple[Manifest | None, str]:
        """The manifest if everything that it names is there and right, else what is wrong; agreed by all.

        Rank 0 reads the manifest; every rank looks for all files and checks the sums of its share.
        """
        manifest, error, problem = None, None, ""
        if self._ranks.rank == 0:
            try:
                manifest = Manifest.read(directory)
            except Damaged as damage:
                problem = str(damage)
            except CheckpointError as newer:
                error = newer
        manifest, error, problem = self._ranks.broadcast((manifest, error, problem))
        if error is not None:
            raise error
        if manifest is None:
            return None, problem
        try:
            manifest.verify(directory, part=self._ranks.rank, parts=self._ranks.size)
        except Damaged as damage:
            problem = str(damage)
        problems = [found for found in self._ranks.all_gather(problem) if found]
        return (None, problems[0]) if problems else (manifest, "")

    def _load(self, directory: Path, manifest: Manifest, state: TrainState) -> None:
        saved = open_saved(directory, manifest, self._ranks)
        saved.refuse(differences(manifest.identity, self._identity))
        if manifest.torch_version != torch.__version__ and self._ranks.rank == 0:
            logger.warning(
                "%s was written with torch %s, this is %s: what follows may differ in the last bits",
                directory,
                manifest.torch_version,
                torch.__version__,
            )
        restore(state, saved, self._ranks)
        state.numbers.update(manifest.numbers)


def _config(model: nn.Module) -> dict[str, JSON] | None:
    """The Hugging Face config, from which export builds the model."""
    config = getattr(unwrapped(model), "config", None)
    to_dict = getattr(config, "to_dict", None)
    return json_value("model.config", to_dict()) if callable(to_dict) else None
