"""What GIFT fits its coordinates to: inputs or gradients, of the owner or of all ranks, usable or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.geometry.gifts import SHAPES, carry_statistics, gradients, refresh, unchanged, world
from tests.geometry.matrices import distance, dominated, generator, place
from thinwire.geometry import GIFT
from thinwire.geometry.gift import BoundGIFT


def test_memory_counts_moments_once() -> None:
    (bound,) = world(GIFT(rank=8, sides="right"), {"q": (64, 96), "k": (64, 96)}, ranks=1)
    x, gradient = dominated(64, 96, tokens=500)
    for name, observe in bound.observers(1).items():
        assert name in ("q", "k")
        observe(x)
    assert bound.memory_bytes() == 4 * 96 * 96  # shared
    refresh([bound], 1, {"q": gradient, "k": gradient})
    assert bound.memory_bytes() == 2 * 4 * (4 + 9 * 96 + 9)


@pytest.mark.parametrize("settled", ["before the next forward pass", "after it"])
def test_inputs_count_for_the_reduction_that_follows_them(settled: str) -> None:
    """A reduction is settled when the next one begins, or earlier where something is saved in between."""
    layers = {draw: dominated(64, 96, tokens=500, draw=draw) for draw in (1, 2)}
    (bound,) = world(GIFT(rank=96, sides="right", decay=0.0, damping=0.1), {"a": (64, 96)}, ranks=1)

    def settle() -> None:
        payload = bound.payload()
        assert payload is not None
        bound.install(payload[None], unchanged)

    bound.observers(1)["a"](layers[1][0])
    bound.open(1)
    bound.see("a", layers[1][1])
    if settled.startswith("before"):
        settle()
    bound.observers(2)["a"](layers[2][0])
    if settled.startswith("after"):
        settle()
    moments = [layers[1][0].T @ layers[1][0], layers[2][0].T @ layers[2][0]]
    assert _moment_distance(bound, moments[0]) < 1e-4
    bound.open(2)
    bound.see("a", layers[2][1])
    settle()
    assert _moment_distance(bound, moments[1]) < 1e-4


@pytest.mark.parametrize("columns", [40, 300])
def test_statistics_of_all_ranks_are_those_of_their_data_together(columns: int) -> None:
    """Of inputs on the right side, of gradients on the left, dense (40) or sketched (300): as if one rank had seen
    all inputs, and the other's gradient below its own."""
    shapes = {"a": (24, columns), "b": (columns, 24)}
    config = GIFT(rank=8, damping=0.1, statistics_of="ranks")
    ranks = world(config, shapes, ranks=3)
    layers = {
        name: [dominated(*shape, tokens=200, seed=n, draw=rank) for rank in range(3)]
        for n, (name, shape) in enumerate(shapes.items())
    }
    for rank, bound in enumerate(ranks):
        for name, observe in bound.observers(1).items():
            observe(layers[name][rank][0] * (1 + rank))
        bound.open(1)
        for name, layer in layers.items():
            bound.see(name, layer[rank][1])
    carry_statistics(ranks)
    payloads = torch.stack([p for bound in ranks if (p := bound.payload()) is not None])
    for bound in ranks:
        bound.install(payloads, unchanged)
    for name, layer in layers.items():
        owner = next(bound for bound in ranks if bound._owns(name))
        for index, rows in enumerate(
            [
                torch.cat([layer[rank][0] * (1 + rank) for rank in range(3)]),
                torch.cat([layer[rank][1].T for rank in range(3)]),
            ]
        ):
            alone = owner._new(rows.shape[1]).with_rows(rows)
            split = alone.split(8)
            assert split is not None
            side = owner.coordinates[name].sides[index]
            expected = split[0] @ split[0].T + split[1].diag()
            assert distance(side.factor @ side.factor.T + side.rest.diag(), expected) < 1e-4
            for bound in ranks:
                assert torch.equal(bound.coordinates[name].sides[index].vectors, side.vectors)


def test_a_rank_that_saw_no_inputs_does_not_mix_its_gradients_in() -> None:
    config, shapes = GIFT(rank=8, sides="right", damping=0.1, statistics_of="ranks"), {"a": (24, 40)}
    ranks, alone = world(config, shapes), world(replace(config, statistics_of="owner"), shapes)
    (x, gradient), (_, other) = (dominated(24, 40, tokens=200, draw=draw) for draw in (0, 1))
    for both in (ranks, alone):
        both[0].observers(1)["a"](x)
        for bound, seen in zip(both, (gradient, other)):
            bound.open(1)
            bound.see("a", seen)
        carry_statistics(both)
        payloads = torch.stack([p for bound in both if (p := bound.payload()) is not None])
        both[0].install(payloads, unchanged)
    assert torch.equal(ranks[0].coordinates["a"].sides[0].vectors, alone[0].coordinates["a"].sides[0].vectors)


def test_a_rank_that_saw_no_inputs_takes_those_of_the_others() -> None:
    """Of a layer that only one rank uses: the owner's gradient is zero."""
    shapes = {"a": (24, 40)}
    config = GIFT(rank=8, damping=0.1, statistics_of="ranks")
    ranks, alone = world(config, shapes), world(replace(config, statistics_of="owner"), shapes, ranks=1)
    x, gradient = dominated(24, 40, tokens=200)
    ranks[1].observers(1)["a"](x)
    alone[0].observers(1)["a"](x)
    for bound, seen in [(ranks[0], torch.zeros(24, 40)), (ranks[1], gradient), (alone[0], gradient)]:
        bound.open(1)
        bound.see("a", seen)
    assert ranks[0]._owns("a")
    carry_statistics(ranks)
    for bounds in (ranks, alone):
        bounds[0].install(torch.stack([p for b in bounds if (p := b.payload()) is not None]), unchanged)
    for side, expected in zip(ranks[0].coordinates["a"].sides, alone[0].coordinates["a"].sides):
        assert torch.equal(side.vectors, expected.vectors)


def test_layers_share_a_moment_only_as_long_as_they_see_the_same() -> None:
    (bound,) = world(GIFT(), {"a": (24, 40), "b": (16, 40), "c": (8, 40)}, ranks=1)
    first, second, third = (torch.randn(9, 40, generator=generator(n)) for n in range(3))
    show = bound.observers(1)
    for name, rows in [("a", first), ("b", first), ("c", first), ("a", second), ("b", third), ("c", third)]:
        show[name](rows)
    show["c"](third)
    assert bound._arriving["a"] is not bound._arriving["b"]
    expected = {"a": [first, second], "b": [first, third], "c": [first, third, third]}
    bound.open(1)
    for name, parts in expected.items():
        alone = bound._new(40)
        for rows in parts:
            alone = alone.with_rows(rows)
        assert torch.allclose(bound._inputs[name].packed(), alone.packed(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("statistics_of", ["owner", "ranks"])
def test_the_default_dtype_of_the_process_does_not_matter(dtype: torch.dtype, statistics_of: str) -> None:
    shapes = {"a": (64, 96), "wide": (20, 1100)}
    found = []
    for default in (torch.float32, dtype):
        named = gradients(shapes)
        torch.set_default_dtype(default)
        try:
            ranks = world(GIFT(statistics_of=statistics_of), shapes)  # type: ignore[arg-type]
            refresh(ranks, 1, named)
            found.append({name: ranks[0].forward(name, gradient) for name, gradient in named.items()})
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found[0][name], found[1][name]) for name in shapes)


def test_statistics_of_ranks_cost_the_smaller_of_triangle_and_sketch() -> None:
    shapes = {"a": (64, 300)}
    owner, ranks = (GIFT(rank=8, refresh_every=1, statistics_of=whose) for whose in ("owner", "ranks"))
    numbers = 1 + 64 * 33 + 300 * 150.5  # triangles: 64 x 65 / 2 and 300 x 301 / 2
    sketch = 1 + 64 * 32.5 + 300 * 33  # 2 x 8 + 16 columns and the diagonal
    assert ranks.refresh_bytes(shapes, 4) - owner.refresh_bytes(shapes, 4) == 3 * 4 * sketch < 3 * 4 * numbers
    assert owner.bind(shapes, place(world_size=2)).statistics() is None


def _moment_distance(bound: BoundGIFT, moment: Tensor) -> float:
    side = bound.coordinates["a"].sides[0]
    return distance(side.factor @ side.factor.T + side.rest.diag(), moment / moment.diagonal().mean())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_a_gradient_without_information_leaves_the_coordinates_as_they_are(bad: float) -> None:
    ranks = world(GIFT(damping=1e-2))
    refresh(ranks, 1, gradients())
    before = ranks[0].coordinates["a"].sides[0]
    refresh(ranks, 2, {name: torch.full(shape, bad) for name, shape in SHAPES.items()})
    after = ranks[0].coordinates["a"].sides[0]
    assert torch.equal(after.diagonal, before.diagonal)
    assert distance(after.factor @ after.factor.T, before.factor @ before.factor.T) < 1e-5


@pytest.mark.parametrize("scale", [1e-23, 1e-21, 1e-19, 1e18])
def test_gradients_whose_squares_leave_float32_do_no_harm(scale: float) -> None:
    shapes = {"wide": (20, 1100), "a": (64, 96)}
    ranks = world(GIFT(rank=8, select="all"), shapes)
    for reduction in (1, 2):
        refresh(ranks, reduction, {name: scale * g for name, g in gradients(shapes, reduction).items()})
    refresh(ranks, 3, gradients(shapes, 3))
    assert ranks[0].names == set(shapes)
    for name, gradient in gradients(shapes, 4).items():
        # 0.9e-5 to 1.1e-5 of rounding, by the CPU's kernels
        assert distance(ranks[1].inverse(name, ranks[0].forward(name, gradient)), gradient) < 3e-5


def test_a_matrix_that_its_owner_does_not_see_keeps_its_coordinates() -> None:
    ranks = world(GIFT())
    refresh(ranks, 1, gradients())
    before = ranks[0].coordinates["a"].sides[0].vectors
    refresh(ranks, 2, {"b": gradients(draw=2)["b"]})
    assert torch.equal(ranks[0].coordinates["a"].sides[0].vectors, before)
