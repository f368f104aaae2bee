"""Values that follow the progress of a run, as plain data."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

Schedule: TypeAlias = tuple[tuple[Any, ...], ...]
"""Stretches of a run, each from a fraction of its steps to where the next one starts:

    (start, value)                     constant
    (start, first, last)               linear
    (start, first, last, "cosine")     half a cosine
"""


def value_at(schedule: Schedule, progress: float) -> float:
    """The value after this fraction of the steps; 0.0 before the first stretch."""
    ends = [*(start for start, *_ in schedule[1:]), 1.0]
    value = 0.0
    for (start, first, *rest), end in zip(schedule, ends):
        if progress < start:
            break
        value = first
        if rest:
            along = min(1.0, (progress - start) / (end - start))
            if rest[1:]:
                along = (1 - math.cos(math.pi * along)) / 2
            value += (rest[0] - first) * along
    return float(value)


def check_schedule(key: str, schedule: Schedule, below: float = math.inf) -> None:
    """Raise ValueError with the key unless these are stretches in order, of values from 0 to less than `below`."""
    stretches = schedule if isinstance(schedule, tuple) else ()
    starts = [stretch[0] for stretch in stretches if _is_stretch(stretch)]
    if not starts or len(starts) < len(stretches) or starts != sorted(set(starts)):
        raise ValueError(
            f"{key} must be stretches (start, value), (start, first, last) or (start, first, last, 'cosine') with "
            f"starts that rise from 0 to less than 1, got {schedule!r}"
        )
    values = [value for stretch in stretches for value in stretch[1:3]]
    if not all(0 <= value < below for value in values):
        limit = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{key} must have values of at least 0{limit}, got {schedule!r}")


def _is_stretch(stretch: object) -> bool:
    if not isinstance(stretch, tuple) or len(stretch) not in (2, 3, 4):
        return False
    numbers = stretch[:3]
    return (
        all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        and 0 <= numbers[0] < 1
        and stretch[3:] in ((), ("cosine",))
    )
