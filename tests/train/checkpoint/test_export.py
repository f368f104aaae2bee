from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.support.ranks import run_ranks
from tests.train.checkpoint.spoil import rewrite_manifest
from tests.train.data.made_tokenizers import make_tokenizer
from tests.train.jobs import job, run_job
from thinwire.train.checkpoint.checkpointer import Checkpointer
from thinwire.train.checkpoint.export import main
from thinwire.train.checkpoint.state import TrainState
from thinwire.train.data.tokenizers import load_tokenizer
from thinwire.train.metrics import parameter_hash

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _model(kind: str = "llama", *, tied: bool = True, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    sizes: dict[str, Any] = {"vocab_size": 257, "tie_word_embeddings": tied}
    config: Any = (
        transformers.LlamaConfig(
            hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, **sizes
        )
        if kind == "llama"
        else transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **sizes)
    )
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False  # as the trainer does
    return model


def _save(directory: Path, model: Any, step: int = 5, tokenizer: str | None = "bytes") -> None:
    info = None if tokenizer is None else load_tokenizer(tokenizer).info
    checkpointer = Checkpointer(directory, tokenizer=info)
    checkpointer.save(step, TrainState(model, torch.optim.AdamW(model.parameters())))
    checkpointer.close()


def _equal(model: Any, directory: Path) -> bool:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(str(directory))
    mine, theirs = model.state_dict(), loaded.state_dict()
    ids = torch.arange(10)[None]
    return (
        list(mine) == list(theirs)
        and all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)
        and torch.equal(model.eval()(ids).logits, loaded.eval()(ids).logits)
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_same_model(
    tmp_path: Path, kind: str, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _model(kind, tied=tied)
    _save(tmp_path / "run" / "checkpoints", model)
    assert main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    assert _equal(model, tmp_path / "exported")
    parameters = sum(p.numel() for p in model.parameters())
    assert f"{kind} with {parameters:,} parameters, tokenizer bytes, from step 5" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "exported").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as stored:
        assert ("lm_head.weight" in stored.keys()) == (not tied)  # noqa: SIM118
    assert json.loads((tmp_path / "exported" / "config.json").read_text()).get("use_cache", True)


def test_the_dtype_of_training_is_kept(tmp_path: Path) -> None:
    model = _model(dtype=torch.bfloat16)
    _save(tmp_path / "checkpoints", model)
    assert main([str(tmp_path / "checkpoints"), str(tmp_path / "exported")]) == 0
    assert _equal(model, tmp_path / "exported")


def test_the_tokenizer_comes_along(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "words")
    model = _model()
    _save(tmp_path / "run" / "checkpoints", model, tokenizer=str(tmp_path / "words"))
    assert main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    text = "the cat sat"
    there, here = (transformers.AutoTokenizer.from_pretrained(str(tmp_path / d)) for d in ("words", "exported"))
    assert here(text).input_ids == there(text).input_ids
    _save(tmp_path / "other" / "checkpoints", model, tokenizer=None)
    assert main([str(tmp_path / "other"), str(tmp_path / "bare")]) == 0
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


def test_another_tokenizer_than_the_run_had_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokenizer(tmp_path / "words")
    _save(tmp_path / "run" / "checkpoints", _model(), tokenizer=str(tmp_path / "words"))
    shutil.rmtree(tmp_path / "words")
    load_tokenizer("bytes").save(tmp_path / "words")
    assert main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 1
    assert "is not the one that this run was trained with" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()


def test_a_run_gives_its_newest_complete_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = _model(seed=1), _model(seed=2)
    checkpoints = tmp_path / "run" / "checkpoints"
    _save(checkpoints, older, 5)
    _save(checkpoints, newer, 10)
    assert main([str(tmp_path / "run"), str(tmp_path / "a")]) == 0
    assert _equal(newer, tmp_path / "a")
    assert main([str(checkpoints / "step-00000005"), str(tmp_path / "b")]) == 0
    assert _equal(older, tmp_path / "b")
    shutil.copytree(checkpoints / "step-00000005", tmp_path / "the best one")
    assert main([str(tmp_path / "the best one"), str(tmp_path / "d")]) == 0
    next(iter((checkpoints / "step-00000010").glob("*.safetensors"))).unlink()
    assert main([str(checkpoints), str(tmp_path / "c")]) == 0
    assert _equal(older, tmp_path / "c")
    assert "skipping the damaged checkpoint" in caplog.text


def _save_on_ranks(directory: Path) -> None:
    _save(directory, _model(seed=3))


def test_a_checkpoint_of_several_ranks_is_one_model(tmp_path: Path) -> None:
    run_ranks(_save_on_ranks, 2, tmp_path / "checkpoints")
    (tmp_path / "exported").mkdir()  # an empty directory is as good as none
    assert main([str(tmp_path), str(tmp_path / "exported")]) == 0
    assert _equal(_model(seed=3), tmp_path / "exported")


def test_what_a_run_trained_is_what_is_exported(tmp_path: Path) -> None:
    summary = run_ranks(run_job, 2, job(tmp_path, recipe="fp8-ef"), tmp_path / "out")[0]
    assert main([str(tmp_path / "out"), str(tmp_path / "exported")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path / "exported"))
    assert parameter_hash(model) == summary["param_hash"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "exported"))
    ids = model.generate(**tokenizer("thin ", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert ids.shape[1] > 5
    assert tokenizer.decode(ids[0]).startswith("thin ")


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ((), 2, "the following arguments are required: CKPT, DIR (usage: thinwire export CKPT DIR)"),
        (("{tmp}/run", "{tmp}/full"), 2, "DIR: {tmp}/full is not empty; give a new or an empty directory"),
        (("{tmp}/run", "{tmp}/file"), 2, "DIR: {tmp}/file is a file"),
        (("{tmp}/nowhere", "{tmp}/new"), 2, "CKPT: there is no directory {tmp}/nowhere"),
        (("{tmp}/full", "{tmp}/new"), 2, "CKPT: {tmp}/full is neither a checkpoint nor a run with checkpoints"),
        (
            ("{tmp}/broken", "{tmp}/new"),
            1,
            "no usable checkpoint in {tmp}/broken: step-00000005: manifest",
        ),
        (
            ("{tmp}/broken/step-00000005", "{tmp}/new"),
            1,
            "{tmp}/broken/step-00000005 is damaged: manifest",
        ),
        (("{tmp}/code", "{tmp}/new"), 1, "is of a model with Python code of its own, which export does not run"),
        (("{tmp}/alien", "{tmp}/new"), 1, "is of model type 'alien', which the installed transformers lacks"),
        (
            ("{tmp}/headless", "{tmp}/new"),
            1,
            "step-00000005: the installed transformers builds no model from its config (",
        ),
        (("{tmp}/bare", "{tmp}/new"), 1, "is not of a Hugging Face model"),
        (("{tmp}/wrong", "{tmp}/new"), 1, "does not fit its config: "),
        (("{tmp}/less", "{tmp}/new"), 1, "has, and the model has not, model.layers.1."),
        (("{tmp}/more", "{tmp}/new"), 1, "lacks model.layers.2."),
    ],
)
def test_what_cannot_be_exported_is_one_line(
    tmp_path: Path,
    arguments: tuple[str, ...],
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    _save(tmp_path / "run" / "checkpoints", _model())
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").write_text("")
    for name, change in {
        "code": {"auto_map": {"AutoModelForCausalLM": "evil.Model"}},
        "alien": {"model_type": "alien"},
        "wrong": {"intermediate_size": 25},
        "less": {"num_hidden_layers": 1},
        "more": {"num_hidden_layers": 3},
        "headless": {"num_attention_heads": 0},
        "bare": None,
    }.items():
        shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / name)
        directory = tmp_path / name / "step-00000005"
        config = json.loads((directory / "manifest.json").read_text())["model_config"]
        rewrite_manifest(directory, model_config=None if change is None else config | change)
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "broken")
    (tmp_path / "broken" / "step-00000005" / "manifest.json").write_text("{")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == code
    captured = capsys.readouterr()
    assert line.format(tmp=tmp_path) in captured.err
    assert captured.err.startswith("thinwire export: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert "skipping the damaged" not in caplog.text, "what the error says is not said before"
    assert not (tmp_path / "new").exists()
