"""Elements by themselves: where ties go, what saturates, and how far neighbours are apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.formats import oracle
from tests.formats.coding import bf16_patterns, float32_patterns
from thinwire.formats.elements import ELEMENTS

TIES = {
    "e2m1": [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
    "e3m0": [(0.125, 0.0), (0.375, 0.5), (0.75, 0.5), (1.5, 2.0), (3.0, 2.0), (6.0, 8.0), (12.0, 8.0)],
}
"""By element: numbers halfway between two of the grid, and the one with the even code."""


@pytest.mark.parametrize(("name", "tie", "rounded"), [(name, *tie) for name, ties in TIES.items() for tie in ties])
def test_ties_go_to_the_even_code(name: str, tie: float, rounded: float) -> None:
    element = ELEMENTS[name]
    ties = torch.tensor([tie, -tie])
    assert element.widen(element.code(ties)).tolist() == [rounded, -rounded]
    assert not bool((element.code(ties) & 1).any())
    away = torch.tensor([np.nextafter(np.float32(tie), np.float32(np.inf if rounded < tie else 0))])
    assert element.widen(element.code(away)).item() == (tie * 2 - rounded)


@pytest.mark.parametrize("patterns", [bf16_patterns, float32_patterns])
def test_every_float32_gets_the_e2m1_code_of_ml_dtypes_after_a_clamp(patterns: object) -> None:
    """Infinite ones too; NaN, which E2M1 lacks, becomes 0 whatever its sign: its scale is NaN."""
    x = patterns()  # type: ignore[operator]
    codes = ELEMENTS["e2m1"].code(torch.from_numpy(x)).numpy()
    number = ~np.isnan(x)
    assert np.array_equal(codes[number], oracle.cast(np.clip(x[number], -6.0, 6.0), "e2m1"))
    assert not codes[~number].any()


@pytest.mark.parametrize("patterns", [bf16_patterns, float32_patterns])
def test_every_float32_gets_the_nearest_e3m0(patterns: object) -> None:
    x = patterns()  # type: ignore[operator]
    codes = ELEMENTS["e3m0"].code(torch.from_numpy(x)).numpy()
    assert np.array_equal(codes, oracle.cast(x, "e3m0"))


@pytest.mark.parametrize("element", ["int8", "int4"])
@pytest.mark.parametrize("patterns", [bf16_patterns, float32_patterns])
def test_every_float32_gets_the_integer_that_numpy_rounds_to(element: str, patterns: object) -> None:
    x = patterns()  # type: ignore[operator]
    x = x[np.abs(x) <= oracle.MAX[element]]
    codes = ELEMENTS[element].code(torch.from_numpy(x)).view(torch.uint8).numpy()
    assert np.array_equal(codes & (2 ** oracle.BITS[element] - 1), oracle.cast(x, element))
    assert ELEMENTS[element].code(torch.tensor([float("nan")])).item() == 0


@pytest.mark.parametrize("element", oracle.ELEMENTS)
def test_spacing_is_the_distance_of_the_neighbours_of_a_value(element: str) -> None:
    grid = np.unique(oracle.values(np.arange(1 << oracle.BITS[element], dtype=np.uint8), element))
    grid = grid[np.isfinite(grid) & (np.abs(grid) <= oracle.MAX[element])]
    middle = (grid[1:] + grid[:-1]) / 2
    for values in (middle, np.nextafter(grid[1:], grid[:-1]), np.nextafter(grid[:-1], grid[1:])):
        spacing = ELEMENTS[element].spacing(torch.from_numpy(values))
        assert np.array_equal(spacing.numpy(), grid[1:] - grid[:-1])
