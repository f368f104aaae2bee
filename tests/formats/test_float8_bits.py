"""FP8 codes and decoded values agree with ml_dtypes, bit for bit, over everything that float32 can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.formats import oracle
from tests.formats.coding import FP8, decoded, encoded, float8, normal, same_bits, split
from thinwire.formats import BlockScaled

ELEMENTS = ("e4m3", "e5m2")
SCALES = ("exact", "rceil")


def bf16_patterns() -> np.ndarray:
    """All 65,536 bfloat16 numbers as float32."""
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def float32_patterns() -> np.ndarray:
    """2^16-strided float32 bit patterns with low bits set, so that all of them lie off the bfloat16 grid."""
    return ((np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8001).view(np.float32)


def assert_codes_equal(ours: torch.Tensor, theirs: np.ndarray, element: str) -> None:
    mine = ours.numpy()
    wrong = (mine != theirs) & ~(oracle.is_nan_code(mine, element) & oracle.is_nan_code(theirs, element))
    assert not wrong.any(), f"{wrong.sum()} codes differ, first at {wrong.argmax()}"


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("patterns", [bf16_patterns, float32_patterns])
def test_scaled_values_get_the_codes_of_ml_dtypes(element: str, scale: str, patterns: object) -> None:
    x = patterns()  # type: ignore[operator]
    x = x[np.isfinite(x) & (np.abs(x) <= oracle.MAX[element])]
    x = np.pad(x, (0, -len(x) % 127)).reshape(-1, 127)
    x = np.pad(x, ((0, 0), (1, 0)), constant_values=oracle.MAX[element])  # so that every block's scale is 1
    format = BlockScaled(element, scale=scale)  # type: ignore[arg-type]
    spans = (x.size,)
    scales, codes = split(format, encoded(format, torch.from_numpy(x.reshape(-1))), spans)
    assert bool((scales == 1.0).all())
    assert_codes_equal(codes, oracle.cast(x.reshape(-1), element), element)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("patterns", [bf16_patterns, float32_patterns])
def test_a_block_of_any_magnitude_is_encoded_as_the_oracle_does(
    element: str, scale: str, patterns: object
) -> None:
    """Each pattern, subnormal, zero, huge and non-finite ones included, is the largest of one block."""
    largest = patterns()  # type: ignore[operator]
    fractions = np.random.default_rng(0).uniform(-1, 1, size=(len(largest), 15)).astype(np.float32)
    with np.errstate(all="ignore"):
        x = np.concatenate([largest[:, None], fractions * largest[:, None]], axis=1).astype(np.float32).reshape(-1)
    format = BlockScaled(element, block=16, scale=scale)  # type: ignore[arg-type]
    buffer = encoded(format, torch.from_numpy(x))
    scales, codes = split(format, buffer, (x.size,))
    their_scales, their_codes = oracle.encode(x, element, scale, group=16)
    assert same_bits(scales, torch.from_numpy(their_scales))
    assert_codes_equal(codes, their_codes, element)
    values = oracle.decode(their_scales, their_codes, element)
    assert same_bits(decoded(format, buffer, (x.size,)), torch.from_numpy(values))


@pytest.mark.parametrize("name", FP8)
def test_random_blocks_of_all_sizes_are_encoded_as_the_oracle_does(name: str) -> None:
    format = float8(name)
    spans = (128, 512, 128)
    for exponent in range(-34, 36, 3):
        x = normal(768, seed=exponent + 100) * 10.0**exponent
        buffer = encoded(format, x, spans)
        scales, codes = split(format, buffer, spans)
        if format.per_span:
            parts = [
                oracle.encode(part.numpy(), format.element, format.scale, len(part)) for part in x.split(spans)
            ]
        else:
            parts = [oracle.encode(x.numpy(), format.element, format.scale, format.block)]
        assert same_bits(scales, torch.from_numpy(np.concatenate([s for s, _ in parts])))
        assert_codes_equal(codes, np.concatenate([c for _, c in parts]), format.element)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**100, 1.0 + 2.0**-15])
def test_all_256_codes_decode_as_ml_dtypes_does(element: str, scale: float) -> None:
    format = BlockScaled(element, block=256)  # type: ignore[arg-type]
    codes = np.arange(256, dtype=np.uint8)
    buffer = torch.zeros(format.nbytes((256,)), dtype=torch.uint8)
    stored, stored_codes = buffer[:4].view(torch.float32), buffer[4:260]
    stored.fill_(scale)
    stored_codes.copy_(torch.from_numpy(codes))
    expected = oracle.decode(np.array([scale], dtype=np.float32), codes, element)
    assert same_bits(decoded(format, buffer, (256,)), torch.from_numpy(expected))


@pytest.mark.parametrize("element", ELEMENTS)
def test_every_code_point_survives_decoding_and_encoding(element: str) -> None:
    """The 256 codes under scale 1 are fixed points: the block's amax is the largest code's value."""
    for scale in SCALES:
        format = BlockScaled(element, block=256, scale=scale)  # type: ignore[arg-type]
        codes = np.arange(256, dtype=np.uint8)
        values = codes.view(oracle.DTYPES[element]).astype(np.float32)
        finite = np.isfinite(values)
        x = torch.from_numpy(np.where(finite, values, np.float32(0.0)))
        _, again = split(format, encoded(format, x), (256,))
        assert np.array_equal(again.numpy()[finite], codes[finite])
