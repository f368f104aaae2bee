"""`thinwire bench fidelity` on a trained run: its rows are what the format does to the gradients of that run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F

from tests.support.ranks import run_ranks
from tests.train.jobs import job, run_job
from thinwire import formats
from thinwire.bench import fidelity
from thinwire.geometry import GIFT
from thinwire.train.arguments import read_toml
from thinwire.train.checkpoint.export import model_tensors
from thinwire.train.checkpoint.manifest import Manifest, checkpoints_in
from thinwire.train.data.sampler import GlobalSampler
from thinwire.train.data.samples import build_data
from thinwire.train.model import Vocabulary, build_model

LAYER = "model.layers.0.mlp.up_proj.weight"
MATRICES = 8  # the embedding, tied to the head, and seven layers


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of a Llama with one block, and checkpoints of steps 2 and 4."""
    import transformers

    folder = tmp_path_factory.mktemp("fidelity")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    depth: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}
    transformers.LlamaConfig(**sizes, **depth).save_pretrained(folder / "model")
    config = job(folder, steps=4, model_name=str(folder / "model"), model_random_weights=True)
    config = replace(config, checkpoint=replace(config.checkpoint, every=2))
    run_ranks(run_job, 1, config, folder / "run")
    return folder / "run"


def measured(run: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[dict[str, Any]]:
    """The rows of the bench's JSON."""
    assert fidelity.main(["--run", str(run), "--json", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["rows"]
    assert all(list(row) == [field.name for field in fields(fidelity.Row)] for row in found["rows"])
    return found["rows"]  # type: ignore[no-any-return]


def next_gradient(run: Path, step: int) -> torch.Tensor:
    """Of LAYER on the batch that followed a checkpoint: the mean over its targets of the cross entropy."""
    config = read_toml(run / "config.toml")
    data, _ = build_data(config.data, seed=config.seed)
    vocabulary = Vocabulary(data.tokenizer.vocab_size, data.tokenizer.eos_id, data.tokenizer.pad_id)
    model = build_model(config.model, vocabulary, seed=config.seed)
    (path,) = [p for p in checkpoints_in(run / "checkpoints") if Manifest.read(p).step == step]
    model.load_state_dict(model_tensors(path, Manifest.read(path)), strict=False)
    sampler = GlobalSampler(data.num_sequences, config.seed)
    batch = data.batch(sampler.take(step * config.batch_size, config.batch_size))
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100).backward()
    return model.get_parameter(LAYER).grad  # type: ignore[return-value]


def test_there_is_a_row_for_each_step_layer_and_format(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured(run, capsys, "--formats", "nvfp4,int4")
    keys = [(row["step"], row["format"], row["layer"]) for row in rows]
    assert len(set(keys)) == len(keys) == 2 * 2 * MATRICES
    assert {key[:2] for key in keys} == {(step, name) for step in (2, 4) for name in ("nvfp4", "int4")}
    assert all(0 < row[f"error_{kind}"] < 1 for row in rows for kind in ("euclidean", "hadamard", "gift"))


def test_the_plain_error_is_that_of_one_round_trip_of_the_next_gradient(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = measured(run, capsys, "--formats", "nvfp4", "--steps", "4")
    (row,) = [row for row in rows if row["layer"] == LAYER]
    exact = next_gradient(run, 4)  # (48, 32): whole blocks of 16
    nvfp4 = formats.get("nvfp4")
    decoded = torch.empty(exact.numel())
    encoded = torch.empty(nvfp4.nbytes((exact.numel(),)), dtype=torch.uint8)
    nvfp4.encode(exact.flatten(), encoded, spans=(exact.numel(),))
    nvfp4.decode(encoded, decoded, spans=(exact.numel(),))
    error = (decoded - exact.flatten()).norm() / exact.norm()
    assert row["error_euclidean"] == pytest.approx(float(error), rel=1e-3)


def test_layers_that_are_not_selected_stay_as_they_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damping that leaves next to nothing of the change gains nothing anywhere."""
    rows = measured(run, capsys, "--formats", "nvfp4", "--steps", "4", "--damping", "10000")
    left = [row for row in rows if not row["selected"]]
    assert len(left) > MATRICES // 2
    assert all(row["error_gift"] == row["error_euclidean"] for row in left)


def test_the_statistic_is_that_of_the_inputs_of_layers_or_of_gradients(run: Path) -> None:
    """Inputs of another direction give other coordinates; the gradient's statistic does not look at them."""
    ((_, batches),) = fidelity.run_batches(run, [4])
    assert set(batches[1].inputs) == {n for n in batches[1].gradients if "embed" not in n}
    others = [replace(b, inputs={n: x.roll(1, 1) for n, x in b.inputs.items()}) for b in batches]
    for statistic, same in (("gradient", True), ("input", False)):
        gift = GIFT(statistic=statistic, refresh_every=1, rank=4)  # type: ignore[arg-type]
        rows, rolled = (fidelity.measure(4, seen, ["nvfp4"], gift) for seen in (batches, others))
        assert ([r.error_gift for r in rows] == [r.error_gift for r in rolled]) is same


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--steps", "3"], "--steps: RUN has no checkpoint of step [3]; there are 2, 4"),
        (["--run", "RUN/checkpoints"], "--run: RUN/checkpoints is not the directory of a run"),
        (["--formats", "nvfp5"], "--formats: unknown format 'nvfp5'"),
        (["--power", "2"], "--power: GIFT power must be a number above 0 and up to 1, got 2.0"),
    ],
)
def test_what_cannot_be_measured_is_one_line_that_names_the_key(
    run: Path, capsys: pytest.CaptureFixture[str], flags: list[str], line: str
) -> None:
    argv = ["--run", str(run), *(flag.replace("RUN", str(run)) for flag in flags)]
    try:
        code = fidelity.main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("thinwire bench fidelity: " + line.replace("RUN", str(run)))


def test_the_figure_of_the_docs_is_drawn_from_the_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fidelity.main(["--run", str(run), "--steps", "2", "4", "--formats", "nvfp4", "--json"]) == 0
    rows = capsys.readouterr().out
    script = Path(__file__).parents[2] / "docs/figures/fidelity.py"
    drawn = subprocess.run([sys.executable, script], input=rows, text=True, capture_output=True, check=True).stdout
    svg = ElementTree.fromstring(drawn)
    words = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"step 2", "step 4", "as it is", "Hadamard", "GIFT", "q_proj", "down_proj"} <= set(words)
    kinds = {row["layer"].removesuffix(".weight").rsplit(".", 1)[-1] for row in json.loads(rows)["rows"]}
    bars = list(svg.iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) == 3 + 2 * 3 * len(kinds)  # the legend, and each step's
