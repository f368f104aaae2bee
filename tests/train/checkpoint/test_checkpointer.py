from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, run_ranks
from tests.train.small_run import advance, content, fresh, load, rank, save_steps
from thinwire.train.checkpoint import checkpointer as checkpointing
from thinwire.train.checkpoint import manifest, storage
from thinwire.train.checkpoint.checkpointer import Checkpointer, CheckpointError, checkpoints_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _tree(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


# -- a kill at any instant ---------------------------------------------------------------------------------


def _before(owner: Any, name: str) -> None:
    setattr(owner, name, lambda *args, **options: _die())


def _after(owner: Any, name: str) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: (original(*args, **options), _die()))


def _in_the_middle_of_a_file() -> None:
    from torch.distributed.checkpoint import filesystem

    def half(create_stream: Any, file_queue: Any, **options: Any) -> None:
        path, _, items = file_queue.get_nowait()
        assert items
        path.write_bytes(b"\x00" * 1000)
        _die()

    filesystem._write_files_from_queue = half


def _in_the_middle_of_the_manifest() -> None:
    def half(self: Any, directory: Path) -> None:
        (directory / "manifest.json").write_text('{"format_version": 1, "step"')
        _die()

    manifest.Manifest.write = half  # type: ignore[method-assign]


def _in_the_middle_of_removing() -> None:
    def half(directory: Path, **options: Any) -> None:
        next(iter(sorted(directory.iterdir()))).unlink()
        _die()

    manifest.shutil = type("half", (), {"rmtree": half})  # type: ignore[assignment]


STAGES: dict[str, tuple[Callable[[], None], int]] = {  # and the step that is there afterwards
    "before anything is written": (lambda: _before(storage.HuggingFaceStorageWriter, "set_up_storage_writer"), 1),
    "in the middle of a file": (_in_the_middle_of_a_file, 1),
    "after the files": (lambda: _after(storage.HuggingFaceStorageWriter, "finish"), 1),
    "before the checksums": (lambda: _before(Checkpointer, "_checksums"), 1),
    "before the manifest": (lambda: _before(Checkpointer, "_commit"), 1),
    "in the middle of the manifest": (_in_the_middle_of_the_manifest, 1),
    "before the rename": (lambda: _before(checkpointing, "commit"), 1),
    "after the rename": (lambda: _after(checkpointing, "commit"), 2),
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


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, Any]]]:
    """A directory with steps 1 and 2 of a run on two ranks, and what it held at each. Copy it before use."""
    directory = tmp_path_factory.mktemp("two_steps")
    return directory, run_ranks(save_steps, 2, directory, [1, 2])


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
    assert _names(tmp_path) == ["step-00000007"]
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
    assert _names(tmp_path) == ["step-00000007"]


# -- how many are kept -------------------------------------------------------------------------------------


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2, 3, 4, 5], keep=2)
    assert _names(tmp_path) == ["step-00000004", "step-00000005"]
    with pytest.raises(ValueError, match="keep: at least one"):
        Checkpointer(tmp_path, keep=0)


def test_the_same_step_is_not_saved_twice(tmp_path: Path) -> None:
    state = fresh()
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state)
    checkpointer.save(1, state)
    checkpointer.wait()
    assert Checkpointer(tmp_path).load_latest(state) == 1
    assert _names(tmp_path) == ["step-00000001"]


def test_after_falling_back_the_damaged_one_is_neither_overwritten_nor_counted(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2, 3], keep=3)
    damaged = _flip_a_byte(tmp_path / "step-00000003")
    state = fresh()
    checkpointer = Checkpointer(tmp_path, keep=2)
    assert checkpointer.load_latest(state) == 2
    checkpointer.save(3, state)
    checkpointer.wait()
    assert _names(tmp_path) == ["step-00000002", "step-00000003", "step-00000003-1"]
    assert _tree(tmp_path / "step-00000003") == damaged
    assert load(tmp_path) == (3, content(state))
    checkpointer.save(4, state)
    checkpointer.wait()
    assert _names(tmp_path) == ["step-00000003-1", "step-00000004"]


# -- damaged checkpoints -----------------------------------------------------------------------------------


def _flip_a_byte(directory: Path) -> dict[str, bytes]:
    path = sorted(directory.glob("*.safetensors"))[-1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    return _tree(directory)


def _truncate(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (_flip_a_byte, r"shard-00002-model-00001-of-00001.safetensors has another checksum"),
    "a truncated file": (_truncate, r"shard-00001-\S+ has \d+ bytes instead of \d+"),
    "a lost file": (lambda d: sorted(d.glob("*.safetensors"))[1].unlink(), r"shard-00002-\S+ is missing"),
    "a file too many": (lambda d: shutil.copy(*_twin(d)), r"shard-00009.safetensors is not in manifest.json"),
    "no manifest": (lambda d: (d / "manifest.json").unlink(), r"manifest.json is missing"),
    "half a manifest": (lambda d: _halve(d / "manifest.json"), r"manifest.json cannot be read \(.*\)"),
    "an empty manifest": (
        lambda d: (d / "manifest.json").write_text("{}"),
        r"manifest.json is not one of a check",
    ),
    "a foreign manifest": (
        lambda d: (d / "manifest.json").write_text("[1]"),
        r"manifest.json is not one of a check",
    ),
    "an empty directory": (lambda d: [path.unlink() for path in d.iterdir()], r"manifest.json is missing"),
}


def _halve(path: Path) -> None:
    path.write_text(path.read_text()[: path.stat().st_size // 2])


def _twin(directory: Path) -> tuple[Path, Path]:
    return sorted(directory.glob("*.safetensors"))[0], directory / "shard-00009.safetensors"


def _load_and_listen(directory: Path) -> tuple[int | None, dict[str, Any], list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("thinwire.train").addHandler(handler)
    return (*load(directory), lines)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_skipped_and_left_alone(
    tmp_path: Path, two_steps: tuple[Path, list[dict[int, Any]]], damage: str
) -> None:
    shutil.copytree(two_steps[0], tmp_path, dirs_exist_ok=True)
    spoil, line = DAMAGES[damage]
    spoil(tmp_path / "step-00000002")
    before = _tree(tmp_path)
    results = run_ranks(_load_and_listen, 2, tmp_path)
    for kept, (step, found, _) in zip(two_steps[1], results):
        assert (step, found) == (1, kept[1])
    assert len(results[0][2]) == 1
    assert re.search(rf"skipping the damaged checkpoint .*step-00000002: {line}", results[0][2][0])
    assert results[1][2] == [], "rank 0 speaks"
    assert _tree(tmp_path) == before
    assert (tmp_path / "step-00000002").is_dir()


def test_if_all_are_damaged_that_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2])
    _truncate(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no usable checkpoint in .*step-00000002: manifest.json is missing; step-00000001: shard",
    ):
        load(tmp_path)


def test_a_newer_format_is_refused_and_not_fallen_back_from(tmp_path: Path) -> None:
    save_steps(tmp_path, [1, 2])
    path = tmp_path / "step-00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 2}))
    with pytest.raises(
        CheckpointError, match=r"step-00000002/manifest.json has format_version 2, .* up to 1: use a newer"
    ):
        load(tmp_path)


def test_a_manifest_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    save_steps(tmp_path, [1])
    path = tmp_path / "step-00000001" / "manifest.json"
    path.write_text(path.read_text().replace('"shard-00001', '"../shard-00001'))
    with pytest.raises(CheckpointError, match=r"manifest.json is not one of a checkpoint"):
        load(tmp_path)


def test_another_torch_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, [1])
    path = tmp_path / "step-00000001" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch_version": "1.0"}))
    assert load(tmp_path)[0] == 1
    assert f"was written with torch 1.0, this is {torch.__version__}" in caplog.text


# -- other runs --------------------------------------------------------------------------------------------


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


# -- how it is written -------------------------------------------------------------------------------------


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


# -- while it is being written -----------------------------------------------------------------------------


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


def _one_rank_fails(directory: Path, where: str) -> tuple[str, list[str], dict[str, Any], dict[str, Any]]:
    state = fresh()
    advance(state)
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, state)
    advance(state)
    held = content(state)
    checkpointer.wait()

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    if rank() == 1 or where == "write":
        owner = {
            "write_data": storage.HuggingFaceStorageWriter,
            "_checksums": Checkpointer,
            "write": manifest.Manifest,
        }[where]
        kept = getattr(owner, where)
        setattr(owner, where, fail)
    checkpointer.save(2, state)
    with pytest.raises(CheckpointError) as raised:
        checkpointer.save(3, state)  # the previous save's error
    if rank() == 1 or where == "write":
        setattr(owner, where, kept)
    dist.barrier()
    left = _names(directory)
    dist.barrier()
    after = content(state)
    checkpointer.save(2, state)  # there is room again
    checkpointer.wait()
    checkpointer.close()
    return str(raised.value), left, held, after


@pytest.mark.parametrize("where", ["write_data", "_checksums", "write"])
def test_a_failure_on_one_rank_is_raised_on_all_and_leaves_nothing_half_written(
    tmp_path: Path, where: str
) -> None:
    results = run_ranks(_one_rank_fails, 2, tmp_path, where)
    failing = 0 if where == "write" else 1
    for line, left, held, after in results:
        assert (
            f"step 2 could not be saved in {tmp_path}: rank {failing}: [Errno 28] No space left on device" in line
        )
        assert "earlier checkpoints are intact" in line
        assert "\n" not in line
        assert left == ["step-00000001"]
        assert after == held
    assert _names(tmp_path) == ["step-00000001", "step-00000002"]
    assert [step for step, _ in run_ranks(load, 2, tmp_path)] == [2, 2]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 KiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _fill_the_disk(disk: Path) -> tuple[str, list[str], bool]:
    state = fresh()
    advance(state)
    checkpointer = Checkpointer(disk / "checkpoints")
    checkpointer.save(1, state)
    checkpointer.wait()
    advance(state)
    held = content(state)
    if rank() == 0:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(b"x" * (free - 16384))  # one rank's file still fits, both don't
    dist.barrier()
    checkpointer.save(2, state)
    with pytest.raises(CheckpointError) as raised:
        checkpointer.wait()
    dist.barrier()
    left = _names(disk / "checkpoints")
    intact = content(state) == held
    advance(state)
    dist.barrier()
    if rank() == 0:
        (disk / "filler").unlink()
    dist.barrier()
    checkpointer.save(3, state)
    checkpointer.close()
    return str(raised.value), left, intact


def test_a_full_disk_is_one_line_and_training_can_go_on(small_disk: Path) -> None:
    results = run_ranks(_fill_the_disk, 2, small_disk)
    for line, left, intact in results:
        assert "step 2 could not be saved" in line
        assert "No space left on device" in line
        assert "\n" not in line
        assert left == ["step-00000001"]
        assert intact
    assert _names(small_disk / "checkpoints") == ["step-00000001", "step-00000003"]
    assert [step for step, _ in run_ranks(load, 2, small_disk / "checkpoints")] == [3, 3]


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints")
    checkpointer.save(1, fresh())
    with pytest.raises(CheckpointError, match=r"step 1 could not be saved in .*: rank 0: .*Not a directory"):
        checkpointer.wait()


def _second_rank_dies(directory: Path) -> str:
    if rank() == 1:
        _before(Checkpointer, "_checksums")
    checkpointer = Checkpointer(directory)
    checkpointer.save(1, fresh())
    started = time.monotonic()
    with pytest.raises(CheckpointError) as raised:
        checkpointer.wait()
    assert time.monotonic() - started < 25
    os._exit(0 if "step 1 could not be saved" in str(raised.value) else 1)


def test_a_rank_that_dies_while_saving_does_not_hang_the_others(tmp_path: Path) -> None:
    results = run_ranks(_second_rank_dies, 2, tmp_path, check=False)
    assert "exit code 0" in str(results[0])
    assert checkpoints_in(tmp_path) == []


# -- nothing is executed -----------------------------------------------------------------------------------

_unpickled: list[str] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _unpickled is not None:
        _unpickled.append(str(arguments))


def test_nothing_that_is_read_from_disk_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "executed"),))

    held = save_steps(tmp_path / "c", [1])
    for name in (".metadata", "extra.pt", "__0_0.distcp"):
        (tmp_path / "c" / "step-00000001" / name).write_bytes(pickle.dumps(Evil()))
    global _unpickled
    sys.addaudithook(_audit)
    _unpickled = []
    try:
        assert load(tmp_path / "c") == (1, held[1])
        assert _unpickled == []
        pickle.loads(pickle.dumps(Path("x")))
        assert _unpickled, "the hook sees unpickling"
    finally:
        _unpickled = None
    assert not (tmp_path / "executed").exists()
