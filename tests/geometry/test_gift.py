"""GIFT alone: who owns what, when it refreshes, what it chooses, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.geometry.matrices import distance, dominated, generator, place
from thinwire.geometry import GIFT, Shapes
from thinwire.geometry.gift import BoundGIFT

SHAPES: Shapes = {"a": (64, 96), "b": (7, 33), "tall": (300, 20)}


def world(config: GIFT, shapes: Shapes = SHAPES, ranks: int = 2, format: str = "nvfp4") -> list[BoundGIFT]:
    bound = [config.bind(shapes, place(format, rank, ranks)) for rank in range(ranks)]
    assert all(isinstance(each, BoundGIFT) for each in bound)
    return bound  # type: ignore[return-value]


def gradients(shapes: Shapes = SHAPES, draw: int = 0) -> dict[str, Tensor]:
    """Of one batch."""
    named = enumerate(shapes.items())
    return {name: dominated(*shape, tokens=500, seed=7 * n, draw=draw)[1] for n, (name, shape) in named}


def unchanged(name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Nothing is kept in old coordinates."""


def refresh(ranks: list[BoundGIFT], reduction: int, named: dict[str, Tensor]) -> Tensor | None:
    """One reduction in which all ranks see the same gradients; returns the payloads."""
    for bound in ranks:
        bound.open(reduction)
        for name, gradient in named.items():
            bound.see(name, gradient)
    carry_statistics(ranks)
    payloads = [bound.payload() for bound in ranks]
    if payloads[0] is None:
        assert payloads == [None] * len(ranks)
        return None
    stacked = torch.stack([p for p in payloads if p is not None])
    for bound in ranks:
        bound.install(stacked, unchanged)
    return stacked


def carry_statistics(ranks: list[BoundGIFT]) -> None:
    """To the owners, where there are any."""
    sent = [bound.statistics() for bound in ranks]
    for bound in ranks:
        own = bound._place.rank
        rows = [statistics[own] for rank, statistics in enumerate(sent) if statistics is not None and rank != own]
        if rows:
            bound.combine(torch.stack(rows))


def test_all_ranks_hold_the_same_coordinates_bit_for_bit() -> None:
    ranks = world(GIFT(rank=8), ranks=3)
    refresh(ranks, 1, gradients())
    for name, gradient in gradients(draw=1).items():
        us = [bound.forward(name, gradient) for bound in ranks]
        assert torch.equal(us[0], us[1])
        assert torch.equal(us[0], us[2])


def test_nothing_changes_before_the_first_refresh() -> None:
    ranks = world(GIFT())
    assert ranks[0].names == frozenset()
    refresh(ranks, 1, gradients())
    assert ranks[0].names == frozenset(SHAPES)


@pytest.mark.parametrize("sides", ["right", "both"])
@pytest.mark.parametrize("rank", [1, 8, 200])
def test_inverse_undoes_forward(sides: str, rank: int) -> None:
    ranks = world(GIFT(rank=rank, sides=sides))  # type: ignore[arg-type]
    refresh(ranks, 1, gradients())
    for name, gradient in gradients(draw=1).items():
        assert distance(ranks[0].inverse(name, ranks[1].forward(name, gradient)), gradient) < 1e-5


def test_rows_can_be_changed_apart_unless_both_sides_are() -> None:
    ranks = world(GIFT(rank=8, sides="right"))
    refresh(ranks, 1, gradients())
    gradient = gradients(draw=1)["a"]
    parts = [ranks[0].forward("a", part) for part in gradient.split(13)]
    assert distance(torch.cat(parts), ranks[0].forward("a", gradient)) < 1e-6
    assert not ranks[0].mixes_rows
    assert world(GIFT(sides="both"))[0].mixes_rows


def test_refreshes_come_at_doubling_distances_first() -> None:
    due = [r for r in range(1, 202) if GIFT(refresh_every=50).due(r)]
    assert due == [1, 2, 3, 5, 9, 17, 33, 51, 101, 151, 201]
    assert [r for r in range(1, 202) if GIFT(refresh_every=50, freeze_after=60).due(r)] == due[:8]
    assert [r for r in range(1, 6) if GIFT(refresh_every=1).due(r)] == [1, 2, 3, 4, 5]


def test_between_refreshes_nothing_is_gathered_or_sent() -> None:
    ranks = world(GIFT())
    assert refresh(ranks, 4, gradients()) is None


def test_a_payload_is_what_the_docstring_says() -> None:
    """(rank + 1) n + rank + 1 numbers per side and 4 more, on the rank that owns most."""
    shapes = {"a": (64, 96), "b": (40, 96)}
    ranks = world(GIFT(rank=8, sides="both"), shapes)
    payloads = refresh(ranks, 1, gradients(shapes))
    assert payloads is not None
    assert payloads.shape == (2, 4 + (9 * 96 + 9) + (9 * 64 + 9))


def test_bytes_in_the_long_run_are_one_gather_per_refresh() -> None:
    shapes = {"a": (64, 96)}
    assert GIFT(rank=8, sides="right", refresh_every=10).refresh_bytes(shapes, 4) == 3 * 4 * (4 + 9 * 96 + 9) // 10
    assert GIFT(freeze_after=3).refresh_bytes(shapes, 4) == 0


@pytest.mark.parametrize("format", ["fp8_e5m2_span", "nvfp4", "int4_span"])
@pytest.mark.parametrize("power", [0.5, 1.0])
def test_the_error_on_a_fresh_gradient_is_much_smaller(format: str, power: float) -> None:
    shapes = {"w": (256, 512)}
    ranks = world(GIFT(power=power), shapes, format=format)
    for reduction in (1, 2):
        refresh(ranks, reduction, {"w": dominated(draw=reduction)[1]})
    measured = ranks[0].coordinates["w"]
    assert measured.active
    assert measured.fidelity.error < 0.45 * measured.fidelity.plain_error
    assert measured.fidelity.cosine > 0.99
    assert ranks[1].fidelity == ranks[0].fidelity == {"w": measured.fidelity}


def test_damping_is_chosen_by_measurement_unless_set() -> None:
    ranks, fixed = world(GIFT(sides="right")), world(GIFT(sides="right", damping=0.3))
    for reduction in (1, 2, 3):
        refresh(ranks, reduction, gradients(draw=reduction))
        refresh(fixed, reduction, gradients(draw=reduction))
    side = ranks[0].coordinates["a"].sides[0]
    assert side.damping == pytest.approx(1e-3)  # one direction rules: damping only hurts
    assert fixed[0].coordinates["a"].sides[0].damping == pytest.approx(0.3)


@pytest.mark.parametrize("side", [0, 1])
def test_a_damping_that_loses_less_is_chosen_for_its_side_alone(side: int) -> None:
    """The side along which gradients fall off gains by a small damping, the flat one is best left as it is."""
    (bound,) = world(GIFT(rank=4, select="all"), {"a": (48, 64)}, ranks=1)
    fall = 10.0 ** -torch.linspace(0, 4, (64, 48)[side])
    for seed in (11, 12):
        gradient = torch.randn(48, 64, generator=generator(seed))
        refresh([bound], 1, {"a": gradient * fall if side == 0 else gradient * fall[:, None]})
    dampings = [each.damping for each in bound.coordinates["a"].sides]
    assert dampings[1 - side] == 1.0
    assert dampings[side] < 0.2


def test_the_fidelity_is_that_of_what_travels() -> None:
    """Measured here once more: of the owner's gradient, in the coordinates in use, with the damping chosen;
    and of the plain gradient where coordinates are no gain."""
    (bound,) = world(GIFT(rank=8), {"a": (64, 96), "noise": (64, 96)}, ranks=1)
    round_trip = place().round_trip
    for reduction in (1, 2, 3):
        named = {
            "a": dominated(64, 96, tokens=500, draw=reduction)[1],
            "noise": torch.randn(64, 96, generator=generator(reduction)),
        }
        before = dict(bound.coordinates)
        refresh([bound], reduction, named)
    assert bound.names == {"a"}
    for name, gradient in named.items():
        in_use = before[name]
        for side, after in enumerate(bound.coordinates[name].sides):
            in_use = in_use.damped(side, after.damping)
        plain = distance(round_trip(gradient), gradient)
        there = distance(in_use.inverse(round_trip(in_use.forward(gradient))), gradient)
        assert bound.fidelity[name].plain_error == pytest.approx(plain, rel=1e-5)
        assert bound.fidelity[name].error == pytest.approx(there if name == "a" else plain, rel=1e-3)


def test_memory_counts_moments_once() -> None:
    (bound,) = world(GIFT(rank=8, sides="right"), {"q": (64, 96), "k": (64, 96)}, ranks=1)
    x, gradient = dominated(64, 96, tokens=500)
    for name, observe in bound.observers(1).items():
        assert name in ("q", "k")
        observe(x)
    assert bound.memory_bytes() == 4 * 96 * 96  # shared
    refresh([bound], 1, {"q": gradient, "k": gradient})
    assert bound.memory_bytes() == 2 * 4 * (4 + 9 * 96 + 9)


def test_a_matrix_that_gains_nothing_keeps_its_own_coordinates() -> None:
    noise = {"noise": (200, 64), "a": (64, 96)}
    ranks = world(GIFT(rank=4), noise, format="fp8_e5m2_span")
    for reduction in (1, 2, 3):
        named = {**gradients(noise), "noise": torch.randn(200, 64, generator=generator(reduction))}
        refresh(ranks, reduction, named)
    assert ranks[0].names == {"a"}
    assert world(GIFT(select="all"), noise)[0].names == frozenset()


@pytest.mark.parametrize(
    ("select", "chosen"),
    [(("a", "t*"), {"a", "tall"}), (lambda name: name != "b", {"a", "tall"}), ("all", set(SHAPES))],
)
def test_matrices_are_selected_by_name_glob_or_predicate(select: object, chosen: set[str]) -> None:
    ranks = world(GIFT(select=select))  # type: ignore[arg-type]
    refresh(ranks, 1, gradients())
    assert ranks[0].names == chosen


def test_a_name_that_is_no_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="no matrix is called 'c'; there are a, b, tall"):
        GIFT(select=("a", "c")).bind(SHAPES, place())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("sides", ["right", "both"])
def test_a_gradient_without_information_does_not_end_the_use_of_coordinates(sides: str, bad: float) -> None:
    ranks = world(GIFT(sides=sides))  # type: ignore[arg-type]
    for reduction in (1, 2):
        refresh(ranks, reduction, gradients(draw=reduction))
    before = ranks[0].coordinates["a"]
    refresh(ranks, 3, {name: torch.full(shape, bad) for name, shape in SHAPES.items()})
    after = ranks[0].coordinates["a"]
    assert ranks[0].names == frozenset(SHAPES)
    assert after.fidelity == before.fidelity
    assert [side.damping for side in after.sides] == [side.damping for side in before.sides]


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
            alone = owner._new(rows.shape[1])
            alone.add(rows)
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
            alone.add(rows)
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
        assert distance(ranks[1].inverse(name, ranks[0].forward(name, gradient)), gradient) < 1e-5


def test_a_matrix_that_its_owner_does_not_see_keeps_its_coordinates() -> None:
    ranks = world(GIFT())
    refresh(ranks, 1, gradients())
    before = ranks[0].coordinates["a"].sides[0].vectors
    refresh(ranks, 2, {"b": gradients(draw=2)["b"]})
    assert torch.equal(ranks[0].coordinates["a"].sides[0].vectors, before)


def test_what_is_kept_is_rebased_exactly() -> None:
    ranks = world(GIFT(rank=8))
    refresh(ranks, 1, gradients())
    residual = torch.randn(64, 96, generator=generator())
    kept = {"a": ranks[0].forward("a", residual)}
    for bound in ranks:
        bound.open(2)
        for name, gradient in gradients(draw=3).items():
            bound.see(name, gradient)
    payloads = torch.stack([p for bound in ranks if (p := bound.payload()) is not None])

    def rebase(name: str, change: Callable[[Tensor], Tensor]) -> None:
        if name in kept:
            kept[name] = change(kept[name])

    ranks[0].install(payloads, rebase)
    assert distance(ranks[0].inverse("a", kept["a"]), residual) < 1e-5
    assert distance(ranks[0].forward("a", residual), kept["a"]) < 1e-5


def test_coordinates_survive_saving_and_loading_bit_for_bit() -> None:
    config = GIFT(rank=8, sides="both")
    ranks = world(config)
    for reduction in (1, 2):
        refresh(ranks, reduction, gradients(draw=reduction))
    fresh = config.bind(SHAPES, place())
    fresh.load_state_dict(ranks[1].state_dict())
    assert fresh.names == ranks[0].names
    for name, gradient in gradients(draw=5).items():
        assert torch.equal(fresh.forward(name, gradient), ranks[0].forward(name, gradient))
    with pytest.raises(ValueError, match="no coordinates for 'a' that fit this GIFT"):
        GIFT(rank=9).bind(SHAPES, place()).load_state_dict(ranks[1].state_dict())
    with pytest.raises(ValueError, match="no coordinates for 'a' that fit this GIFT"):
        fresh.load_state_dict({**ranks[1].state_dict(), "geometry.a": [0.0]})
    with pytest.raises(ValueError, match="has coordinates for 'b', which this GIFT leaves alone"):
        replace(config, select=("a", "tall")).bind(SHAPES, place()).load_state_dict(ranks[1].state_dict())


@pytest.mark.parametrize(
    "arguments",
    [
        {"rank": 0},
        {"rank": "32"},
        {"rank": 1.5},
        {"rank": True},
        {"statistics_of": "all"},
        {"damping": "auto"},
        {"select": ()},
        {"freeze_after": 1},
        {"power": 0.0},
        {"power": 1.5},
        {"sides": "left"},
        {"statistic": "output"},
        {"refresh_every": 0},
        {"decay": 1.0},
        {"damping": 0.0},
        {"damping": 1e-5},
        {"damping": 1e5},
        {"select": "a*"},
        {"select": ["a"]},
        {"freeze_after": 0},
    ],
)
def test_a_bad_setting_is_refused_with_its_name(arguments: dict[str, object]) -> None:
    (key,) = arguments
    with pytest.raises(ValueError, match=f"GIFT {key} must be .*, got"):
        GIFT(**arguments)  # type: ignore[arg-type]
