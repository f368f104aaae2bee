"""Codes and decoded values agree with ml_dtypes and numpy, bit for bit, over everything that float32 can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.formats import oracle
from tests.formats.coding import (
    FORMATS,
    NARROW,
    bf16_patterns,
    block_scaled,
    decoded,
    element_of,
    encoded,
    float32_patterns,
    normal,
    same_bits,
    split,
)
from thinwire.formats import NVFP4, BlockScaled

ELEMENTS_AND_RULES = [
    (element, rule)
    for element in oracle.ELEMENTS
    for rule in ("exact", "rceil", "floor", "ceil", "even")
    if rule != "even" or element in oracle.MANTISSA
]


def assert_codes_equal(ours: torch.Tensor, theirs: np.ndarray, scales: torch.Tensor) -> None:
    """Under a scale that is NaN, any code will do."""
    meaningful = scales.isfinite().repeat_interleave(len(ours) // len(scales)).numpy()
    wrong = (ours.numpy() != theirs) & meaningful
    assert not wrong.any(), f"{wrong.sum()} codes differ, first at {wrong.argmax()}"


@pytest.mark.parametrize("element", oracle.ELEMENTS)
@pytest.mark.parametrize("rule", ["exact", "rceil"])
@pytest.mark.parametrize("patterns", [bf16_patterns, float32_patterns])
def test_scaled_values_get_the_codes_of_ml_dtypes(element: str, rule: str, patterns: object) -> None:
    x = patterns()  # type: ignore[operator]
    x = x[np.isfinite(x) & (np.abs(x) <= oracle.MAX[element])]
    x = np.pad(x, (0, -len(x) % 127)).reshape(-1, 127)
    x = np.pad(x, ((0, 0), (1, 0)), constant_values=oracle.MAX[element])  # so that every block's scale is 1
    format = BlockScaled(element, scale=rule)  # type: ignore[arg-type]
    spans = (x.size,)
    scales, codes = split(format, encoded(format, torch.from_numpy(x.reshape(-1))), spans)
    assert bool((scales == 1.0).all())
    assert_codes_equal(codes, oracle.cast(x.reshape(-1), element), scales)


@pytest.mark.parametrize(("element", "rule"), ELEMENTS_AND_RULES)
def test_a_block_of_any_magnitude_is_encoded_as_the_oracle_does(element: str, rule: str) -> None:
    """Each positive pattern, subnormal, zero, huge and non-finite ones included, is the largest of one block."""
    largest = np.concatenate([bf16_patterns()[: 1 << 15], float32_patterns()[: 1 << 15]])
    fractions = np.random.default_rng(0).uniform(-1, 1, size=(len(largest), 15)).astype(np.float32)
    with np.errstate(all="ignore"):
        x = (
            np.concatenate([-largest[:, None], fractions * largest[:, None]], axis=1)
            .astype(np.float32)
            .reshape(-1)
        )
    format = BlockScaled(element, block=16, scale=rule)  # type: ignore[arg-type]
    buffer = encoded(format, torch.from_numpy(x))
    scales, codes = split(format, buffer, (x.size,))
    their_scales, their_codes = oracle.encode(x, element, rule, group=16)
    assert same_bits(scales, torch.from_numpy(their_scales))
    assert_codes_equal(codes, their_codes, scales)
    values = oracle.decode(their_scales, their_codes, element)
    assert same_bits(decoded(format, buffer, (x.size,)), torch.from_numpy(values))


@pytest.mark.parametrize("name", NARROW)
def test_random_blocks_of_all_sizes_are_encoded_as_the_oracle_does(name: str) -> None:
    format = FORMATS[name]
    spans = (128, 512, 128)
    for exponent in range(-34, 36, 3):
        x = normal(768, seed=exponent + 100) * 10.0**exponent
        scales, codes = split(format, encoded(format, x, spans), spans)
        if isinstance(format, NVFP4):
            parts = [oracle.encode_nvfp4(part.numpy()) for part in x.split(spans)]
        elif block_scaled(name).per_span:
            element, rule = block_scaled(name).element, block_scaled(name).scale
            parts = [oracle.encode(part.numpy(), element, rule, len(part)) for part in x.split(spans)]
        else:
            element, rule = block_scaled(name).element, block_scaled(name).scale
            parts = [oracle.encode(x.numpy(), element, rule, format.block)]
        assert same_bits(scales, torch.from_numpy(np.concatenate([s for s, _ in parts])))
        assert np.array_equal(codes.numpy(), np.concatenate([c for _, c in parts]))


def test_nvfp4_blocks_of_any_magnitude_are_encoded_as_the_oracle_does() -> None:
    """Block maxima over all that a span can hold: the block scales run through E4M3, its subnormals and zero."""
    largest = np.exp2(np.linspace(-24, 0, 1 << 12)).astype(np.float32)
    fractions = np.random.default_rng(0).uniform(-1, 1, size=(len(largest), 15)).astype(np.float32)
    x = np.concatenate([-largest[:, None], fractions * largest[:, None]], axis=1).reshape(-1)
    for size in (1.0, 3e-30, 2e38):
        scaled = (x * np.float32(size)).astype(np.float32)
        buffer = encoded(NVFP4(), torch.from_numpy(scaled))
        scales, codes = split(NVFP4(), buffer, (x.size,))
        their_scales, their_codes = oracle.encode_nvfp4(scaled)
        assert same_bits(scales, torch.from_numpy(their_scales))
        assert np.array_equal(codes.numpy(), their_codes)
        values = torch.from_numpy(oracle.decode(their_scales, their_codes, "e2m1"))
        assert same_bits(decoded(NVFP4(), buffer, (x.size,)), values)


@pytest.mark.parametrize("element", oracle.ELEMENTS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100, 1.0 + 2.0**-15])
def test_all_codes_decode_as_the_oracle_does(element: str, scale: float) -> None:
    """All 256 bytes: codes of 8 bits, or pairs of codes of 4 with element 2i in the lower half of byte i."""
    numel = 256 * 8 // oracle.BITS[element]
    format = BlockScaled(element, block=numel)  # type: ignore[arg-type]
    buffer = torch.zeros(format.nbytes((numel,)), dtype=torch.uint8)
    buffer[:4].view(torch.float32).fill_(scale)
    buffer[4:260] = torch.arange(256, dtype=torch.uint8)
    codes = np.arange(256, dtype=np.uint8)
    if oracle.BITS[element] == 4:
        codes = np.stack([codes % 16, codes // 16], axis=1).reshape(-1)
    expected = oracle.decode(np.array([scale], dtype=np.float32), codes, element)
    assert same_bits(decoded(format, buffer, (numel,)), torch.from_numpy(expected))


@pytest.mark.parametrize("element", oracle.ELEMENTS)
@pytest.mark.parametrize("rule", ["exact", "rceil"])
def test_every_code_point_survives_decoding_and_encoding(element: str, rule: str) -> None:
    """The codes under scale 1 are fixed points: the block's amax is the largest code's value."""
    codes = np.arange(1 << oracle.BITS[element], dtype=np.uint8)
    values = oracle.values(codes, element)
    ours = np.isfinite(values) & (np.abs(values) <= oracle.MAX[element])  # not -128 and -8, which nothing becomes
    format = BlockScaled(element, block=len(codes), scale=rule)  # type: ignore[arg-type]
    x = torch.from_numpy(np.where(ours, values, np.float32(0.0)))
    _, again = split(format, encoded(format, x), (len(codes),))
    assert np.array_equal(again.numpy()[ours], codes[ours])


@pytest.mark.parametrize("name", [name for name in NARROW if oracle.BITS[element_of(FORMATS[name])] == 4])
def test_element_2i_is_in_the_lower_half_of_byte_i(name: str) -> None:
    format = FORMATS[name]
    x = normal(128).sign()
    places = []
    for i in range(128):
        negated = torch.where(torch.arange(128) == i, -x, x)
        changed = encoded(format, x) ^ encoded(format, negated)
        (place,) = changed.nonzero().flatten().tolist()
        places.append(place)
        assert changed[place] & (0x0F if i % 2 else 0xF0) == 0
    assert places == [places[0] + i // 2 for i in range(128)]
