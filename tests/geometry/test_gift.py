"""GIFT alone: who owns what, when it refreshes, what it chooses, and what travels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.geometry.gifts import SHAPES, gradients, refresh, world
from tests.geometry.matrices import distance, dominated, generator, place
from thinwire.geometry import GIFT


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
