"""Blocks and spans: zero, tiny, non-finite ones, and their independence of each other."""

from __future__ import annotations

import pytest
import torch

from tests.formats import oracle
from tests.formats.coding import (
    BLOCK_SCALED,
    CASTS,
    FORMATS,
    NARROW,
    decoded,
    encoded,
    groups,
    normal,
    round_trip,
    same_bits,
    split,
)
from thinwire.formats import BlockScaled, get


@pytest.mark.parametrize("name", NARROW)
def test_a_zero_block_decodes_to_zeros(name: str) -> None:
    assert bool((round_trip(FORMATS[name], torch.zeros(256), (128, 128)) == 0).all())


@pytest.mark.parametrize("name", BLOCK_SCALED)
@pytest.mark.parametrize("tiny", [0.0, 9.9e-31, 1e-38, 1e-45])
def test_the_scale_of_a_zero_or_tiny_block_is_one(name: str, tiny: float) -> None:
    format = FORMATS[name]
    scales, _ = split(format, encoded(format, torch.full((128,), tiny)), (128,))
    assert bool((scales == 1).all())


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("tiny", [9.9e-31, 1e-38, 1e-45])
def test_a_block_below_1e_30_counts_as_zero(name: str, tiny: float) -> None:
    assert bool((round_trip(FORMATS[name], torch.full((128,), tiny)) == 0).all())


@pytest.mark.parametrize("name", NARROW)
def test_a_block_just_above_1e_30_is_still_carried(name: str) -> None:
    x = torch.full((128,), 1.01e-30)
    assert torch.allclose(round_trip(FORMATS[name], x), x, rtol=0.25, atol=0)


def test_an_nvfp4_block_is_zeros_where_its_scale_rounds_to_zero_and_no_sooner() -> None:
    """The smallest block scale is 2^-9 of the 448 of the span's largest block; its half is a tie, to even."""
    x = torch.zeros(3, 16)
    x[0, 0] = 448.0 * 6.0
    x[1, :4] = torch.tensor([6.0, -3.0, 0.5, 0.0]) * 2**-10 * 1.001
    x[2, :4] = torch.tensor([6.0, -3.0, 0.5, 0.0]) * 2**-10 * 0.999
    y = round_trip(get("nvfp4"), x.flatten()).view(3, 16)
    assert y[0, 0] == 448.0 * 6.0
    assert y[1, :4].tolist() == [3 * 2**-9, -1.5 * 2**-9, 0.5 * 2**-9, 0.0]
    assert not y[2].any()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [128, 205, 255])
def test_one_non_finite_value_makes_all_that_share_its_scale_non_finite_and_no_other(
    name: str, bad: float, position: int
) -> None:
    format, spans = FORMATS[name], (128, 128, 128)
    x = normal(384)
    before = round_trip(format, x, spans)
    x[position] = bad
    begin = 0
    for length, y, clean in zip(
        groups(format, spans),
        round_trip(format, x, spans).split(groups(format, spans)),
        before.split(groups(format, spans)),
    ):
        if begin <= position < begin + length:
            assert not y.isfinite().any()
        else:
            assert torch.equal(y, clean)
        begin += length


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_casts_carry_non_finite_values_themselves(name: str, bad: float) -> None:
    x = normal(64)
    x[9] = bad
    y = round_trip(get(name), x)
    assert torch.equal(torch.nonzero(~y.isfinite()), torch.tensor([[9]]))


@pytest.mark.parametrize("name", NARROW)
def test_a_span_is_encoded_alike_whatever_shares_its_chunk(name: str) -> None:
    format = FORMATS[name]
    x = normal(512, seed=4)
    alone = round_trip(format, x)
    for before, after in [(1e-9, 1e9), (1e9, 0.0), (float("nan"), float("inf"))]:
        chunk = torch.cat([torch.full((256,), before), x, torch.full((128,), after)])
        together = round_trip(format, chunk, (256, 512, 128))
        assert same_bits(together[256:768], alone)


@pytest.mark.parametrize("element", oracle.ELEMENTS)
@pytest.mark.parametrize("rule", ["exact", "rceil"])
def test_a_scale_per_span_is_that_of_the_span_as_one_block(element: str, rule: str) -> None:
    x = normal(128 * 4) * torch.logspace(-3, 3, 512)
    per_span = BlockScaled(element, per_span=True, scale=rule)  # type: ignore[arg-type]
    one_block = BlockScaled(element, block=512, scale=rule)  # type: ignore[arg-type]
    assert torch.equal(encoded(per_span, x), encoded(one_block, x))
    assert same_bits(round_trip(per_span, x), round_trip(one_block, x))


@pytest.mark.parametrize("element", oracle.ELEMENTS)
@pytest.mark.parametrize("block", [16, 32, 128, 1024])
def test_values_in_a_block_do_not_see_other_blocks(element: str, block: int) -> None:
    format = BlockScaled(element, block=block)  # type: ignore[arg-type]
    x = normal(4096, seed=5)
    louder = x.clone()
    louder.view(-1, block)[1::2] *= 1e6
    quiet = round_trip(format, x).view(-1, block)[::2]
    assert torch.equal(round_trip(format, louder).view(-1, block)[::2], quiet)


@pytest.mark.parametrize("name", NARROW)
def test_finite_values_up_to_2_to_the_127_stay_finite(name: str) -> None:
    """Above, what is rounded up may overflow, as in every narrower format."""
    x = normal(512, seed=8)
    x *= 2.0**127 / x.abs().max()
    assert bool(round_trip(FORMATS[name], x).isfinite().all())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", 0.0),
        ("fp8_e4m3", 0.0265),
        ("fp8_e4m3_span", 0.0265),
        ("fp8_e4m3_pow2", 0.0266),
        ("fp8_e5m2", 0.0526),
        ("fp8_e5m2_span", 0.0526),
        ("fp8_e5m2_pow2", 0.0528),
        ("mxfp8", 0.0266),
        ("mxfp8_floor", 0.0292),
        ("mxfp8_ceil", 0.0266),
        ("mxfp8_even", 0.0277),
        ("mxfp8_e5m2", 0.0528),
        ("mxfp8_e5m2_floor", 0.0539),
        ("nvfp4", 0.095),
        ("mxfp4", 0.1155),
        ("mxfp4_floor", 0.115),
        ("mxfp4_even", 0.112),
        ("mxfp4_ceil", 0.145),
        ("fp4_e3m0", 0.192),
        ("fp4_e3m0_span", 0.195),
        ("int8", 0.0066),
        ("int4", 0.117),  # the full-range grid, -8 to 7, has .105 and a bias
    ],
)
def test_the_error_on_normal_numbers_is_what_the_formats_promise(name: str, expected: float) -> None:
    x = normal(1 << 17, seed=6)
    error = ((round_trip(FORMATS[name], x) - x).norm() / x.norm()).item()
    assert error == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", NARROW)
def test_decoding_reads_scales_and_codes_alone(name: str) -> None:
    """The padding of a buffer may hold anything."""
    format = FORMATS[name]
    spans = (format.block, 2 * format.block)
    x = normal(sum(spans))
    clean = encoded(format, x, spans)
    dirty = torch.full_like(clean, 0xFF)
    format.encode(x, dirty, spans=spans)
    assert torch.equal(decoded(format, dirty, spans), decoded(format, clean, spans))
