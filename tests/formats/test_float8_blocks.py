"""Blocks and spans: zero, tiny, non-finite ones, and their independence of each other."""

from __future__ import annotations

import pytest
import torch

from tests.formats.coding import CASTS, FP8, decoded, encoded, float8, normal, round_trip, same_bits, split
from thinwire.formats import BlockScaled, get


@pytest.mark.parametrize("name", FP8)
def test_a_zero_block_has_scale_one_and_decodes_to_zeros(name: str) -> None:
    format = float8(name)
    buffer = encoded(format, torch.zeros(256), (128, 128))
    scales, _ = split(format, buffer, (128, 128))
    assert bool((scales == 1).all())
    assert bool((decoded(format, buffer, (128, 128)) == 0).all())


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("tiny", [9.9e-31, 1e-38, 1e-45])
def test_a_block_below_1e_30_counts_as_zero(name: str, tiny: float) -> None:
    format = float8(name)
    x = torch.full((128,), tiny)
    scales, _ = split(format, encoded(format, x), (128,))
    assert scales.item() == 1.0
    assert bool((round_trip(format, x) == 0).all())


@pytest.mark.parametrize("name", FP8)
def test_a_block_just_above_1e_30_is_still_carried(name: str) -> None:
    format = float8(name)
    x = torch.full((128,), 1.01e-30)
    assert torch.allclose(round_trip(format, x), x, rtol=0.13, atol=0)


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 77, 127])
def test_one_non_finite_value_makes_its_whole_block_non_finite_and_no_other(
    name: str, bad: float, position: int
) -> None:
    format = float8(name)
    x = normal(384)
    x[128 + position] = bad
    spans = (128, 128, 128)
    y = round_trip(format, x, spans).view(3, 128)
    assert not y[1].isfinite().any()
    assert torch.equal(y[0], round_trip(format, x[:128]))
    assert torch.equal(y[2], round_trip(format, x[256:]))


@pytest.mark.parametrize("name", ["fp8_e4m3_span", "fp8_e5m2_span"])
def test_with_a_scale_per_span_one_non_finite_value_spoils_its_span_alone(name: str) -> None:
    format = float8(name)
    x = normal(128 * 5)
    x[300] = float("inf")
    y = round_trip(format, x, (128, 384, 128))
    assert y[:128].isfinite().all()
    assert not y[128:512].isfinite().any()
    assert y[512:].isfinite().all()


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_casts_carry_non_finite_values_themselves(name: str, bad: float) -> None:
    x = normal(64)
    x[9] = bad
    y = round_trip(get(name), x)
    assert torch.equal(torch.nonzero(~y.isfinite()), torch.tensor([[9]]))


@pytest.mark.parametrize("name", FP8)
def test_a_span_is_encoded_alike_whatever_shares_its_chunk(name: str) -> None:
    format = float8(name)
    x = normal(512, seed=4)
    alone = round_trip(format, x)
    for before, after in [(1e-9, 1e9), (1e9, 0.0), (float("nan"), float("inf"))]:
        chunk = torch.cat([torch.full((256,), before), x, torch.full((128,), after)])
        together = round_trip(format, chunk, (256, 512, 128))
        assert same_bits(together[256:768], alone)


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_a_scale_per_span_is_that_of_the_span_as_one_block(element: str) -> None:
    x = normal(128 * 4) * torch.logspace(-3, 3, 512)
    per_span = BlockScaled(element, per_span=True)  # type: ignore[arg-type]
    one_block = BlockScaled(element, block=512)  # type: ignore[arg-type]
    assert same_bits(round_trip(per_span, x), round_trip(one_block, x))


@pytest.mark.parametrize("block", [16, 32, 128, 1024])
def test_values_in_a_block_do_not_see_other_blocks(block: int) -> None:
    format = BlockScaled("e4m3", block=block)
    x = normal(4096, seed=5)
    louder = x.clone()
    louder.view(-1, block)[1::2] *= 1e6
    quiet = round_trip(format, x).view(-1, block)[::2]
    assert torch.equal(round_trip(format, louder).view(-1, block)[::2], quiet)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8_e4m3_span", 0.0265),
        ("fp8_e5m2_span", 0.0526),
        ("fp8_e4m3", 0.0265),
        ("fp8_e5m2", 0.0526),
        ("fp8_e4m3_pow2", 0.0266),
        ("fp8_e5m2_pow2", 0.0528),
        ("fp32", 0.0),
    ],
)
def test_the_error_on_normal_numbers_is_what_the_formats_promise(name: str, expected: float) -> None:
    x = normal(1 << 17, seed=6)
    error = ((round_trip(get(name), x) - x).norm() / x.norm()).item()
    assert error == pytest.approx(expected, rel=0.05)
