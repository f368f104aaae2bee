"""The means themselves: equal to a written-out version, on every rank, for any shape, dtype and weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.collectives import oracle
from tests.reducers.gradients import UNEVEN, bind, equal, exact_mean, gradient, gradients, plain, reduce
from tests.support.ranks import run_ranks
from thinwire.collectives import CHUNK, Layout, Slot, Wire
from thinwire.formats import get, names
from thinwire.formats.kernels import can_compile
from thinwire.reducers import Dense, Quantized, Reducer, Routed

HALVES = (Slot("b", (33, 5), torch.bfloat16), Slot("h", (130,), torch.float16), Slot("f", (9, 20)))
LOSSY: tuple[Reducer, ...] = (Dense(), *(Quantized(name) for name in names()))


def all_formats(slots: Sequence[Slot]) -> dict[str, dict[str, Any]]:
    """Means by format, checked against the oracle on each rank."""
    found = {}
    for name in names():
        bound, wire = bind(Quantized(name), slots)
        means = reduce(bound, gradients(slots, 0, wire.rank))
        for slot in slots:
            inputs = [gradient(slot, 0, rank) for rank in range(wire.world_size)]
            expected = oracle.mean(inputs, get(name)).to(slot.dtype)
            assert torch.equal(means[slot.name], expected), f"{name} {slot.name}"
            assert means[slot.name].dtype == slot.dtype
        found[name] = plain(means)
        wire.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("slots", [UNEVEN, HALVES], ids=["uneven", "mixed dtypes"])
def test_means_are_those_of_the_written_out_version_and_alike_on_all_ranks(
    world_size: int, slots: tuple[Slot, ...]
) -> None:
    first, *others = run_ranks(all_formats, world_size, slots)
    for other in others:
        assert all(equal(first[name], other[name]) for name in first)


def weighted() -> None:
    """Ranks of weights 0, 1/2 and 5/2."""
    wire = Wire()
    weights = [0.0, 0.5, 2.5]
    for name in ("fp32", "fp8_e4m3"):
        bound = Quantized(name).bind(UNEVEN, wire)
        means = reduce(bound, gradients(UNEVEN, 0, wire.rank), weight=weights[wire.rank])
        for slot in UNEVEN:
            inputs = [gradient(slot, 0, rank) for rank in range(3)]
            assert torch.equal(means[slot.name], oracle.mean(inputs, get(name), weights))
    means = reduce(Dense().bind(UNEVEN, wire), gradients(UNEVEN, 0, wire.rank), weight=weights[wire.rank])
    for slot in UNEVEN:
        assert torch.allclose(means[slot.name], exact_mean(slot, 0, 3, weights).float(), rtol=1e-5, atol=1e-5)
    wire.close()


def test_weights_make_a_weighted_mean() -> None:
    run_ranks(weighted, 3)


MIXED = (
    Slot("f32", (33, 47)),
    Slot("f64", (101, 3), torch.float64),
    Slot("bf16", (700,), torch.bfloat16),
    Slot("second f64", (9,), torch.float64),
    Slot("f16", (130,), torch.float16),
)


def mixed() -> None:
    """float64 tensors of a call are added in float64, all others in float32, as one flat buffer each."""
    bound, wire = bind(Dense(), MIXED)
    named = gradients(MIXED, 0, wire.rank)
    expected = {}
    for wide, group in ((torch.float32, ("f32", "bf16", "f16")), (torch.float64, ("f64", "second f64"))):
        flat = torch.cat([named[name].to(wide).view(-1) for name in group]).mul_(1 / 3)
        dist.all_reduce(flat)
        for name, mean in zip(group, flat.split([named[name].numel() for name in group])):
            expected[name] = mean.view_as(named[name]).to(named[name].dtype)
    means = reduce(bound, named)
    assert all(torch.equal(means[name], expected[name]) for name in expected)
    assert wire.ledger.sent_bytes() == Dense().sent_bytes(MIXED, 3)
    own = {name: mean.view(-1).chunk(3)[wire.rank] for name, mean in expected.items()}
    pieces = {name: torch.zeros_like(piece) for name, piece in own.items()}
    bound.begin()
    bound.reduce_scatter(gradients(MIXED, 0, wire.rank), pieces).wait()
    assert all(torch.equal(pieces[name], own[name]) for name in own)
    wire.close()


def test_dense_adds_every_dtype_of_a_call_as_wide_as_it_needs() -> None:
    run_ranks(mixed, 3)


def strided() -> None:
    """Transposed, channels-last and sliced tensors get the mean of contiguous ones, and keep their strides."""
    wire = Wire()
    slots = [Slot("t", (6, 10)), Slot("c", (2, 3, 4, 5)), Slot("s", (7, 4)), Slot("p", (3, 8))]
    for reducer in LOSSY:
        dense = {slot.name: gradient(slot, 0, wire.rank) for slot in slots}
        odd = {
            "t": dense["t"].t().contiguous().t(),
            "c": dense["c"].contiguous(memory_format=torch.channels_last),
            "s": torch.zeros(7, 9)[:, 1::2].copy_(dense["s"]),
            "p": torch.nn.Parameter(dense["p"].clone()),
        }
        strides = {name: tensor.stride() for name, tensor in odd.items()}
        pointers = {name: tensor.data_ptr() for name, tensor in odd.items()}
        expected = reduce(reducer.bind(slots, wire), dense)
        reduce(reducer.bind(slots, wire), odd)
        for name, tensor in odd.items():
            assert not tensor.is_contiguous() or name == "p"
            assert tensor.stride() == strides[name]
            assert tensor.data_ptr() == pointers[name]
            assert torch.allclose(tensor, expected[name], rtol=1e-6), f"{reducer} {name}"
            assert isinstance(reducer, Dense) or torch.equal(tensor, expected[name])
        assert odd["p"].requires_grad
        assert odd["p"].grad_fn is None
    wire.close()


def test_strides_and_storage_of_tensors_are_kept_and_parameters_may_be_averaged_directly() -> None:
    run_ranks(strided, 2)


def inputs_read_at_call_time() -> None:
    wire = Wire()
    for reducer in (Dense(), Quantized("fp32"), Quantized("fp8_e4m3")):
        outstanding = []
        bound = reducer.bind([Slot(f"x{i}", (5000,)) for i in range(6)], wire)
        bound.begin()
        scratch = torch.empty(5000)
        outputs = {}
        for i in range(6):
            scratch.fill_(float(i + wire.rank))
            outputs[i] = scratch.clone()
            outstanding.append(bound.all_reduce({f"x{i}": outputs[i]}))
            scratch.fill_(-1.0)
        for i, future in enumerate(outstanding):
            future.wait()
            assert torch.allclose(outputs[i], torch.full((5000,), i + 0.5), rtol=0.04)
    wire.close()


def test_calls_on_disjoint_slots_may_be_outstanding_together() -> None:
    run_ranks(inputs_read_at_call_time, 2)


def huge_gradients() -> None:
    """4e4 in fp16 on 4 ranks: their sum would overflow, their mean does not."""
    wire = Wire()
    slots = [Slot("w", (64, 70), torch.float16)]
    for reducer in (*LOSSY, Routed(Quantized("fp8_e5m2", feedback="error"))):
        named = {"w": torch.full((64, 70), 4e4, dtype=torch.float16)}
        mean = reduce(reducer.bind(slots, wire), named)["w"]
        assert mean.isfinite().all(), reducer
        assert torch.allclose(mean.float(), torch.tensor(4e4), rtol=0.25), reducer
    wire.close()


def test_fp16_gradients_of_40000_stay_finite_on_4_ranks() -> None:
    run_ranks(huge_gradients, 4)


def non_finite() -> None:
    wire = Wire()
    slots = (Slot("w", (50, 100)), Slot("b", (3,)))
    for reducer in (*LOSSY, Quantized("fp8_e5m2", feedback="error"), Routed(Quantized("bf16"))):
        for bad in (float("nan"), float("inf"), float("-inf")):
            for name in ("w", "b"):
                named = gradients(slots, 0, wire.rank)
                if wire.rank == 1:
                    named[name].view(-1)[-1] = bad
                mean = reduce(reducer.bind(slots, wire), named)
                assert not mean[name].view(-1)[-1].isfinite(), f"{reducer} {bad}"
    wire.close()


def test_a_non_finite_value_on_one_rank_reaches_all() -> None:
    run_ranks(non_finite, 3)


def relative_error(name: str) -> float:
    slot = Slot("w", (64, 256))
    bound, wire = bind(Quantized(name), [slot])
    exact = exact_mean(slot, 0, wire.world_size)
    mean = reduce(bound, gradients([slot], 0, wire.rank))["w"].double()
    wire.close()
    return float((mean - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_the_error_on_8_ranks_is_at_most_one_and_a_half_times_that_on_2(name: str) -> None:
    few, many = run_ranks(relative_error, 2, name), run_ranks(relative_error, 8, name)
    assert len(set(few)) == len(set(many)) == 1
    assert 0 < many[0] <= 1.5 * few[0]


def halves() -> None:
    """Each rank's piece is that of the first phase alone; with fp32, of the exact ordered sum."""
    wire = Wire()
    for name in names():
        bound = Quantized(name).bind(UNEVEN, wire)
        places = Layout(UNEVEN, wire.world_size, get(name).block).places
        out = {place.slot.name: torch.full((place.length(wire.rank),), 9.0) for place in places}
        named = gradients(UNEVEN, 0, wire.rank)
        bound.begin()
        bound.reduce_scatter(named, out).wait()
        for slot in UNEVEN:
            inputs = [gradient(slot, 0, rank) for rank in range(wire.world_size)]
            expected = oracle.sums(inputs, get(name))[wire.rank][: out[slot.name].numel()]
            assert torch.equal(out[slot.name], expected), f"{name} {slot.name}"
            assert torch.equal(named[slot.name], inputs[wire.rank])  # only read
    wire.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_reduce_scatter_gives_each_rank_its_piece_after_the_first_phase(world_size: int) -> None:
    run_ranks(halves, world_size)


def shard(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The rows of x that FSDP2 would give this rank."""
    return [*x.chunk(wire.world_size), *[x[:0]] * wire.world_size][wire.rank]


def every_scatter() -> None:
    """Rows as units: all reducers agree on the pieces, and on a world of one the piece is everything."""
    wire = Wire()
    slots = [
        Slot("w", (10, 6), unit=6),
        Slot("v", (2, 4, 3), unit=12),
        Slot("half", (5, 7), torch.bfloat16, unit=7),
    ]
    for reducer in (
        Dense(),
        Quantized("fp32"),
        Quantized("fp8_e4m3", feedback="error"),
        Routed(Quantized("fp32")),
    ):
        bound = reducer.bind(slots, wire)
        named = {slot.name: gradient(slot, 0, wire.rank) for slot in slots}
        named["w"] = named["w"].t().contiguous().t()
        out = {slot.name: torch.zeros_like(shard(named[slot.name], wire)) for slot in slots}
        bound.begin()
        bound.reduce_scatter(named, out).wait()
        for slot in slots:
            exact = exact_mean(slot, 0, wire.world_size)
            tolerance = 0.1 * float(exact.abs().max())
            assert torch.allclose(out[slot.name].double(), shard(exact, wire), rtol=0.1, atol=tolerance)
    wire.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reducers_scatter_rows_alike(world_size: int) -> None:
    run_ranks(every_scatter, world_size)


def refusals() -> None:
    wire = Wire()
    slots = [Slot("w", (4, 4)), Slot("b", (4,))]
    for reducer in (Dense(), Quantized("fp8_e4m3"), Routed(Quantized("fp8_e4m3"), "w")):
        bound = reducer.bind(slots, wire)
        bound.begin()
        with pytest.raises(ValueError, match="'stranger' was not among the slots"):
            bound.all_reduce({"stranger": torch.zeros(4)})
        with pytest.raises(ValueError, match=r"'w' has shape \(2, 8\), was bound as \(4, 4\)"):
            bound.all_reduce({"w": torch.zeros(2, 8)})
        with pytest.raises(ValueError, match=r"the piece of 'w' on rank . has .* elements, got 3"):
            bound.reduce_scatter({"w": torch.zeros(4, 4)}, {"w": torch.zeros(3)})
        bound.all_reduce({"w": torch.ones(4, 4)}).wait()  # nothing has changed
    bound = Quantized("fp8_e4m3").bind(slots, wire)
    with pytest.raises(ValueError, match="the loss scale must be positive, got nan"):
        bound.set_loss_scale(float("nan"))
    bound.begin()
    bound.all_reduce({"b": torch.ones(4), "w": torch.ones(4, 4)}).wait()
    with pytest.raises(ValueError, match=r"'w' is already in the open reduction; call begin\(\)"):
        bound.all_reduce({"w": torch.ones(4, 4)})
    wire.close()


def test_unknown_slots_wrong_shapes_and_double_reductions_are_refused_by_name() -> None:
    run_ranks(refusals, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float64, torch.bool])
def test_quantized_refuses_other_dtypes_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(
        ValueError, match=rf"got {dtype} for 'layers.0.weight'; send it through Dense\(\) with Routed"
    ):
        Quantized("fp8_e4m3").bind([Slot("layers.0.weight", (3,), dtype)], Wire())


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_dense_refuses_what_has_no_mean_in_its_dtype(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"Dense averages floating point tensors, got {dtype} for 'x'"):
        Dense().bind([Slot("x", (3,), dtype)], Wire())


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown format 'fp9'"):
        Quantized("fp9")
    with pytest.raises(ValueError, match="feedback must be 'none', 'error' or a LoCo, got 'momentum'"):
        Quantized("bf16", feedback="momentum")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the loss scale must be positive, got 0"):
        Quantized("bf16").bind([], Wire()).set_loss_scale(0.0)


def compiled() -> None:
    """Full chunks, dynamic tails and short ones, with feedback, so that all kernels take part."""
    wire = Wire()
    slots = [Slot("w", (wire.world_size * (CHUNK + 70_000),)), Slot("b", (300,))]
    eager = Quantized("fp8_e4m3", feedback="error", compile=False).bind(slots, wire)
    fused = Quantized("fp8_e4m3", feedback="error", compile=True).bind(slots, wire)
    for step in range(2):
        one, other = (reduce(bound, gradients(slots, step, wire.rank)) for bound in (eager, fused))
        assert equal(plain(one), plain(other))
    wire.close()


@pytest.mark.full
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="torch.compile needs a C++ compiler")
def test_compiled_kernels_give_the_means_of_eager_ones() -> None:
    run_ranks(compiled, 2, timeout=300)
