"""The training loop on real ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import logging.handlers
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers.modeling_outputs import CausalLMOutput

from tests.support.ranks import RankFailed, run_ranks
from tests.train.jobs import CPU, job, lines, listen, run_job, run_job_until, run_job_with_bad_loss
from thinwire.data_parallel import Link
from thinwire.train.checkpoint.checkpointer import checkpoints_in
from thinwire.train.config import TrainConfig
from thinwire.train.data.samples import build_data
from thinwire.train.loop import TrainingError, training_step, validate
from thinwire.train.progress import Progress
from thinwire.train.run import assemble, count_targets, fetch, summed_loss, throw_away_step

SUMMARY_KEYS = [
    *("recipe", "world_size", "steps", "tokens", "final_train_loss", "val_loss", "sent_bytes_per_rank"),
    *("sent_bytes_between_groups_per_rank", "sent_bytes_per_param_per_step", "wall_seconds", "comm_seconds"),
    *(
        "hidden_comm_seconds",
        "encode_seconds",
        "tokens_per_second",
        "peak_memory_bytes",
        "parameters",
        "seed",
        "param_hash",
    ),
    *("skipped_steps", "corpus_hash", "torch_version", "config"),
]


def test_a_run_writes_its_summary_metrics_configuration_and_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "out"
    summaries = run_ranks(run_job, 2, job(tmp_path, recipe="fp8-ef", logging_tensorboard=True), out)
    summary = json.loads((out / "summary.json").read_text())
    assert list(summary) == SUMMARY_KEYS
    assert summary["hidden_comm_seconds"] >= 0  # all of it may have been waited for
    assert summary["hidden_comm_seconds"] + summary["comm_seconds"] > 0
    assert (summary["recipe"], summary["world_size"], summary["steps"]) == ("fp8-ef", 2, 6)
    assert summary["tokens"] == 6 * 6 * 23  # steps, sequences, targets per sequence
    assert summary["sent_bytes_per_param_per_step"] == pytest.approx(
        summary["sent_bytes_per_rank"] / summary["parameters"] / 6
    )
    assert 1.0 < summary["sent_bytes_per_param_per_step"] < 0.27 * 4
    assert summary["param_hash"] == summaries[0]["param_hash"] == summaries[1]["param_hash"]
    assert {"step", "loss", "lr", "sent_bytes", "step_seconds"} <= set(lines(out)[0])
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4, 5, 6]
    assert sum(line["sent_bytes"] for line in lines(out)) == summary["sent_bytes_per_rank"]
    assert len(checkpoints_in(out / "checkpoints")) == 1
    assert any((out / "tensorboard").iterdir())
    assert (out / "config.toml").exists()


def test_training_learns(tmp_path: Path) -> None:
    config = job(tmp_path, steps=40, optimizer_lr=3e-3)
    run_ranks(run_job, 2, config, tmp_path / "out")
    first, last = lines(tmp_path / "out")[0], lines(tmp_path / "out")[-1]
    assert last["val_loss"] < 2.5 < first["loss"]


def _gradient_step(config: TrainConfig) -> tuple[float, list[list[int]], NDArray[np.float32]]:
    """Loss, sample ids and parameters after one step."""
    run = assemble(config, CPU)
    ids = run.shares(0)
    step = training_step(run, Progress(), lambda: False)
    assert step is not None
    (loss,) = run.agree([step.loss_sum])
    return loss / step.targets, ids, torch.cat([p.detach().flatten() for p in run.model.parameters()]).numpy()


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "ragged"])
def test_ranks_and_accumulation_share_one_step_and_average_over_its_tokens(tmp_path: Path, pack: bool) -> None:
    # Adam's first step is almost a sign: with a huge eps it is proportional to the gradient.
    config = job(tmp_path, data_pack=pack, data_sequence_length=80, optimizer_eps=1e3, optimizer_lr=1e3)
    [(loss, ids, alone)] = run_ranks(_gradient_step, 1, config)
    for world_size, accumulation in [(2, 1), (3, 2)]:
        results = run_ranks(_gradient_step, world_size, replace(config, accumulation=accumulation))
        assert [i for _, shares, _ in results for share in shares for i in share] == ids[0]
        for other_loss, _, parameters in results:
            assert other_loss == pytest.approx(loss, rel=1e-5)
            np.testing.assert_allclose(parameters, alone, rtol=1e-4, atol=1e-6)
            assert np.array_equal(parameters, results[0][2])


def test_a_batch_that_no_number_of_ranks_divides_is_shared_out_evenly(tmp_path: Path) -> None:
    results = run_ranks(_gradient_step, 3, job(tmp_path, batch_size=7, accumulation=2))
    sizes = [[len(share) for share in shares] for _, shares, _ in results]
    assert sizes == [[1, 1], [1, 1], [1, 2]]


def _trace_of_assembling(config: TrainConfig) -> Any:
    run = assemble(config, CPU)
    untouched = torch.rand(1), random.random()
    torch.manual_seed(config.seed * 1_000_003 + run.rank)
    random.seed(config.seed * 1_000_003 + run.rank)
    expected = torch.rand(1), random.random()
    gradients = [n for n, p in run.model.named_parameters() if p.grad is not None]
    return (
        untouched == expected,
        gradients,
        run.link.ledger.sent_bytes(),
        run.link.state_dict().get("reductions", 0),
    )


def test_the_throw_away_step_leaves_no_trace(tmp_path: Path) -> None:
    model = _dropout_model(tmp_path / "model")  # draws random numbers
    config = job(tmp_path, model_name=model, model_random_weights=True, recipe="fp8-ef")
    for trace in run_ranks(_trace_of_assembling, 2, config):
        assert trace == (True, [], 0, 0)


class _HalfUsed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(4, 4)
        self.forgotten = torch.nn.Linear(2, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: None = None) -> CausalLMOutput:
        return CausalLMOutput(logits=self.embed(input_ids))


def _throw_away_with_unused_parameters(find_unused: bool) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(_HalfUsed(), find_unused_parameters=find_unused)
    throw_away_step(ddp, CPU, find_unused=find_unused)


def test_a_model_with_unused_parameters_is_told_the_setting_for_them() -> None:
    with pytest.raises(
        RankFailed, match=r"model.find_unused_parameters: 2 parameters .* 'forgotten.weight' for one"
    ):
        run_ranks(_throw_away_with_unused_parameters, 2, False)
    run_ranks(_throw_away_with_unused_parameters, 2, True)


def test_a_loss_that_is_not_a_number_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = job(tmp_path, recipe="fp8-ef")
    a, b = run_ranks(run_job_with_bad_loss, 2, config, out, 1, (2, 3))
    assert a["param_hash"] == b["param_hash"]
    assert a["skipped_steps"] == 2
    assert [line["loss"] is None for line in lines(out)] == [False, False, True, True, False, False]
    assert a["final_train_loss"] == lines(out)[-1]["loss"]


def _error_memory_of_a_run(config: TrainConfig, out: Path, steps: tuple[int, ...]) -> float:
    """The largest residual at the end of a run in which rank 1's loss is huge, but finite, in these steps."""
    states: list[dict[str, Any]] = []
    detach = Link.detach

    def look(link: Link) -> None:
        states.append(link.state_dict())
        detach(link)

    Link.detach = look  # type: ignore[method-assign]
    run_job_with_bad_loss(config, out, 1, steps, factor=1e25)
    return max(float(value.abs().max()) for key, value in states[0].items() if "residual" in key)


def test_a_step_whose_gradient_norm_alone_overflows_leaves_nothing_in_the_error_memory(tmp_path: Path) -> None:
    config = job(tmp_path, recipe="fp8-ef", steps=2)
    assert max(run_ranks(_error_memory_of_a_run, 2, config, tmp_path / "out", (1,))) < 1.0


def _log_of_bad_losses(config: TrainConfig, out: Path, steps: tuple[int, ...]) -> tuple[list[str], str]:
    """What was logged with a bad loss on rank 1 in these steps, and the error that ended the run if one did."""
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("thinwire").addHandler(handler)
    error = ""
    try:
        run_job_with_bad_loss(config, out, 1, steps)
    except TrainingError as ended:
        error = str(ended)
    return [record.getMessage() for record in handler.buffer], error


def test_bad_steps_in_a_row_end_the_run_and_the_log_names_the_rank(tmp_path: Path) -> None:
    config = job(tmp_path, max_bad_steps=3, checkpoint_every=1)
    (logged, error), (quiet, same_error) = run_ranks(_log_of_bad_losses, 2, config, tmp_path / "out", (1, 2, 3, 4))
    assert "step 4 skipped on all ranks: the loss on rank 1 is not finite (3 in a row, at most 3)" in logged
    assert error.startswith("step 4: 3 steps in a row (max_bad_steps) had a loss or gradient that is not finite")
    assert (quiet, same_error) == ([], error)
    # Nothing was saved in the bad streak: it would have displaced good checkpoints.
    assert checkpoints_in(tmp_path / "out" / "checkpoints")[0].name == "step-00000001"


def test_a_run_that_ends_in_bad_steps_says_of_which_step_its_parameters_are(tmp_path: Path) -> None:
    config = job(tmp_path, steps=3)
    (logged, error), (quiet, _) = run_ranks(_log_of_bad_losses, 2, config, tmp_path / "out", (1, 2))
    assert logged[-1] == "steps skipped at the end of the run: 2; the result is the parameters after step 1"
    assert (error, quiet) == ("", [])
    assert (tmp_path / "out" / "summary.json").exists()


def test_a_run_of_bad_steps_alone_is_a_failure_and_leaves_no_result(tmp_path: Path) -> None:
    (_, error), other = run_ranks(_log_of_bad_losses, 2, job(tmp_path, steps=2), tmp_path / "out", (0, 1))
    assert error == "step 2: no step of this run had a finite loss and gradient, so nothing was trained"
    assert other == ([], error)
    assert not (tmp_path / "out" / "summary.json").exists()
    assert not checkpoints_in(tmp_path / "out" / "checkpoints")


def test_bad_steps_that_are_not_in_a_row_do_not_end_the_run(tmp_path: Path) -> None:
    config = job(tmp_path, max_bad_steps=2)
    summary, _ = run_ranks(run_job_with_bad_loss, 2, config, tmp_path / "out", 0, (0, 2, 4))
    assert summary["skipped_steps"] == 3


def test_a_stop_request_on_one_rank_stops_all_at_the_same_step_with_a_checkpoint(tmp_path: Path) -> None:
    out = tmp_path / "my out"
    (outcome, said), other = run_ranks(listen, 2, run_job_until, job(tmp_path), out, 3, 1)
    assert [(o.step, o.finished) for o in (outcome, other[0])] == [(3, False), (3, False)]
    assert [path.name for path in checkpoints_in(out / "checkpoints")] == ["step-00000003"]
    assert not (out / "summary.json").exists()
    assert f"stopped at step 3 of 6; `thinwire train --resume --out '{out}'` continues\n" in said


@pytest.mark.parametrize(("recipe", "optimizer"), [("ddp", "adamw"), ("fp8-ef", "muon")])
def test_stopping_twice_and_resuming_is_the_same_training(tmp_path: Path, recipe: str, optimizer: str) -> None:
    model = _dropout_model(tmp_path / "model")
    config = job(tmp_path, recipe=recipe, accumulation=2, steps=9, model_name=model, optimizer_name=optimizer)
    config = replace(config, model=replace(config.model, random_weights=True))
    straight, _ = run_ranks(run_job, 2, config, tmp_path / "straight")
    out = tmp_path / "out"
    run_ranks(run_job_until, 2, config, out, 4, 0)
    run_ranks(run_job_until, 2, replace(config, resume=True), out, 3, 1)
    resumed, _ = run_ranks(run_job, 2, replace(config, resume=True), out)
    same = ("param_hash", "val_loss", "final_train_loss", "tokens", "sent_bytes_per_rank", "steps")
    assert {key: resumed[key] for key in same} == {key: straight[key] for key in same}
    timeless = [
        [(x["step"], x["loss"], x["sent_bytes"]) for x in lines(tmp_path / run)] for run in ("straight", "out")
    ]
    assert timeless[0] == timeless[1]


def _dropout_model(directory: Path) -> str:
    import transformers

    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.2)
    config.save_pretrained(directory)
    return str(directory)


def test_resuming_a_run_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n{"step": 2, "lo')
    run_ranks(run_job, 2, job(tmp_path, resume=True), out)
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4, 5, 6]


def test_resuming_on_another_number_of_ranks_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    out, config = tmp_path / "out", job(tmp_path, recipe="fp8-ef")
    run_ranks(run_job_until, 2, config, out, 3, 0)
    (summary, said), *_ = run_ranks(listen, 3, run_job, replace(config, resume=True), out)
    assert (summary["world_size"], summary["steps"], summary["tokens"]) == (3, 6, 6 * 6 * 23)
    # Plain DDP sends 2 (W-1)/W float32 numbers per parameter: three steps on two ranks, three on three.
    ddp = 4 * summary["parameters"] * (3 * 2 * 1 / 2 + 3 * 2 * 2 / 3)
    assert f", {ddp / summary['sent_bytes_per_rank']:.2f}x less than DDP float32; " in said


def test_a_checkpoint_of_a_later_step_than_the_run_is_refused(tmp_path: Path) -> None:
    out, config = tmp_path / "out", job(tmp_path)
    run_ranks(run_job, 1, config, out)
    with pytest.raises(RankFailed, match="the newest checkpoint is of step 6, after the last of --steps 5"):
        run_ranks(run_job, 1, replace(config, resume=True, steps=5), out)


def test_resuming_takes_other_optimizer_settings_but_holds_out_the_same_text(tmp_path: Path) -> None:
    out, config = tmp_path / "out", job(tmp_path, steps=2)
    run_ranks(run_job, 1, config, out)
    changed = job(tmp_path, steps=3, resume=True, optimizer_weight_decay=0.7, optimizer_beta2=0.5)
    run_ranks(run_job, 1, changed, out)
    manifest = json.loads((checkpoints_in(out / "checkpoints")[0] / "manifest.json").read_text())
    (adamw,) = manifest["state"]["optimizer"]["optimizers"]
    assert [group["numbers"]["weight_decay"] for group in adamw["groups"]] == [0.7, 0.0]
    assert [group["numbers"]["betas"] for group in adamw["groups"]] == [[0.9, 0.5]] * 2

    more_held_out = job(tmp_path, steps=4, resume=True, data_validation_fraction=0.5)
    tokens = [build_data(c.data, seed=c.seed)[0].num_tokens for c in (changed, more_held_out)]
    with pytest.raises(RankFailed, match=f"data.training_tokens: saved {tokens[0]}, now {tokens[1]}. Resume with"):
        run_ranks(run_job, 1, more_held_out, out)


def _differing_configuration(config: TrainConfig) -> None:
    optimizer = replace(config.optimizer, lr=0.5) if dist.get_rank() == 1 else config.optimizer
    assemble(replace(config, optimizer=optimizer), CPU)


def test_ranks_with_different_settings_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 differs from rank 0 in setting optimizer.lr: 0.5 instead of 0.001"
    ):
        run_ranks(_differing_configuration, 2, job(tmp_path))


def _differing_model(config: TrainConfig, directories: list[str]) -> None:
    name = directories[dist.get_rank()]
    assemble(replace(config, model=replace(config.model, name=name, random_weights=True)), CPU)


def test_ranks_with_different_models_are_refused_by_the_parameter(tmp_path: Path) -> None:
    import transformers

    directories = [str(tmp_path / "a"), str(tmp_path / "b")]
    for directory, width in zip(directories, (32, 64)):
        transformers.GPT2Config(n_embd=width, n_layer=1, n_head=2, n_positions=64).save_pretrained(directory)
    with pytest.raises(
        RankFailed, match=r"differs from rank 0 in parameter 'transformer.wte.weight' of the model: "
    ):
        run_ranks(_differing_model, 2, job(tmp_path), directories)


def _validation(config: TrainConfig) -> tuple[float, float]:
    run = assemble(config, CPU)
    run.model.eval()
    batch = fetch(run.validation_data, range(run.validation_data.num_sequences), CPU)
    with torch.no_grad():
        by_hand = float(summed_loss(run.model, batch)) / count_targets(batch) / run.validation_data.bytes_per_token
    run.model.train()
    return validate(run), by_hand


def test_validation_is_in_nats_per_byte_and_does_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    config = job(tmp_path, data_pack=False, data_sequence_length=40, data_validation_sequences=7)
    results = run_ranks(_validation, 3, config)
    for validated, by_hand in results:
        assert validated == pytest.approx(by_hand, rel=1e-6)
        assert validated == results[0][0]


def test_bfloat16_autocast_trains_and_keeps_float32_weights(tmp_path: Path) -> None:
    summary, _ = run_ranks(run_job, 2, job(tmp_path, precision="bfloat16"), tmp_path / "bfloat16")
    reference, _ = run_ranks(run_job, 2, job(tmp_path), tmp_path / "float32")
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=0.02)
    assert summary["val_loss"] != reference["val_loss"]


def test_muon_and_activation_checkpointing_train(tmp_path: Path) -> None:
    config = job(tmp_path, recipe="fp8-ef", optimizer_name="muon", model_activation_checkpointing=True)
    summary, other = run_ranks(run_job, 2, config, tmp_path / "out")
    assert summary["param_hash"] == other["param_hash"]
    assert lines(tmp_path / "out")[-1]["loss"] < lines(tmp_path / "out")[0]["loss"]


def test_the_parameter_hash_is_sha256_over_the_parameters_in_name_order() -> None:
    from thinwire.train.metrics import parameter_hash

    model = torch.nn.ModuleDict({"b": torch.nn.Linear(2, 3), "a": torch.nn.Embedding(4, 2, dtype=torch.bfloat16)})
    names = ["a.weight", "b.bias", "b.weight"]
    raw = b"".join(model.get_parameter(n).detach().view(torch.uint8).numpy().tobytes() for n in names)
    assert parameter_hash(model) == hashlib.sha256(raw).hexdigest()
