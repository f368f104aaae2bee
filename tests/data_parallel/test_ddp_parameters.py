"""Parameters of every shape, stride and dtype: each is averaged or refused by its name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.data_parallel.toys import FP8, REDUCERS, layers, parameter_bits, train, vectors
from tests.support.ranks import run_ranks

DEFAULT_ROUTE = tw.Routed(FP8)
"""Matrices of at least 4096 elements through FP8, everything else dense."""


class Odd(nn.Module):
    """Tied, frozen, 0-d, empty, transposed, permuted and half-precision parameters; float64 ones on request."""

    def __init__(self, *, double: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(600, 8)
        self.output = nn.Linear(8, 600, bias=False)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.transposed = nn.Parameter(torch.randn(9, 8).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4, 9).permute(1, 3, 0, 2))
        self.bfloat = nn.Parameter(torch.randn(9, 5).bfloat16())
        self.half_vector = nn.Parameter(torch.randn(5).half())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty_vector = nn.Parameter(torch.empty(0))
        self.empty_box = nn.Parameter(torch.empty(3, 0, 2))
        self.double_matrix = nn.Parameter(torch.randn(9, 500 if double else 0, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.frozen
        y = x @ self.transposed + self.output(x).mean(-1, keepdim=True) + self.permuted.square().mean()
        z = (y.bfloat16() @ self.bfloat).float() * self.half_vector.float() * self.scale
        empty = self.empty_vector.sum() + self.empty_box.sum()
        return z.mean() + empty + (y.double() @ self.double_matrix).sum().float() / 1e3


def _tokens(step: int) -> Tensor:
    return torch.randint(0, 600, (6,), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _odd(reducer: Any, *, double: bool, views: bool = False) -> tuple[str, list[str]]:
    """The bits after some steps, and the parameters whose gradient lies in memory otherwise than they do."""
    torch.manual_seed(3)
    ddp = DDP(Odd(double=double), bucket_cap_mb=0.0005, gradient_as_bucket_view=views)
    if reducer is not None:
        tw.attach(ddp, reducer)
    train(ddp, 4, batch=_tokens, loss=lambda output: output)
    trained = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
    restrided = [name for name, p in trained.items() if p.numel() and p.grad.stride() != p.stride()]
    return parameter_bits(ddp.module), restrided


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.nothing.sum()


def _only_empty(reducer: Any) -> tuple[int, int]:
    ddp = DDP(OnlyEmpty())
    link = tw.attach(ddp, reducer)
    for _ in range(3):
        ddp(torch.ones(2)).backward()
    return link.ledger.sent_bytes(), link.state_dict()["reductions"]


def _ignored() -> list[str]:
    """DDP was told to leave a weight alone, and ranks disagree about it."""
    model = layers(20, 30, 8)
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["layers.0.weight"])
    ddp = DDP(model)
    with torch.no_grad():
        model.layers[0].weight.add_(dist.get_rank())
    link = tw.attach(ddp, FP8)
    link.verify(every=1)
    train(ddp, 2, batch=vectors)
    return [slot.name for slot in link.slots]


def _thawed() -> str:
    """A layer that was frozen when the link was attached starts to learn."""
    ddp = DDP(layers(20, 30, 8), find_unused_parameters=True)
    ddp.module.layers[0].requires_grad_(False)
    tw.attach(ddp, FP8)
    train(ddp, 2, batch=vectors)
    ddp.module.layers[0].requires_grad_(True)
    return _refusal(lambda: train(ddp, 1, batch=vectors))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def _refused() -> dict[str, str]:
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    frozen = nn.Sequential(nn.Embedding(5, 4, sparse=True).requires_grad_(False), nn.Linear(4, 4))
    return {
        "sparse": _refusal(lambda: tw.attach(DDP(sparse), tw.Dense())),
        "sparse but frozen": _refusal(lambda: tw.attach(DDP(frozen), tw.Dense())),
        "complex": _refusal(lambda: tw.attach(DDP(Complex()), tw.Dense())),
        "float64": _refusal(lambda: tw.attach(DDP(Odd(double=True)), FP8)),
    }


def _refusal(action: Any) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "fine"


class Filter(nn.Module):
    """The weight of a convolution, whose gradient is the input."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 7, 3, bias=False).to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv.weight * x).sum()


def _filters(*memory_formats: torch.memory_format) -> dict[str, np.ndarray]:
    """Two reductions in each memory format, the error memory handed on by its state: what was applied, what all
    ranks still owe, and the exact sum of means."""
    rank, shape = dist.get_rank(), (7, 5, 3, 3)
    gradients = [torch.arange(315.0).view(shape).add(10 * rank + step).sin() for step in range(4)]
    applied, state = torch.zeros(shape, dtype=torch.float64), None
    for part, memory_format in enumerate(memory_formats):
        ddp = DDP(Filter(memory_format))
        link = tw.attach(ddp, FP8)
        if state is not None:
            link.load_state_dict(state)
        for gradient in gradients[2 * part : 2 * part + 2]:
            ddp.zero_grad()
            ddp(gradient).backward()
            applied += ddp.module.conv.weight.grad
        state = link.state_dict()
    owed, exact = state["residual.conv.weight"].double(), torch.stack(gradients).double().sum(0)
    dist.all_reduce(owed)
    dist.all_reduce(exact)
    return {"applied": applied.numpy(), "owed": owed.numpy(), "exact": exact.numpy() / dist.get_world_size()}


def _memory_formats() -> dict[str, dict[str, np.ndarray]]:
    plain, last = torch.contiguous_format, torch.channels_last
    return {
        "contiguous": _filters(plain, plain),
        "channels last": _filters(last, last),
        "to channels last": _filters(plain, last),
        "from channels last": _filters(last, plain),
    }


def _parameters() -> dict[str, Any]:
    found: dict[str, Any] = {"refused": _refused(), "ignored": _ignored(), "thawed": _thawed()}
    found["memory formats"] = _memory_formats()
    for views in (False, True):
        found[f"plain {views}"] = _odd(None, double=True, views=views)
        found[f"dense {views}"] = _odd(tw.Dense(), double=True, views=views)
        found[f"routed {views}"] = _odd(DEFAULT_ROUTE, double=True, views=views)
        found[f"fp8 {views}"] = _odd(FP8, double=False, views=views)
    for name, reducer in REDUCERS.items():
        found[f"only empty {name}"] = _only_empty(reducer)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(_parameters, 2)


@pytest.mark.parametrize("reducer", ["dense", "routed", "fp8"])
def test_odd_parameters_keep_their_strides_and_stay_equal_on_all_ranks(
    ranks: list[dict[str, Any]], reducer: str
) -> None:
    runs = [rank[f"{reducer} {views}"] for rank in ranks for views in (False, True)]
    assert all(run == runs[0] for run in runs)
    assert runs[0][1] == []


def test_odd_parameters_through_dense_have_the_bits_of_plain_ddp_on_two_ranks(ranks: list[dict[str, Any]]) -> None:
    assert all(rank[f"dense {views}"] == rank[f"plain {views}"] for rank in ranks for views in (False, True))


def test_means_and_error_memory_do_not_depend_on_the_memory_format_even_if_it_changes_on_resume(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        runs = rank["memory formats"]
        for run in runs.values():
            assert all(np.array_equal(run[what], runs["contiguous"][what]) for what in run)
            assert np.abs(run["applied"] + run["owed"] - run["exact"]).max() < 1e-6
            assert np.abs(run["owed"]).max() > 1e-3


@pytest.mark.parametrize("reducer", REDUCERS)
def test_a_model_of_empty_parameters_sends_nothing(ranks: list[dict[str, Any]], reducer: str) -> None:
    assert all(rank[f"only empty {reducer}"] == (0, 3) for rank in ranks)


def test_parameters_that_ddp_ignores_are_neither_averaged_nor_compared(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["ignored"] == ["layers.0.bias", "layers.1.weight", "layers.1.bias"] for rank in ranks)


def test_a_parameter_thawed_after_attach_is_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["thawed"].startswith("'layers.0.")
        assert "attach the reducer again" in rank["thawed"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("sparse", "'0.weight' belongs to an embedding with sparse=True"),
        ("complex", "'phases' is torch.complex64"),
        ("float64", "got torch.float64 for 'double_matrix'; send it through Dense"),
        ("sparse but frozen", "fine"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(ranks: list[dict[str, Any]], what: str, message: str) -> None:
    assert all(message in rank["refused"][what] for rank in ranks)
