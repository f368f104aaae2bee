"""Formats by name, and what they refuse, each with a sentence."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from tests.formats.coding import CASTS, FORMATS
from thinwire.formats import NVFP4, BlockScaled, get, names
from thinwire.formats.elements import ELEMENTS
from thinwire.formats.scales import RULES

ALL = list(FORMATS)


def test_every_name_gives_the_format_of_that_name() -> None:
    assert set(names()) <= set(ALL)
    assert set(CASTS) < set(names())
    assert [get(name).name for name in names()] == list(names())


def test_a_format_passes_through() -> None:
    format = BlockScaled("e4m3", block=64)
    assert get(format) is format
    assert format.name == "fp8_e4m3_64"


def test_the_docs_list_every_format() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted(names())


def test_formats_that_differ_have_names_that_differ() -> None:
    """Checkpoints and ledgers tell formats apart by name."""
    formats = [
        BlockScaled(element, block, per_span, rule, rounding)  # type: ignore[arg-type]
        for element, block, per_span, rule, rounding in itertools.product(
            ELEMENTS, (16, 32, 128), (False, True), RULES, ("nearest", "stochastic")
        )
        if rule != "even" or ELEMENTS[element].mantissa is not None
    ]
    formats += [NVFP4(), NVFP4(rounding="stochastic")]
    assert len({format.name for format in formats}) == len(formats)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'fp7'; choose one of fp32, bf16, .*int4_span"):
        get("fp7")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"element": "e3m4"}, "element must be one of e4m3, e5m2, .*, got 'e3m4'"),
        ({"element": "e4m3", "scale": "rounded"}, "scale must be one of exact, rceil, .*, got 'rounded'"),
        ({"element": "e4m3", "block": 0}, "block must be a positive multiple of 16, got 0"),
        ({"element": "e4m3", "block": -16}, "block must be a positive multiple of 16, got -16"),
        ({"element": "int8", "scale": "even"}, "scale 'even' is defined for floating elements, not for int8"),
        ({"element": "e4m3", "block": 24}, "block must be a positive multiple of 16, got 24"),
    ],
)
def test_a_bad_parameter_is_refused_with_its_name(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BlockScaled(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_other_dtypes_than_float32_are_refused(name: str, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    out = torch.zeros(format.nbytes((128,)), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"{name} works on a contiguous float32 vector .* got {dtype}"):
        format.encode(torch.zeros(128).to(dtype), out, spans=(128,))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("x", [torch.zeros(2, 64), torch.zeros(127), torch.zeros(256)[::2], torch.tensor(0.0)])
def test_other_shapes_than_the_spans_vector_are_refused(name: str, x: torch.Tensor) -> None:
    format = FORMATS[name]
    out = torch.zeros(format.nbytes((128,)), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"sum\(spans\) = 128 elements, got torch.float32 of shape"):
        format.encode(x, out, spans=(128,))


@pytest.mark.parametrize("name", ALL)
def test_spans_that_are_not_whole_blocks_are_refused(name: str) -> None:
    format = FORMATS[name]
    spans = (format.block - 1, format.block + 1)
    out = torch.zeros(format.nbytes(spans), dtype=torch.uint8)
    with pytest.raises(ValueError, match=f"needs spans of whole blocks of {format.block} elements"):
        format.encode(torch.zeros(sum(spans)), out, spans=spans)
