"""A kill at any instant leaves the last complete checkpoint, and what it left half done goes."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RankFailed, run_ranks
from tests.train.checkpoint.spoil import die, die_after, die_before, names
from tests.train.small_run import advance, content, fresh, load, save_steps
from thinwire.train.checkpoint import checkpointer as checkpointing
from thinwire.train.checkpoint import manifest, storage
from thinwire.train.checkpoint.checkpointer import Checkpointer, checkpoints_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _in_the_middle_of_a_file() -> None:
    from torch.distributed.checkpoint import filesystem

    def half(create_stream: Any, file_queue: Any, **options: Any) -> None:
        path, _, items = file_queue.get_nowait()
        assert items
        path.write_bytes(b"\x00" * 1000)
        die()

    filesystem._write_files_from_queue = half


def _in_the_middle_of_the_manifest() -> None:
    def half(self: Any, directory: Path) -> None:
        (directory / "manifest.json").write_text('{"format_version": 1, "step"')
        die()

    manifest.Manifest.write = half  # type: ignore[method-assign]


def _in_the_middle_of_removing() -> None:
    def half(directory: Path, **options: Any) -> None:
        next(iter(sorted(directory.iterdir()))).unlink()
        die()

    manifest.shutil = type("half", (), {"rmtree": half})  # type: ignore[assignment]


STAGES: dict[str, tuple[Callable[[], None], int]] = {  # and the step that is there afterwards
    "before anything is written": (
        lambda: die_before(storage.HuggingFaceStorageWriter, "set_up_storage_writer"),
        1,
    ),
    "in the middle of a file": (_in_the_middle_of_a_file, 1),
    "after the files": (lambda: die_after(storage.HuggingFaceStorageWriter, "finish"), 1),
    "before the checksums": (lambda: die_before(Checkpointer, "_checksums"), 1),
    "before the manifest": (lambda: die_before(Checkpointer, "_commit"), 1),
    "in the middle of the manifest": (_in_the_middle_of_the_manifest, 1),
    "before the rename": (lambda: die_before(checkpointing, "commit"), 1),
    "after the rename": (lambda: die_after(checkpointing, "commit"), 2),
    "in the middle of removing the older one": (_in_the_middle_of_removing, 2),
}


def _save_once_and_die_in_the_second(directory: Path, stage: str) -> None:
    state = fresh()
    checkpointer = Checkpointer(directory, keep=1)
    advance(state)
    checkpointer.save(1, state)
    checkpointer.wait()
    STAGES[stage][0]()
    advance(state)
    checkpointer.save(2, state)
    checkpointer.wait()


@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_any_instant_leaves_the_last_complete_checkpoint(
    tmp_path: Path, two_steps: tuple[Path, list[dict[int, Any]]], stage: str
) -> None:
    results = run_ranks(_save_once_and_die_in_the_second, 2, tmp_path, stage, check=False)
    assert isinstance(results[0], RankFailed)
    assert "exit code -9" in str(results[0])
    step = STAGES[stage][1]
    for held, found in zip(two_steps[1], run_ranks(load, 2, tmp_path)):
        assert found == (step, held[step])


def _save_forever(directory: Path) -> None:
    torch.set_num_threads(1)
    state = fresh()
    checkpointer = Checkpointer(directory, keep=2)
    for step in range(1, 10_000):
        advance(state)
        checkpointer.save(step, state)


def test_killed_at_random_instants_it_always_finds_a_complete_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(4)
    context = multiprocessing.get_context("forkserver")
    for number in range(6):
        directory = tmp_path / str(number)
        process = context.Process(target=_save_forever, args=(directory,))
        process.start()
        deadline = time.monotonic() + 30
        while not checkpoints_in(directory) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
        process.kill()
        process.join()
        step, found = load(directory)
        assert step is not None
        again = fresh()
        advance(again, step)
        assert found == content(again)


def test_what_a_kill_left_behind_is_removed_by_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-step-00000007").mkdir()
    (tmp_path / ".unfinished-step-00000007" / "shard-00009-model-00001-of-00001.safetensors").write_bytes(b"?")
    (tmp_path / ".unfinished-step-00000003").mkdir()
    assert load(tmp_path)[0] is None
    save_steps(tmp_path, [7])
    assert names(tmp_path) == ["step-00000007"]
    assert load(tmp_path)[0] == 7


def _sweep_slowly(directory: Path, stale: Path) -> None:
    sweep, prepare = storage.sweep, storage.HuggingFaceStorageWriter.prepare_local_plan

    def prepare_local_plan(self: Any, plan: Any) -> Any:
        assert not stale.exists()
        return prepare(self, plan)

    storage.HuggingFaceStorageWriter.prepare_local_plan = prepare_local_plan  # type: ignore[method-assign]
    storage.sweep = lambda parent: (time.sleep(0.3), sweep(parent))[1]
    save_steps(directory, [7])


def test_no_rank_begins_to_write_before_that(tmp_path: Path) -> None:
    stale = tmp_path / ".unfinished-step-00000007" / "shard-00009-model-00001-of-00001.safetensors"
    stale.parent.mkdir()
    stale.write_bytes(b"?")
    run_ranks(_sweep_slowly, 3, tmp_path, stale)
    assert names(tmp_path) == ["step-00000007"]
