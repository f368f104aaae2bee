"""Optimizers, learning rate and clipping."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from thinwire.train.config import ModelConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from thinwire.train.model import Vocabulary, build_model
from thinwire.train.optimizer import build_optimizers, gradient_norm, hidden_matrices, learning_rate


def test_the_learning_rate_warms_up_and_follows_a_cosine() -> None:
    schedule = ScheduleConfig(warmup_steps=4, final_fraction=0.1)
    config = replace(TrainConfig(), steps=24, optimizer=OptimizerConfig(lr=2.0), schedule=schedule)
    assert [learning_rate(step, config) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert learning_rate(4, config) == 2.0
    assert learning_rate(14, config) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(24, config) == pytest.approx(0.2)


def test_a_constant_schedule_stays_at_the_peak() -> None:
    config = replace(TrainConfig(), steps=10, schedule=ScheduleConfig(warmup_steps=0, decay="constant"))
    assert {learning_rate(step, config) for step in range(10)} == {config.optimizer.lr}


def test_a_run_without_warm_up_and_one_of_warm_up_alone_have_a_learning_rate() -> None:
    for warmup in (0, 3):
        config = replace(TrainConfig(), steps=3, schedule=ScheduleConfig(warmup_steps=warmup))
        assert all(0 < learning_rate(step, config) <= config.optimizer.lr for step in range(3))


def test_weight_decay_is_for_matrices_only() -> None:
    model = build_model(ModelConfig(), Vocabulary(257), seed=0)
    (optimizer,) = build_optimizers(model, OptimizerConfig(weight_decay=0.3))
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {decays[p] for p in model.parameters() if p.ndim >= 2} == {0.3}
    assert {decays[p] for p in model.parameters() if p.ndim < 2} == {0.0}
    assert len(decays) == len(list(model.parameters()))


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = build_model(ModelConfig("llama-tiny"), Vocabulary(257), seed=0)
    muon, adamw = build_optimizers(model, OptimizerConfig(name="muon"))
    assert isinstance(muon, torch.optim.Muon)
    names = {id(p): name for name, p in model.named_parameters()}
    of_muon = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    of_adamw = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert of_muon == hidden_matrices(model)
    assert all("proj" in name for name in of_muon)
    assert of_muon | of_adamw == set(names.values())
    assert not of_muon & of_adamw
    assert any("embed_tokens" in name for name in of_adamw)


def test_frozen_parameters_are_left_alone() -> None:
    model = torch.nn.Linear(3, 3)
    model.bias.requires_grad_(False)
    (optimizer,) = build_optimizers(model, OptimizerConfig())
    assert [p for group in optimizer.param_groups for p in group["params"]] == [model.weight]


def test_clipping_scales_all_gradients_to_the_norm() -> None:
    parameters = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(1)),
        torch.nn.Parameter(torch.ones(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert gradient_norm(parameters, clip=1.0) == 5.0
    assert gradient_norm(parameters, clip=0.0) == pytest.approx(1.0)
    assert parameters[2].grad is None


def test_a_norm_that_is_not_finite_leaves_the_gradients_alone() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, math.inf])
    assert gradient_norm([parameter], clip=1.0) == math.inf
    assert parameter.grad.tolist() == [1.0, math.inf]
