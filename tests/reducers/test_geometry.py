"""Quantized in the coordinates of a geometry: the mean is the same, nothing is lost, the error is smaller."""

from __future__ import annotations

import zlib
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.reducers.gradients import bind, equal, plain, reduce, residuals, sum_over_ranks
from tests.support.ranks import run_ranks
from thinwire.collectives import Layout, Slot
from thinwire.formats import get
from thinwire.geometry import GIFT, Geometry, Hadamard
from thinwire.reducers import BoundReducer, Quantized
from thinwire.reducers.coordinates import wire_slots
from thinwire.reducers.executable import for_another_thread
from thinwire.reducers.quantized import BoundQuantized

SLOTS = (
    Slot("layer.weight", (64, 96)),
    Slot("narrow.weight", (17, 48), torch.bfloat16),
    Slot("conv.weight", (5, 3, 7, 2)),
    Slot("embedding.weight", (200, 33)),
    Slot("row.weight", (1, 50)),
    Slot("bias", (41,)),
    Slot("scale", ()),
    Slot("nothing", (0, 8)),
)
GEOMETRIES: dict[str, Geometry] = {
    "hadamard": Hadamard(64),
    "gift": GIFT(rank=8, sides="right", refresh_every=4),
    "both": GIFT(rank=8, refresh_every=4, sides="both", power=1.0),
    "ranks": GIFT(rank=8, refresh_every=4, statistics_of="ranks"),
}
STEPS = 11  # with refreshes at 1, 2, 3, 5 and 9


def gradient(slot: Slot, step: int, rank: int) -> Tensor:
    """Rows that share a direction, the same in every step, and noise of this step and rank."""
    noise = torch.Generator().manual_seed(zlib.crc32(f"{slot.name} {step} {rank}".encode()))
    common = torch.Generator().manual_seed(zlib.crc32(slot.name.encode()))
    if len(slot.shape) < 2:
        return torch.randn(slot.shape, generator=noise).to(slot.dtype)
    direction = 3.0 * torch.randn((1, *slot.shape[1:]), generator=common)
    along = torch.randn((slot.shape[0], *(1 for _ in slot.shape[1:])), generator=noise)
    return (along * direction + 0.3 * torch.randn(slot.shape, generator=noise)).to(slot.dtype)


def gradients(step: int, rank: int) -> dict[str, Tensor]:
    return {slot.name: gradient(slot, step, rank) for slot in SLOTS}


def exact_mean(slot: Slot, step: int, world_size: int) -> Tensor:
    return torch.stack([gradient(slot, step, rank).double() for rank in range(world_size)]).mean(0)


def owed(bound: BoundReducer) -> dict[str, Tensor]:
    """This rank's residuals in the coordinates of the gradients."""
    assert isinstance(bound, BoundQuantized)
    kept = residuals(bound)
    change = bound._coordinates
    assert change is not None
    return {name: change.inverse(name, residual) for name, residual in kept.items()}


def loss_and_means(format: str, geometry: str) -> tuple[float, list[dict[str, Any]]]:
    """What error feedback loses of the largest sum, over loss scales and a rollback; the means of every step."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bound, wire = bind(Quantized(format, feedback="error", geometry=GEOMETRIES[geometry]), SLOTS)
    exact = {slot.name: torch.zeros(slot.shape, dtype=torch.float64) for slot in SLOTS}
    applied = {name: total.clone() for name, total in exact.items()}
    history = []
    for step in range(STEPS):
        scale = (1.0, 1024.0, 2.0**-5)[step % 3]
        bound.set_loss_scale(scale)
        named = {name: g * scale for name, g in gradients(step, rank).items()}
        if step == 6:  # thrown away, on all ranks: one of them has an inf
            named["bias"][3] = float("inf") if rank == 0 else 1.0
            reduce(bound, named)
            continue
        means = reduce(bound, named)
        history.append(plain(means))
        for slot in SLOTS:
            exact[slot.name] += exact_mean(slot, step, world_size)
            applied[slot.name] += means[slot.name].double() / scale
    rest = owed(bound)
    lost = [0.0]
    for slot in SLOTS:
        if slot.numel:
            difference = applied[slot.name] + sum_over_ranks(rest[slot.name]) - exact[slot.name]
            lost.append(float(difference.norm() / exact[slot.name].norm()))
    wire.close()
    return max(lost), history


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_nothing_is_lost_across_refreshes_and_all_ranks_hold_the_same_means(geometry: str, ranks: int) -> None:
    results = run_ranks(loss_and_means, ranks, "nvfp4", geometry)
    assert max(lost for lost, _ in results) < 1e-5
    for _, history in results[1:]:
        assert all(equal(a, b) for a, b in zip(history, results[0][1]))


def errors(format: str, geometry: Geometry | None) -> list[float]:
    """Of the layer's mean, step by step, without feedback."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bound, wire = bind(Quantized(format, geometry=geometry), SLOTS)
    layer, out = SLOTS[0], []
    for step in range(6):
        mean = exact_mean(layer, step, world_size)
        means = reduce(bound, gradients(step, rank))
        out.append(float((means[layer.name] - mean).norm() / mean.norm()))
    wire.close()
    return out


def compared() -> list[tuple[str, list[float], list[float]]]:
    gift = GIFT(rank=8)
    return [(name, errors(name, None), errors(name, gift)) for name in ("fp8_e5m2", "nvfp4", "int4_span")]


def test_from_the_second_reduction_on_the_error_is_less_than_half() -> None:
    for name, without, with_gift in run_ranks(compared, 2)[0]:
        assert with_gift[0] == without[0], name
        assert all(b < 0.5 * a for a, b in zip(without[2:], with_gift[2:])), name


def through_float32(geometry: str) -> float:
    """The largest relative distance of any mean from the exact one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bound, wire = bind(Quantized("fp32", geometry=GEOMETRIES[geometry]), SLOTS)
    largest = 0.0
    for step in range(4):
        means = reduce(bound, gradients(step, rank))
        for slot in SLOTS:
            if slot.numel and slot.dtype == torch.float32:
                mean = exact_mean(slot, step, world_size)
                largest = max(largest, float((means[slot.name] - mean).norm() / mean.norm()))
    wire.close()
    return largest


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_with_float32_on_the_wire_the_mean_is_the_plain_mean(geometry: str) -> None:
    assert run_ranks(through_float32, 3, geometry)[0] < 1e-5


def scattered() -> list[float]:
    """Relative errors of this rank's pieces of a reduce_scatter in GIFT coordinates."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    bound, wire = bind(Quantized("fp32", geometry=GIFT(rank=8, sides="right")), SLOTS)
    places = Layout(tuple(wire_slots(SLOTS)), world_size, 8).places
    distances = []
    for step in range(3):
        pieces = {p.slot.name: torch.full((p.length(rank),), 7.0) for p in places}
        bound.begin()
        bound.reduce_scatter(gradients(step, rank), pieces).wait()
        for slot, place in zip(SLOTS, places):
            start = rank * place.piece
            mean = exact_mean(slot, step, world_size).reshape(-1)[start : start + place.length(rank)]
            if mean.numel() and slot.dtype == torch.float32:
                distances.append(float((pieces[slot.name] - mean).norm() / mean.norm()))
    wire.close()
    return distances


def test_a_piece_of_a_reduce_scatter_is_whole_rows_of_the_mean() -> None:
    for distances in run_ranks(scattered, 3):
        assert max(distances) < 1e-5


def mixing_refused() -> str:
    bound, wire = bind(Quantized("nvfp4", geometry=GIFT()), SLOTS)
    bound.begin()
    try:
        bound.reduce_scatter({"bias": torch.zeros(41)}, {"bias": torch.zeros(41)})
    except ValueError as error:
        return str(error)
    finally:
        wire.close()
    return ""


def test_a_geometry_that_mixes_rows_cannot_shard_them() -> None:
    assert "use sides='right'" in run_ranks(mixing_refused, 2)[0]


def ledger(statistics_of: Literal["owner", "ranks"]) -> tuple[int, int, int]:
    """Refresh bytes that were sent in 5 reductions, their payload, and those that are announced per reduction."""
    gift = GIFT(rank=8, refresh_every=5, statistics_of=statistics_of)
    reducer = Quantized("nvfp4", geometry=gift)
    bound, wire = bind(reducer, SLOTS)
    for step in range(5):
        reduce(bound, gradients(step, dist.get_rank()))
    bound.state_dict()
    rows = [row for row in wire.ledger.rows() if row.phase == "refresh"]
    announced = reducer.sent_bytes(SLOTS, 3) - Quantized("nvfp4", geometry=Hadamard()).sent_bytes(SLOTS, 3)
    wire.close()
    gathered = sum(row.payload_bytes for row in rows if row.op == "all_gather")
    scattered = sum(row.payload_bytes for row in rows if row.op == "all_to_all")  # to the two others together
    assert (scattered > 0) == (statistics_of == "ranks")
    return sum(row.sent_bytes for row in rows), 2 * gathered + scattered, announced


@pytest.mark.parametrize("statistics_of", ["owner", "ranks"])
def test_refreshes_are_counted_as_such(statistics_of: str) -> None:
    """Refreshes at reductions 1, 2, 3 and 5."""
    for sent, payload, announced in run_ranks(ledger, 3, statistics_of):
        assert sent == payload
        assert announced == sent // 4 // 5


def test_on_a_single_rank_a_geometry_changes_nothing() -> None:
    bound, _ = bind(Quantized("nvfp4", feedback="error", geometry=GIFT()), SLOTS)
    for step in range(3):
        assert equal(plain(reduce(bound, gradients(step, 0))), plain(gradients(step, 0)))


def from_two_ranks() -> tuple[dict[str, Any], dict[str, Any]]:
    """The state after some reductions, and what all ranks owe together, in the coordinates of the gradients."""
    bound, wire = bind(Quantized("nvfp4", feedback="error", geometry=GIFT(rank=8)), SLOTS)
    for step in range(3):
        reduce(bound, gradients(step, dist.get_rank()))
    state = bound.state_dict()
    together = {name: sum_over_ranks(residual).float() for name, residual in owed(bound).items()}
    for key, value in state.items():
        if key.startswith("residual."):
            state[key] = sum_over_ranks(value).float()
    wire.close()
    return {k: v.numpy() if isinstance(v, Tensor) else v for k, v in state.items()}, plain(together)


def test_one_rank_pays_what_two_ranks_owed() -> None:
    """The residuals of the former ranks, summed, are in wire coordinates: what is paid is the gradient of it."""
    saved, together = run_ranks(from_two_ranks, 2)[0]
    bound, _ = bind(Quantized("nvfp4", feedback="error", geometry=GIFT(rank=8)), SLOTS)
    bound.load_state_dict({k: torch.from_numpy(v) if hasattr(v, "shape") else v for k, v in saved.items()})
    paid = reduce(bound, {slot.name: torch.zeros(slot.shape) for slot in SLOTS})
    for slot in SLOTS:
        expected = (
            torch.from_numpy(together[slot.name]) if slot.shape else torch.tensor(float(together[slot.name]))
        )
        assert torch.allclose(paid[slot.name], expected, rtol=1e-4, atol=1e-6), slot.name


def test_a_geometry_measures_with_memory_of_its_own() -> None:
    """While the worker encodes with the compiled kernels, whose scratch memory serves one thread at a time."""
    chunk = 4096
    compiled = get("nvfp4").compiled(chunk)
    own = for_another_thread(compiled)
    like = torch.empty(chunk)
    first, second = (format.run.scratch(chunk, like, torch.int8) for format in (compiled, own))  # type: ignore[attr-defined]
    assert first.data_ptr() != second.data_ptr()
    assert first.data_ptr() == compiled.run.scratch(chunk, like, torch.int8).data_ptr()  # type: ignore[attr-defined]
    assert for_another_thread(get("nvfp4")) is get("nvfp4")
