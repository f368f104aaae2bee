"""`thinwire train` as a command: output, exit codes, and that a bad configuration starts nothing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from thinwire.train import launch as launch_module
from thinwire.train.command import main
from thinwire.train.config import TrainConfig


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, Path]]:
    """What would have been launched."""
    calls: list[tuple[TrainConfig, Path]] = []

    def launch(config: TrainConfig, out: Path, *, debug: bool = False) -> int:
        calls.append((config, out))
        return 0

    monkeypatch.setattr(launch_module, "launch", launch)
    return calls


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--stepz", "3"], ["--stepz", "did you mean --steps?"]),
        (["--step", "3"], ["--step, 3 (did you mean --steps?)"]),
        (["--logging.tensorbord"], ["(did you mean --logging.tensorboard?)"]),
        (["--lr", "1"], ["did you mean --optimizer.lr?"]),
        (["--sequence-length", "4", "--foo"], ["did you mean --data.sequence-length?"]),
        (["--seed", "9" * 5000], ["--seed", "4300 digits"]),
        (["--batch-size", "9" * 4000], ["batch_size: must be at most 1048576"]),
        (["--data.files", b"caf\xe9.txt".decode(errors="surrogateescape")], ["caf\\udce9.txt", "UTF-8"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps"], ["--steps"]),
        (["--optimizer.name", "sgd"], ["--optimizer.name", "sgd", "adamw", "muon"]),
        (["surplus"], ["surplus"]),
        (["--config"], ["--config"]),
        (["--config", "missing.toml"], ["config", "missing.toml"]),
        (["--recipe", "fp9"], ["recipe", "fp9", "fp8-ef"]),
        (["--accumulation", "0"], ["accumulation"]),
        (["--resume"], ["resume", "--out"]),
        (["--resume", "--out", "nowhere"], ["resume", "nowhere"]),
        (["--out", "/proc/none"], ["out", "/proc/none"]),
        (["--out", "/proc"], ["out: cannot ", "/proc"]),
        (["--out", "/dev/null"], ["out: cannot ", "/dev/null"]),
        (["--out", "/dev/null/run"], ["out: cannot ", "/dev/null/run"]),
        (["--out", "x" * 300], ["out: "]),
    ],
)
def test_bad_usage_is_one_line_that_names_the_key_and_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launched: list[object],
    flags: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("thinwire train: ")
    assert captured.err.count("\n") == 1
    assert all(word in captured.err for word in words), captured.err
    assert launched == []


def test_print_config_prints_toml_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], launched: list[object]
) -> None:
    assert main(["--print-config", "--steps", "5", "--data.files", "a", "b"]) == 0
    table = tomllib.loads(capsys.readouterr().out)
    assert (table["steps"], table["data"]["files"], table["recipe"]) == (5, ["a", "b"], "nvfp4")
    assert launched == []


def test_print_config_refuses_what_cannot_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-config", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "thinwire train: steps: must be at least 1, got 0\n"


def test_help_shows_every_setting_with_its_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--config", "--print-config", "--recipe", "--workers", "--resume", "--data.sequence-length"):
        assert flag in text


def test_runs_without_a_directory_get_the_next_free_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: list[tuple[TrainConfig, Path]]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == main([]) == main(["--recipe", "ddp"]) == 0
    assert [str(out) for _, out in launched] == ["runs/nvfp4-1", "runs/nvfp4-2", "runs/ddp-1"]
    assert all(out.is_dir() for _, out in launched)


def test_a_directory_with_a_run_is_only_used_to_resume_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], launched: list[tuple[TrainConfig, Path]]
) -> None:
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    (tmp_path / "config.toml").write_text("steps = 20\n")
    assert main(["--out", str(tmp_path)]) == 2
    assert "holds a run already; --resume continues it" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--resume"]) == 0
    assert len(launched) == 1


def test_under_torchrun_the_world_size_is_torchruns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: list[object]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert main(["--batch-size", "8"]) == 2
    assert capsys.readouterr().err == ""  # rank 0 says it
    monkeypatch.setenv("RANK", "0")
    assert main(["--batch-size", "8"]) == 2
    assert "batch_size: 8 sequences cannot be shared by 16 workers" in capsys.readouterr().err
    assert launched == []
