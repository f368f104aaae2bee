"""What is saved, when, how many are kept, and whose checkpoints are refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.train.checkpoint.spoil import names
from tests.train.small_run import advance, content, fresh, load, rank, save_steps
from thinwire.train.checkpoint import storage
from thinwire.train.checkpoint.checkpointer import Checkpointer, CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2, 3, 4, 5], keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    with pytest.raises(ValueError, match="keep: at least one"):
        Checkpointer(tmp_path, keep=0)


def test_the_same_step_is_not_saved_twice(tmp_path: Path) -> None:
    state = fresh()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    checkpointer.save(1, state)
    checkpointer.wait()
    assert Checkpointer(tmp_path).load_latest(state) == 1
    assert names(tmp_path) == ["step-00000001"]


def _load_as(directory: Path, identity: dict[str, Any]) -> str:
    state = fresh(99)
    before = content(state)
    with pytest.raises(CheckpointError) as raised:
        Checkpointer(directory, identity=identity).load_latest(state)
    assert content(state) == before
    return str(raised.value)


def test_a_checkpoint_of_another_run_names_every_difference_on_all_ranks(tmp_path: Path) -> None:
    saved = {"recipe": "fp8", "tokenizer": "bytes", "model": {"hidden_size": 128, "layers": (1, 2)}, "seed": 3}
    run_ranks(_save_as, 2, tmp_path, saved)
    other = {"recipe": "fp8-ef", "tokenizer": "bytes", "model": {"hidden_size": 64, "layers": [1, 2]}, "clip": 1.0}
    lines = run_ranks(_load_as, 2, tmp_path, other)
    assert lines[0] == lines[1]
    for part in (
        "step-00000001 is a checkpoint of another run",
        "recipe: saved 'fp8', now 'fp8-ef'",
        "model.hidden_size: saved 128, now 64",
        "seed: saved 3, now '(absent)'",
        "clip: saved '(absent)', now 1.0",
    ):
        assert part in lines[0]
    assert "tokenizer" not in lines[0]
    assert "layers" not in lines[0], "a tuple is a list in JSON"


def _save_as(directory: Path, identity: dict[str, Any]) -> None:
    save_steps(directory, [1], identity=identity)


def _save_in_many_files(directory: Path) -> tuple[dict[int, Any], int]:
    storage._FILE_BYTES = 2000
    state = fresh()
    advance(state)
    written: list[str] = []
    original = storage.async_save
    storage.async_save = lambda tensors, **options: (written.extend(tensors), original(tensors, **options))[1]  # type: ignore[assignment]
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    checkpointer.close()
    return content(state), written


def test_every_rank_writes_its_share_in_files_of_limited_size(tmp_path: Path) -> None:
    results = run_ranks(_save_in_many_files, 3, tmp_path)
    files = sorted((tmp_path / "step-00000001").glob("*.safetensors"))
    assert len(files) > 6
    assert {path.name.split("-model")[0] for path in files} == {"shard-00001", "shard-00002", "shard-00003"}
    shared = [key for _, written in results for key in written if key.startswith(("model.", "optimizer."))]
    assert len(shared) == len(set(shared)), "nothing that is the same everywhere is copied twice"
    for (held, _), found in zip(results, run_ranks(load, 3, tmp_path)):
        assert found == (1, held)


def _other_state_on_one_rank(directory: Path) -> str:
    state = fresh()
    advance(state)
    if rank() == 1:
        del state.optimizer.state[state.model.scale]["exp_avg"]  # type: ignore[union-attr]
    with pytest.raises(CheckpointError) as raised:
        Checkpointer(directory).save(1, state)
    return str(raised.value)


def test_ranks_with_other_state_to_save_are_named(tmp_path: Path) -> None:
    for line in run_ranks(_other_state_on_one_rank, 2, tmp_path):
        assert "rank 1 and rank 0 do not have the same state to save: optimizer.exp_avg.scale ()" in line


def _save_then_change(directory: Path) -> tuple[dict[str, Any], bool]:
    may_write = threading.Event()
    original = storage.HuggingFaceStorageWriter.write_data
    storage.HuggingFaceStorageWriter.write_data = lambda *args: (may_write.wait(20), original(*args))[1]  # type: ignore[method-assign]
    state = fresh()
    advance(state)
    held = content(state)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    pending = checkpointer._pending
    assert pending is not None
    advance(state, 3)  # training goes on, its collectives on the default group
    early = pending.done()
    may_write.set()
    checkpointer.wait()
    return held, early


def test_saving_happens_behind_training_and_holds_the_moment_it_was_called(tmp_path: Path) -> None:
    results = run_ranks(_save_then_change, 2, tmp_path)
    assert [early for _, early in results] == [False, False]
    for (held, _), found in zip(results, run_ranks(load, 2, tmp_path)):
        assert found == (1, held)


def _sums_while_saving(directory: Path) -> int:
    state = fresh()
    advance(state)
    checkpointer = Checkpointer(directory, keep=1)
    wrong = 0
    for step in range(8):
        checkpointer.save(step, state)
        for i in range(25):
            x = torch.full((1000,), float(i + rank()))
            dist.all_reduce(x)
            wrong += int(bool((x != 2 * i + 1).any()))
    checkpointer.close()
    return wrong


def test_saving_does_not_disturb_the_collectives_of_training(tmp_path: Path) -> None:
    assert run_ranks(_sums_while_saving, 2, tmp_path) == [0, 0]
