"""Muon on several ranks: who averages, who computes what, and what that sends."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from tests.optim.toys import Small, apart, bits, groups, plain, resumed, train
from tests.support.ranks import run_ranks
from thinwire.optim.replicas import deal

STEPS = 5
FP8 = tw.Routed(tw.Quantized("fp8_e4m3", feedback="error"), lambda slot: slot.numel >= 64)


def muon(model: nn.Module, **options: Any) -> tw.optim.Muon:
    return tw.optim.Muon(groups(model), lr=0.02, weight_decay=0.01, **{"dtype": torch.float32, **options})


def averaged_by(whom: str, steps: int = STEPS) -> tuple[dict[str, list[Any]], str, dict[str, int]]:
    """Weights, their bits and the bytes sent after a run whose gradients somebody averages."""
    double = torch.float32 if whom == "fp8" else torch.float64
    model: nn.Module = Small(seed=dist.get_rank() if whom == "muon" else 0, dtype=double)
    inner, reducer = model, None
    if whom == "muon on ddp":
        model = DDP(model, find_unused_parameters=True)
        tw.attach(model, tw.Local())
        reducer = tw.Dense()
    elif whom == "ddp":
        model = DDP(model, find_unused_parameters=True)
    else:
        reducer = FP8 if whom == "fp8" else tw.Dense()
    optimizer = muon(
        model, dtype=double, reducer=reducer, replicate=init_device_mesh("cpu", (dist.get_world_size(),))
    )
    train(model, optimizer, range(steps))
    sent = {row.op: row.sent_bytes for row in optimizer.ledger.rows() if row.phase != "control"}
    optimizer.close()
    return plain(inner), bits(inner), sent


def alone(ranks: int) -> dict[str, list[Any]]:
    """In float64: below it noise in directions without a gradient grows to the size of others."""
    model = Small(dtype=torch.float64)
    train(model, muon(model, dtype=torch.float64), range(STEPS), ranks=range(ranks))
    return plain(model)


def test_ranks_that_share_the_work_move_as_one_that_does_it_all() -> None:
    for world in (2, 3):
        expected = alone(world)
        for whom in ("muon", "muon on ddp", "ddp"):
            found = run_ranks(averaged_by, world, whom)
            assert len({bits for _, bits, _ in found}) == 1
            assert apart(found[0][0], expected) < 1e-10, (world, whom)


def test_the_ledger_counts_gradients_and_updates() -> None:
    """Of 2 ranks one sends a gradient once, and half of the updates; here 8 bytes per element of either."""
    _, _, sent = run_ranks(averaged_by, 2, "muon")[0]
    model = Small()
    used = [p.numel() for n, p in model.named_parameters() if p.requires_grad and "unused" not in n]
    shapes = [
        p.numel() for g in groups(model) if g["kind"] == "matrix" for n, p in g["params"] if "unused" not in n
    ]
    assert sent["all_reduce"] == STEPS * 8 * sum(used)
    assert STEPS * 8 * sum(shapes) / 2 <= sent["all_gather"] <= STEPS * 8 * (sum(shapes) / 2 + 100)


def test_gradients_travel_in_fp8_and_replicas_stay_identical() -> None:
    found = run_ranks(averaged_by, 2, "fp8")
    assert found[0][1] == found[1][1]
    assert 1e-4 < apart(found[0][0], alone(2)) < 0.2
    assert "all_to_all" in found[0][2]


def used_on_one_rank() -> tuple[str, float]:
    """A layer that only rank 1 uses: everybody gets half of its gradient."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)])
    optimizer = tw.optim.Muon(groups(model), lr=0.1, reducer=tw.Dense(), ns="exact", dtype=torch.float32)
    start = model[1].weight.detach().clone()
    x = torch.randn(5, 4) * (1 + dist.get_rank())
    (model[0](x).sum() + (model[1](x).sum() if dist.get_rank() else 0)).backward()
    optimizer.step()
    return bits(model), float((model[1].weight - start).norm())


def test_a_layer_that_one_rank_used_moves_on_all() -> None:
    (first, moved), (second, _) = run_ranks(used_on_one_rank, 2)
    assert first == second
    assert 0.099 < moved < 0.101  # a gradient of rank 1: one singular value


def refusals() -> dict[str, str]:
    """What is said of gradients that nobody, or somebody else too, averages, and of ranks that differ."""
    rank = dist.get_rank()

    def message(make: Any) -> str:
        try:
            make()
        except (RuntimeError, ValueError) as error:
            return str(error)
        return "nothing"

    def twice() -> None:
        model = DDP(Small(), find_unused_parameters=True)
        train(model, muon(model, reducer=tw.Dense()), range(1))

    def never() -> None:
        model = Small()
        train(model, muon(model), range(1))

    def more() -> None:
        model = nn.ModuleList(nn.Linear(3, 3) for _ in range(1 + rank))
        muon(model)

    def apart() -> None:  # as inside tw.local_update
        model = Small()
        alone = dist.new_group([rank], use_local_synchronization=True)
        train(model, muon(model, replicate=alone), range(1))

    return {
        "alone": message(apart),
        "twice": message(twice),
        "never": message(never),
        "shapes": message(lambda: muon(nn.Linear(3 + rank, 3))),
        "number": message(more),
        "mesh": message(lambda: muon(Small(), replicate=init_device_mesh("cpu", (2, 1)))),
    }


def test_gradients_averaged_twice_or_never_and_unlike_ranks_are_refused() -> None:
    first, second = run_ranks(refusals, 2)
    for found in (first, second):
        assert found["alone"] == "nothing"
        assert "the gradients of all ranks are equal before they were averaged" in found["twice"]
        assert "the gradients of the ranks differ: give reducer=tw.Dense()" in found["never"]
        assert "ranks optimize different numbers of parameters: [2, 4], by rank" in found["number"]
        assert "one dimension of a mesh" in found["mesh"]
    assert "here weight torch.float32 (3, 3), elsewhere another" in first["shapes"]
    assert "here weight torch.float32 (3, 4), elsewhere another" in second["shapes"]


def goes_on() -> tuple[str, str]:
    return resumed(lambda model: muon(model, reducer=FP8))


def test_a_resumed_run_goes_on_bit_for_bit_with_its_error_memory() -> None:
    for went_on, resumed_run in run_ranks(goes_on, 2):
        assert went_on == resumed_run


def test_work_is_dealt_evenly() -> None:
    sizes = [100, 1, 50, 50, 7, 7, 7, 20]
    shares = deal(sizes, 3)
    assert sorted(index for share in shares for index in share) == list(range(8))
    assert max(sum(sizes[i] for i in share) for share in shares) == 100
    assert deal([3], 2) == [[0], []]
