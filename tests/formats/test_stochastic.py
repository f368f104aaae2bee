"""Stochastic rounding: unbiased, between neighbours, and a pure function of key and index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.formats import oracle
from tests.formats.coding import element_of, encoded, normal, numbers, round_trip, same_bits, split
from thinwire.formats import NVFP4, BlockScaled, Format
from thinwire.formats.elements import ELEMENTS
from thinwire.formats.stochastic import round_stochastically, span_key, uniform

FORMATS: dict[str, Format] = {
    **{element: BlockScaled(element, block=16, rounding="stochastic") for element in oracle.ELEMENTS},  # type: ignore[arg-type]
    "mxfp4": BlockScaled("e2m1", block=32, scale="rceil", rounding="stochastic"),
    "mxfp8_floor": BlockScaled("e4m3", block=32, scale="floor", rounding="stochastic"),
    "int4_span": BlockScaled("int4", block=16, per_span=True, rounding="stochastic"),
    "nvfp4": NVFP4(rounding="stochastic"),
}
stochastic = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
by_element = pytest.mark.parametrize("element", oracle.ELEMENTS)


def key(*keys: int) -> Tensor:
    return torch.tensor(keys, dtype=torch.int32)


def grid(element: str) -> np.ndarray:
    """The numbers of an element, sorted."""
    values = np.unique(oracle.values(np.arange(1 << oracle.BITS[element], dtype=np.uint8), element))
    return values[np.isfinite(values) & (np.abs(values) <= oracle.MAX[element])]


def lowbias32(x: int) -> int:
    """Chris Wellons' hash, as published, of 32 unsigned bits."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def counters(n: int) -> Tensor:
    """All over int32, the edges included."""
    edges = [0, 1, 2, -1, -2, 2**31 - 1, -(2**31)]
    steps = torch.arange(n - len(edges)) * 2654435761
    return torch.cat([torch.tensor(edges), steps]).to(torch.int32)


def test_draws_are_those_of_the_published_hash() -> None:
    drawn = uniform(counters(20_000)).tolist()
    hashes = [lowbias32(counter & 0xFFFFFFFF) for counter in counters(20_000).tolist()]
    assert drawn == [((h >> 9) + 0.5) / 2**23 for h in hashes]


def test_draws_stay_as_they_are() -> None:
    """Restarted jobs and other machines depend on them."""
    drawn = uniform(torch.tensor([0, 1, 2, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)) * 2**24
    assert drawn.to(torch.int64).tolist() == [1, 6850961, 13701921, 6776963, 9251327, 13388609]
    assert span_key(0, "layers.0.weight", 17, 3) == 1660696657


def test_draws_are_uniform_and_never_0_or_1() -> None:
    drawn = uniform(torch.arange(1 << 20, dtype=torch.int32))
    assert 0.0 < drawn.min() < 2**-18
    assert 1 - 2**-18 < drawn.max() < 1.0
    counts = torch.histc(drawn, bins=64, min=0.0, max=1.0)
    expected = (1 << 20) / 64
    assert (((counts - expected) ** 2) / expected).sum() < 103.4  # chi-square, 63 degrees of freedom, 0.1 %


def test_the_key_of_a_span_is_an_int32_that_its_names_decide() -> None:
    keys = {
        span_key(0, "w", step, rank, 0, start) for step in range(10) for rank in range(10) for start in (0, 4096)
    }
    assert len(keys) == 200
    assert min(keys) >= -(2**31)
    assert max(keys) < 2**31
    assert min(keys) < 0 < max(keys)


@by_element
def test_the_mean_of_40000_draws_is_the_value_within_4_standard_errors(element: str) -> None:
    """For values all over the grid: of both signs, at the edges of binades, near the largest, near zero."""
    assert_unbiased(FORMATS[element], element, below=torch.tensor([]))


def test_nvfp4_is_unbiased_too() -> None:
    """Under a span scale of 1, and a block scale of 1 as 6 is the largest of every block but the first."""
    first = torch.zeros(16)
    first[0] = 6.0 * 448.0
    assert_unbiased(FORMATS["nvfp4"], "e2m1", below=first)


def assert_unbiased(format: Format, element: str, below: Tensor) -> None:
    draws, largest = 40_000, oracle.MAX[element]
    points = grid(element)
    steps = np.diff(points)
    rng = np.random.default_rng(3)
    at = np.concatenate(
        [[0, len(steps) // 2, len(steps) // 2 - 1, len(steps) - 1], rng.integers(0, len(steps), 11)]
    )
    powers = [2.0**k for k in (-1, 0, 1, 2) if 2.0**k < largest]
    edges = np.searchsorted(points, powers)
    chosen = np.concatenate([at, edges, edges - 1, len(steps) - edges])[:30]
    fractions = rng.uniform(0.02, 0.98, size=len(chosen))
    values = np.resize(points[chosen] + fractions * steps[chosen], 30).astype(np.float32)
    # Two blocks, each led by the largest number, so that the scale is 1.
    blocks = np.insert(values.reshape(2, 15), 0, largest, axis=1).reshape(-1)
    x = torch.cat([below, torch.from_numpy(blocks).repeat(draws)])
    y = round_trip(format, x, key=key(12345))[len(below) :].view(draws, 32).double()

    v = blocks.astype(np.float64)
    upper = np.clip(np.searchsorted(points, v, side="right"), 1, len(points) - 1)
    low, high = points[upper - 1].astype(np.float64), points[upper].astype(np.float64)
    p = (v - low) / (high - low)
    standard_error = (high - low) * np.sqrt(p * (1 - p) / draws)
    assert (np.abs(y.mean(0).numpy() - v) <= 4 * standard_error).all()
    assert ((y.numpy() == low) | (y.numpy() == high)).all()


@by_element
def test_only_the_neighbours_of_a_value_occur_and_numbers_of_the_grid_stay(element: str) -> None:
    """Numbers of the grid for a million draws each: a sum like 127 + u, rounded, would leave it now and then."""
    points = torch.from_numpy(grid(element))
    chosen = points[torch.linspace(0, len(points) - 1, 8).long()]
    x = chosen[:, None].expand(8, 1 << 19).contiguous()
    drawn = round_stochastically(
        x, ELEMENTS[element].spacing(x), torch.arange(x.numel(), dtype=torch.int32).view_as(x)
    )
    assert torch.equal(drawn, x)

    x = torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, 1 << 16).astype(np.float32)) * points[-1]
    drawn = round_stochastically(x, ELEMENTS[element].spacing(x), torch.arange(x.numel(), dtype=torch.int32))
    upper = torch.searchsorted(points, x, right=True)
    assert bool(((drawn == points[upper - 1]) | (drawn == points[upper])).all())
    assert bool((drawn == points[upper]).any() and (drawn == points[upper - 1]).any())


@stochastic
def test_scales_are_those_of_rounding_to_nearest_and_codes_neighbours_of_the_scaled_values(format: Format) -> None:
    x, element = normal(1 << 14, seed=2), element_of(format)
    nearest = replace(format, rounding="nearest")  # type: ignore[type-var]
    scales, codes = split(format, encoded(format, x, key=key(5)), (x.numel(),))
    their_scales, their_codes = split(nearest, encoded(nearest, x), (x.numel(),))
    assert torch.equal(scales, their_scales)
    assert not torch.equal(codes, their_codes)
    scaled = (x.view(len(scales), -1) * (1.0 / scales)[:, None]).flatten()
    scaled = scaled.clamp(-oracle.MAX[element], oracle.MAX[element])
    of_grid, drawn = torch.from_numpy(grid(element)), numbers(format, codes)
    upper = torch.searchsorted(of_grid, scaled, right=True).clamp(max=len(of_grid) - 1)
    assert bool(((drawn == of_grid[upper - 1]) | (drawn == of_grid[upper])).all())


@stochastic
def test_the_same_key_gives_the_same_bytes_and_another_key_others(format: Format) -> None:
    x = normal(4096)
    one = encoded(format, x, key=key(7))
    assert torch.equal(one, encoded(format, x, key=key(7)))
    for other in (8, -7, 2**31 - 1, -(2**31)):
        assert not torch.equal(one, encoded(format, x, key=key(other)))


@stochastic
def test_a_span_draws_alike_whatever_shares_its_chunk(format: Format) -> None:
    x = normal(512, seed=4)
    alone = round_trip(format, x, key=key(99))
    for before, after in [(1e-9, 1e9), (1e9, 0.0), (float("nan"), float("inf"))]:
        chunk = torch.cat([torch.full((256,), before), x, torch.full((128,), after)])
        together = round_trip(format, chunk, (256, 512, 128), key=key(-5, 99, 2**31 - 1))
        assert same_bits(together[256:768], alone)


@stochastic
def test_equal_spans_under_different_keys_differ(format: Format) -> None:
    one, other = round_trip(format, normal(512).repeat(2), (512, 512), key=key(1, 2000)).split(512)
    assert not torch.equal(one, other)


@stochastic
@pytest.mark.parametrize("seed", [0, -1, 12345])
def test_zero_and_tiny_blocks_become_zeros(format: Format, seed: int) -> None:
    """The draw of counter 0, which is the smallest, included: it must not lift 1e-31 to a number of the grid."""
    for tiny in (0.0, 9e-31, -9e-31, 1e-45, -1e-45):
        x = torch.full((1 << 12,), tiny)
        assert not round_trip(format, x, key=key(seed)).any()


@stochastic
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_blocks_stay_non_finite(format: Format, bad: float) -> None:
    x = normal(384)
    x[140] = bad
    y = round_trip(format, x, (128, 128, 128), key=key(1, 2, 3)).view(3, 128)
    assert not y[1, : format.block].isfinite().any()
    assert bool(y[::2].isfinite().all())


@pytest.mark.parametrize("rule", ["floor", "even"])
def test_what_passes_the_largest_number_saturates(rule: str) -> None:
    format = BlockScaled("e2m1", block=32, scale=rule, rounding="stochastic")  # type: ignore[arg-type]
    x = torch.full((3200,), 6.9 if rule == "even" else 7.9)
    assert bool((round_trip(format, x, key=key(3)) == 6.0).all())


def test_nvfp4_saturates_where_the_block_scale_was_rounded_down() -> None:
    """17/16 is a tie of E4M3 and becomes 1: 6.375 is 6 for every draw, a bias that the recipe of NVFP4 has."""
    x = torch.zeros(1600)
    x[0] = 6.0 * 448.0
    x[16:] = 6.375
    assert bool((round_trip(FORMATS["nvfp4"], x, key=key(3))[16:] == 6.0).all())


@stochastic
def test_a_missing_key_is_refused_by_name(format: Format) -> None:
    with pytest.raises(ValueError, match=f"{format.name} rounds stochastically: encode needs key="):
        encoded(format, normal(128))


@stochastic
@pytest.mark.parametrize("bad", [torch.tensor(1, dtype=torch.int32), key(1, 2, 3), torch.tensor([1, 2])])
def test_a_key_of_another_shape_or_dtype_is_refused(format: Format, bad: Tensor) -> None:
    with pytest.raises(ValueError, match=f"{format.name} needs key= of one int32 per span, here 2, got torch.int"):
        encoded(format, normal(256), (128, 128), key=bad)


@pytest.mark.parametrize("make", [lambda r: BlockScaled("int8", rounding=r), lambda r: NVFP4(rounding=r)])
def test_another_rounding_is_refused_by_name(make: object) -> None:
    with pytest.raises(ValueError, match="rounding must be nearest or stochastic, got 'up'"):
        make("up")  # type: ignore[operator]
