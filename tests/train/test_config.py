"""Configuration: where it comes from, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from thinwire.train.arguments import from_table, parse, read_toml, to_table, to_toml
from thinwire.train.config import ConfigError, TrainConfig, check
from thinwire.train.data.samples import DataConfig, DataError


def test_the_default_job_is_accepted() -> None:
    check(TrainConfig(), world_size=2)


def test_toml_round_trips_every_setting(tmp_path: Path) -> None:
    config = replace(
        TrainConfig(),
        out=tmp_path,
        threads=3,
        data=DataConfig(files=("a", "b/*.txt"), sequence_length=64),
        recipe="ddp",
        timeout=12.5,
    )
    path = tmp_path / "job.toml"
    path.write_text(to_toml(config))
    assert read_toml(path) == config
    assert from_table(TrainConfig, to_table(TrainConfig()), where="here") == TrainConfig()


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('steps = 7\nseed = 3\ntimeout = 9\n[data]\nfiles = ["x"]\n[optimizer]\nlr = 1\n')
    flags = ["--seed", "4", "--data.sequence-length", "32", "--config", str(path), "--resume", "--out", "here"]
    config = parse(flags).config
    assert (config.steps, config.seed, config.timeout, config.batch_size) == (7, 4, 9.0, TrainConfig().batch_size)
    assert (config.data.files, config.data.sequence_length) == (("x",), 32)
    assert isinstance(config.optimizer.lr, float)
    assert (config.resume, config.out) == (True, Path("here"))


def test_resuming_takes_up_the_settings_of_the_run_and_flags_override_them(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(replace(TrainConfig(), recipe="ddp", steps=123, seed=9)))
    (tmp_path / "metrics.jsonl").touch()  # it has begun
    config = parse(["--resume", "--out", str(tmp_path), "--steps", "200"]).config
    assert (config.recipe, config.seed, config.steps, config.resume) == ("ddp", 9, 200, True)
    assert parse(["--out", str(tmp_path)]).config.recipe == TrainConfig().recipe


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("stepz = 3", "stepz: unknown key in job.toml; did you mean steps?"),
        ("[data]\nfile = []", "data.file: unknown key in job.toml; did you mean data.files?"),
        ("[model]\nqqq = 1", "model.qqq: unknown key in job.toml; known here: activation_checkpointing"),
        ('steps = "many"', "steps: expected int, got 'many' in job.toml"),
        ("steps = true", "steps: expected int, got True in job.toml"),
        ("steps = 1.5", "steps: expected int, got 1.5 in job.toml"),
        ('[data]\nfiles = "a"', "data.files: expected a list, got 'a' in job.toml"),
        ("[data]\nfiles = [1]", "data.files: expected str, got 1 in job.toml"),
        ("data = 3", "data: expected a table, got 3 in job.toml"),
        ('[optimizer]\nname = "sgd"', "optimizer.name: expected one of adamw, muon, got 'sgd' in job.toml"),
        ("steps = ", "config: job.toml is not valid TOML"),
        ("seed = " + "9" * 5000, "config: job.toml is not valid TOML: Exceeds the limit (4300 digits)"),
        ("seed = 0x" + "f" * 5000, "seed: a number of thousands of digits in job.toml is not a number"),
        ("timeout = 0x" + "f" * 300, "timeout: "),
        ("steps." + ".".join("a" * 5000) + " = 1", "steps: expected int, got {'a': {'a': {'a': "),
        ("steps = " + "[" * 5000 + "]" * 5000, "config: job.toml is not valid TOML: "),
        ('recipe = "' + "x" * 5000 + '"\nsteps = []', "steps: expected int, got []"),
        ('out = "a\\u0000b"', "out: 'a\\x00b' in job.toml holds a zero byte"),
    ],
)
def test_a_bad_file_is_refused_by_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(toml)
    with pytest.raises(ConfigError) as refused:
        parse(["--config", "job.toml"])
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "fp9"}, "recipe: no recipe is called 'fp9'; there are "),
        ({"workers": 0}, "workers: must be at least 1, got 0"),
        ({"steps": 0}, "steps: must be at least 1, got 0"),
        ({"accumulation": 0}, "accumulation: must be at least 1, got 0"),
        ({"accumulation": 5}, "batch_size: 8 sequences cannot be shared by 2 workers with accumulation 5"),
        ({"schedule.warmup_steps": 9, "steps": 8}, "schedule.warmup_steps: 9 is longer than the run of 8 steps"),
        ({"schedule.final_fraction": 2.0}, "schedule.final_fraction: must be at most 1, got 2.0"),
        ({"data.sequence_length": 2049}, "data.sequence_length: 2049 is above the 2048 positions of llama-tiny"),
        ({"data.sequence_length": 1}, "data.sequence_length: must be at least 2, got 1"),
        ({"data.validation_fraction": 1e-320}, "data.validation_fraction: must be at least 1e-06, got 1e-320"),
        ({"data.files": ("a",), "data.shards": "b"}, "data.files and data.shards are both set"),
        ({"optimizer.lr": float("nan")}, "optimizer.lr: must be at least 1e-30, got nan"),
        ({"seed": 2**64}, "seed: must be at most 4294967295, got 18446744073709551616"),
        ({"seed": 10**4000}, "seed: must be at most 4294967295, got 10000"),
        ({"optimizer.beta1": 1.0}, "optimizer.beta1: must be at least 0 and below 1, got 1.0"),
        ({"timeout": 1e-9}, "timeout: must be at least 1, got 1e-09"),
        ({"timeout": 1e300}, "timeout: must be at most 10000000, got 1e+300"),
        ({"port": 70000}, "port: must be at most 65535, got 70000"),
        ({"resume": True}, "resume: needs --out DIR"),
        ({"checkpoint.keep": 0}, "checkpoint.keep: must be at least 1, got 0"),
        ({"model.name": "no/such-model"}, "model.name: 'no/such-model' is neither a preset (llama-nano, "),
        ({"model.name": "~no-such-user"}, "model.name: '~no-such-user' is neither a preset (llama-nano, "),
        ({"model.name": "x" * 5000}, "model.name: 'xxxx"),
        ({"model.name": "."}, "model.name: '.' is neither a preset (llama-nano, "),
    ],
)
def test_what_cannot_run_is_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError)) as refused:
        check(_changed(changes), world_size=2)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def _numbers(config: Any, prefix: str = "") -> dict[str, float]:
    """Every setting that is a number, by its key."""
    found: dict[str, float] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= _numbers(value, f"{field.name}.")
        elif type(value) in (int, float):
            found[f"{prefix}{field.name}"] = value
    return found


def test_no_number_is_too_absurd_for_one_line() -> None:
    unset = {"threads": 1, "schedule.warmup_steps": 1}
    taken = []
    for key, value in (_numbers(TrainConfig()) | unset).items():
        floats = [math.nan, math.inf, -math.inf, 1e300, -1e300, 1e-320]
        for absurd in [10**30, -(10**30), 10**5000] if isinstance(value, int) else floats:
            answer = _refusal(_changed({key: absurd}))
            if answer is None:
                taken.append(key)
            else:
                assert answer.startswith(f"{key}: must be ")
                assert len(answer) < 120
    # Of these 1e-320 is as good as nothing.
    assert sorted(taken) == [
        *("optimizer.beta1", "optimizer.beta2", "optimizer.clip", "optimizer.momentum", "optimizer.weight_decay"),
        "schedule.final_fraction",
    ]


def _refusal(config: TrainConfig) -> str | None:
    try:
        check(config, world_size=2)
    except (ConfigError, DataError) as refused:
        return str(refused)
    return None


def _changed(changes: dict[str, Any]) -> TrainConfig:
    config = TrainConfig()
    for key, value in changes.items():
        part, _, name = key.rpartition(".")
        if part:
            config = replace(config, **{part: replace(getattr(config, part), **{name: value})})
        else:
            config = replace(config, **{name: value})
    return config


def test_an_unknown_recipe_is_answered_with_the_names() -> None:
    from thinwire import recipes

    with pytest.raises(ConfigError) as refused:
        check(replace(TrainConfig(), recipe="fp9"), world_size=2)
    assert all(name in str(refused.value) for name in recipes.names())


def test_bfloat16_is_refused_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: False)
    with pytest.raises(ConfigError, match="precision: this CUDA device has no bfloat16; use float32"):
        check(replace(TrainConfig(), precision="bfloat16"), world_size=2)


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device: cuda was asked for, but this torch sees no CUDA device"):
        check(replace(TrainConfig(), device="cuda"), world_size=2)


def test_warm_up_is_a_tenth_of_the_run_unless_set() -> None:
    assert [replace(TrainConfig(), steps=steps).warmup_steps for steps in (5, 60, 5000)] == [0, 6, 100]
