"""`attach` on FSDP2 models: a reducer in place of the reduce-scatter."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import thinwire as tw
from tests.data_parallel.test_fsdp import said
from tests.local_update.shards import local, whole
from tests.local_update.toys import bits
from tests.support.ranks import run_ranks

INT4 = tw.Quantized("int4", feedback="error")
GIFT = tw.Quantized("nvfp4", feedback="error", geometry=tw.GIFT(rank=4, refresh_every=3))
REDUCERS = {
    "dense": (tw.Dense(), 1e-6),
    "fp8": (tw.Quantized("fp8_e4m3"), 0.06),
    "int4": (INT4, 0.2),
    "loco": (tw.Quantized("int4", feedback=tw.LoCo(reset=3)), 0.2),
    "gift": (GIFT, 0.3),
    "hadamard": (tw.Quantized("int8", feedback="error", geometry=tw.Hadamard(16)), 0.02),
    "routed": (tw.Routed(tw.Quantized("fp8_e5m2"), "*weight"), 0.2),
}


class Odd(nn.Module):
    """Rows that divide by nothing, fewer rows than ranks, three dimensions, frozen and tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, 24)) for _ in range(2)
        )
        self.gate = nn.Parameter(torch.ones(1, 24))
        self.scale = nn.Parameter(torch.ones(2))
        self.conv = nn.Conv1d(24, 24, 3, padding=1)
        self.frozen = nn.Linear(24, 24, bias=False).requires_grad_(False)
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # (batch, length, 24)
        for block in self.blocks:
            x = x + block(x)
        x = self.conv(x.mT).mT + self.frozen(x)
        return self.head(x * self.gate * self.scale.prod())  # type: ignore[no-any-return]


def model_of(**options: Any) -> Odd:
    model, mesh = Odd(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[return-value]


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    tokens = torch.randint(11, (4, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole, float32."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.full_tensor().float() if isinstance(g, DTensor) else g.float() for name, g in named.items()}


def error(own: dict[str, Tensor], native: dict[str, Tensor]) -> float:
    """The largest relative error of a gradient; of all their names."""
    assert own.keys() == native.keys()
    return max(float((own[n] - native[n]).norm() / (native[n].norm() + 1e-12)) for n in native)


def one_backward(
    reducer: Any = None, prepare: Callable[[Any], object] = lambda model: None, **options: Any
) -> Any:
    model = model_of(**options)
    prepare(model)
    if reducer is not None:
        tw.attach(model, reducer)
    loss_of(model, 0).backward()
    return gradients(model)


def summed(model: Any) -> None:
    """What gloo needs to divide by something else than the number of ranks."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(4.0)
            module.set_force_sum_reduction_for_comms(True)


def divided(model: Any) -> None:
    """PREMUL_SUM, which gloo itself does not have."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(4.0)


def accumulated(reducer: Any = None) -> dict[str, Tensor]:
    model = model_of()
    if reducer is not None:
        tw.attach(model, reducer)
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)  # type: ignore[attr-defined]
        loss_of(model, micro).backward()
    return gradients(model)


def trained(reducer: Any = None, steps: int = 6) -> tuple[dict[str, Tensor], str]:
    model = model_of(reshard_after_forward=steps % 2 == 0)
    link = tw.attach(model, reducer) if reducer is not None else None
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    if link is not None:
        link.verify()
        link.detach()
    return whole(model), bits({name: local(p) for name, p in model.named_parameters()})


def telescoped(reducer: Any, share: float) -> float:
    """Sum of exact means - sum of applied means - what is owed, relative."""
    model, native = model_of(), model_of()
    link = tw.attach(model, reducer)
    missing: dict[str, Tensor] = {}
    size = 0.0
    for step in range(8):
        for each in (model, native):
            each.zero_grad()
            loss_of(each, step).backward()
        own, exact = gradients(model), gradients(native)
        for name, mean in exact.items():
            missing[name] = missing.get(name, torch.zeros_like(mean)) + mean - own[name]
            size = max(size, float(mean.abs().max()))
    state = link.state_dict()
    owed = {name: state[f"residual.{name}"].clone() for name in missing}
    for value in owed.values():
        dist.all_reduce(value)
    kept = max(float(value.abs().max()) for value in owed.values())
    assert kept > 1e-4 * size
    return max(float((missing[n] - owed[n] / share).abs().max()) for n in missing) / size


def resumed() -> bool:
    """Bit for bit after a save in the middle, into a new link of a copy of the model."""
    results = []
    for stop in (None, 4):
        model = model_of()
        optimizer = AdamW(model.parameters(), lr=0.01)
        link = tw.attach(model, GIFT)
        for step in range(9):
            if step == stop:
                state = copy.deepcopy(link.state_dict())
                link.detach()
                link = tw.attach(model, GIFT)
                link.load_state_dict(state)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        results.append(bits({name: local(p) for name, p in model.named_parameters()}))
    return results[0] == results[1]


def bytes_sent() -> tuple[int, int]:
    """Counted, and by formula: one phase, (W-1) encoded pieces."""
    model = model_of()
    link = tw.attach(model, tw.Quantized("int8"))
    loss_of(model, 0).backward()
    loss_of(model, 1).backward()
    world_size = dist.get_world_size()
    by_formula = 0
    for slot in link.slots:
        rows = slot.shape[0]
        piece = -(-rows // world_size) * (slot.numel // rows)
        blocks = -(-piece // 128)
        by_formula += 2 * (world_size - 1) * blocks * (128 + 4)
    return link.ledger.sent_bytes(), by_formula


def given_back() -> bool:
    model = model_of()
    tw.attach(model, INT4).detach()
    loss_of(model, 0).backward()
    return error(gradients(model), one_backward()) == 0.0


def refusals() -> dict[str, str]:
    second = model_of()
    tw.attach(second, tw.Dense())
    spare = Odd()
    spare.spare = nn.Linear(4, 4)
    fully_shard(spare)
    tw.attach(spare, tw.Dense())
    zeros = Odd()
    zeros.spare = nn.Linear(4, 4)
    fully_shard(zeros).set_reduce_scatter_unused_params(True)
    tw.attach(zeros, tw.Dense())
    part = Odd()
    fully_shard(part.blocks[0])
    return {
        "unused": said(lambda: loss_of(spare, 0).backward()),
        "unused, as zeros": said(lambda: loss_of(zeros, 0).backward()),
        "second": said(lambda: tw.attach(second, INT4)),
        "part": said(lambda: tw.attach(part, tw.Dense())),
        "both sides": said(lambda: tw.attach(model_of(), tw.Quantized("int8", geometry=tw.GIFT(sides="both")))),
    }


def everything() -> dict[str, Any]:
    native, native_trained, native_bits = one_backward(), *trained()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    wide = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fp16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    found: dict[str, Any] = {
        "one": {name: error(one_backward(reducer), native) for name, (reducer, _) in REDUCERS.items()},
        "trained": {name: error(trained(reducer)[0], native_trained) for name, (reducer, _) in REDUCERS.items()},
        "dense bits": trained(tw.Dense())[1] == native_bits,
        "accumulated": error(accumulated(tw.Dense()), accumulated()),
        "accumulated int8": error(accumulated(tw.Quantized("int8")), accumulated()),
        "summed": error(one_backward(tw.Dense(), summed), one_backward(prepare=summed)),
        "divided": error(one_backward(tw.Dense(), divided), one_backward(prepare=summed)),
        "bfloat16": error(one_backward(tw.Dense(), mp_policy=half), one_backward(mp_policy=half)),
        "bfloat16, wide": error(one_backward(tw.Dense(), mp_policy=wide), one_backward(mp_policy=wide)),
        "float16": error(one_backward(tw.Dense(), mp_policy=fp16), one_backward(mp_policy=fp16)),
        "float16, int8": error(one_backward(tw.Quantized("int8"), mp_policy=fp16), one_backward(mp_policy=fp16)),
        "telescoped": {
            "int4": telescoped(INT4, 1.0),
            "loco": telescoped(tw.Quantized("int4", feedback=tw.LoCo(reset=None, storage="float32")), 0.2),
        },
        "resumed": resumed(),
        "bytes": bytes_sent(),
        "given back": given_back(),
        "refused": refusals(),
    }
    return found


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(everything, request.param)


@pytest.mark.parametrize("name", REDUCERS)
def test_a_reducer_gives_what_fsdp2_gives_within_its_error(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        assert of_rank["one"][name] < REDUCERS[name][1]
        assert of_rank["trained"][name] < 3 * max(REDUCERS[name][1], 1e-5)


def test_dense_is_fsdp2_itself_bit_for_bit_on_two_ranks(found: list[dict[str, Any]]) -> None:
    """On more, gloo's reduce-scatter adds in another order than its all-reduce."""
    if len(found) == 2:
        assert all(of_rank["dense bits"] for of_rank in found)


def test_accumulated_gradients_are_reduced_once(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["accumulated"] < 1e-6
        assert of_rank["accumulated int8"] < 0.02


@pytest.mark.parametrize(
    ("case", "most"),
    [
        ("summed", 1e-6),
        ("divided", 1e-6),
        ("bfloat16", 0.02),
        ("bfloat16, wide", 1e-6),
        ("float16", 2e-3),
        ("float16, int8", 0.02),
    ],
)
def test_whatever_fsdp2_asks_for_comes_out(found: list[dict[str, Any]], case: str, most: float) -> None:
    assert all(of_rank[case] < most for of_rank in found)


@pytest.mark.parametrize("name", ["int4", "loco"])
def test_nothing_is_lost_at_the_sender(found: list[dict[str, Any]], name: str) -> None:
    assert all(of_rank["telescoped"][name] < 5e-6 for of_rank in found)


def test_a_link_that_is_saved_and_loaded_goes_on_bit_for_bit(found: list[dict[str, Any]]) -> None:
    assert all(of_rank["resumed"] for of_rank in found)


def test_each_rank_sends_the_others_their_pieces_once(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        counted, by_formula = of_rank["bytes"]
        assert by_formula <= counted <= 1.02 * by_formula  # chunks are padded to 16 bytes


def test_detach_gives_fsdp2_its_own_back(found: list[dict[str, Any]]) -> None:
    assert all(of_rank["given back"] for of_rank in found)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("second", "ValueError: this model has a link already: call its detach"),
        (
            "unused",
            "ValueError: a parameter of the root module got no gradient.*set_reduce_scatter_unused_params",
        ),
        ("unused, as zeros", "nothing"),
        ("part", r"ValueError: 'gate' is not sharded by FSDP2: call fully_shard on the root module too"),
        (
            "both sides",
            "ValueError: GIFT sides='both' mixes the rows of a matrix, which FSDP2 shards: leave sides out",
        ),
    ],
)
def test_what_does_not_fit_is_refused(found: list[dict[str, Any]], what: str, sentence: str) -> None:
    for of_rank in found:
        assert re.match(sentence, of_rank["refused"][what]), of_rank["refused"][what]
