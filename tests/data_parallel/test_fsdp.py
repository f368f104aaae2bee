"""`attach` on FSDP2 models with replicas."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW

import thinwire as tw
from tests.local_update.shards import local, mesh_of, sharded, steps, whole
from tests.local_update.toys import Layers, apart, bits, loss
from tests.support.ranks import run_ranks


def replicated() -> dict[str, Any]:
    """Native HSDP, and FSDP2 on the shards with `attach` over the replicas, with and without mixed precision."""
    mesh, rank = mesh_of(("replicate", "shard")), dist.get_rank()
    found: dict[str, Any] = {}
    policies = {"float32": {}, "bfloat16": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}}
    for name, options in policies.items():
        native = sharded(Layers(), mesh, **options)
        found[f"native {name}"] = steps(native, AdamW(native.parameters(), lr=0.01), rank, 6)
        own = sharded(Layers(), mesh["shard"], **options)
        link = tw.attach(own, tw.Dense(), replicate=mesh["replicate"])
        link.verify(every=2)
        found[f"attached {name}"] = steps(own, AdamW(own.parameters(), lr=0.01), rank, 6)
        found[f"bytes {name}"] = link.ledger.sent_bytes()
        found[f"apart {name}"] = apart(whole(own), whole(native))
        link.detach()
    accumulated = []
    for attached in (False, True):
        model = sharded(Layers(), mesh["shard"] if attached else mesh)
        link = tw.attach(model, tw.Dense(), replicate=mesh["replicate"]) if attached else None
        for micro in range(3):
            model.set_requires_gradient_sync(micro == 2)  # type: ignore[attr-defined]
            loss(model, micro, rank).backward()
        accumulated.append(bits({n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}))
    found["accumulated"] = accumulated
    quantized = sharded(Layers(), mesh["shard"])
    link = tw.attach(quantized, tw.Quantized("int8", feedback="error"), replicate=mesh["replicate"])
    steps(quantized, AdamW(quantized.parameters(), lr=0.01), rank, 6)
    native = sharded(Layers(), mesh)
    steps(native, AdamW(native.parameters(), lr=0.01), rank, 6)
    found["quantized"] = apart(whole(quantized), whole(native))
    state = link.state_dict()
    link.load_state_dict(copy.deepcopy(state))
    found["refused"] = refusals(mesh)
    return found


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    first = sharded(Layers(), mesh["shard"])
    tw.attach(first, tw.Dense(), replicate=mesh["replicate"])
    unused = Layers()
    unused.spare = nn.Linear(4, 4)  # type: ignore[assignment]
    unused = sharded(unused, mesh["shard"])
    tw.attach(unused, tw.Dense(), replicate=mesh["replicate"])
    bare = Layers()
    return {
        "two dimensions, no replicate": said(lambda: tw.attach(sharded(Layers(), mesh), tw.Dense())),
        "two dimensions": said(
            lambda: tw.attach(sharded(Layers(), mesh), tw.Dense(), replicate=mesh["replicate"])
        ),
        "whole mesh": said(lambda: tw.attach(sharded(Layers(), mesh["shard"]), tw.Dense(), replicate=mesh)),
        "second": said(lambda: tw.attach(first, tw.Dense(), replicate=mesh["replicate"])),
        "half": said(
            lambda: tw.attach(halfway(mesh), tw.Dense(), replicate=mesh["replicate"]),
        ),
        "half, local update": said(
            lambda: tw.local_update(*with_optimizer(halfway(mesh)), tw.DiLoCo(), replicate=mesh["replicate"])
        ),
        "shards": said(lambda: tw.attach(sharded(Layers(), mesh["shard"]), tw.Dense(), replicate=mesh["shard"])),
        "shards, local update": said(
            lambda: tw.local_update(
                *with_optimizer(sharded(Layers(), mesh["shard"])), tw.DiLoCo(), replicate=mesh["shard"]
            )
        ),
        "DDP": said(lambda: tw.attach(DDP(bare), tw.Dense(), replicate=mesh["replicate"])),
        "unused": said(lambda: loss(unused, 0, 0).backward()),
        "groups": said(
            lambda: tw.local_update(
                *with_optimizer(sharded(Layers(), mesh["shard"])),
                tw.Pier(groups=2),
                total_steps=9,
                replicate=mesh["replicate"],
            )
        ),
        "local update": said(
            lambda: tw.local_update(*with_optimizer(sharded(Layers(), mesh["shard"])), tw.DiLoCo())
        ),
    }


def halfway(mesh: DeviceMesh) -> Layers:
    model = Layers()
    fully_shard(model.layers[0], mesh=mesh["shard"])
    return model


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    return model, AdamW(model.parameters(), lr=0.01)


def said(action: Any) -> str:
    try:
        action()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def hsdp() -> list[dict[str, Any]]:
    return run_ranks(replicated, 4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fsdp2_with_a_dense_mean_over_replicas_is_native_hsdp_bit_for_bit(
    hsdp: list[dict[str, Any]], precision: str
) -> None:
    for found in hsdp:
        if precision == "float32":
            assert found["attached float32"] == found["native float32"]
        assert found[f"apart {precision}"] < (1e-7 if precision == "float32" else 0.02)


def test_accumulated_gradients_are_averaged_once(hsdp: list[dict[str, Any]]) -> None:
    for found in hsdp:
        native, attached = found["accumulated"]
        assert attached == native


def test_a_shard_is_sent_once_per_step_and_narrow_formats_work(hsdp: list[dict[str, Any]]) -> None:
    numel = sum(-(-p.shape[0] // 2) * p[0].numel() for p in Layers().parameters())  # padded shards
    for found in hsdp:
        assert found["bytes float32"] == 6 * 4 * numel
        assert found["quantized"] < 0.02


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            "two dimensions, no replicate",
            "ValueError: attach: .* is sharded over a mesh of two dimensions.*: write fully_shard",
        ),
        ("two dimensions", "ValueError: attach: .* is sharded over a mesh of two dimensions.*: write fully_shard"),
        ("whole mesh", "ValueError: attach: replicate is one dimension of a mesh"),
        ("second", "ValueError: this model has an all-reduce hook already"),
        ("half", r"ValueError: 'layers\.1\.weight' is not sharded by FSDP2: call fully_shard on the root"),
        ("half, local update", r"ValueError: 'layers\.1\.weight' is not sharded by FSDP2: call fully_shard on"),
        ("shards", "ValueError: attach: the ranks along replicate hold different shards of FSDPLayers: write"),
        ("shards, local update", "ValueError: local_update: the ranks along replicate hold different shards"),
        ("DDP", "ValueError: attach: replicate is for sharded models"),
        ("unused", "ValueError: a parameter of the root module got no gradient.* spare"),
        ("groups", "ValueError: groups: those of a sharded model are the ranks that share its shards"),
        ("local update", "ValueError: local_update: the parameters of FSDPLayers are sharded; say which ranks"),
    ],
)
def test_what_does_not_fit_a_sharded_model_is_refused(
    hsdp: list[dict[str, Any]], what: str, sentence: str
) -> None:
    for found in hsdp:
        assert re.match(sentence, found["refused"][what]), found["refused"][what]
