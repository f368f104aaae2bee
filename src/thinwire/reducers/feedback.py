"""What is kept of what an encoding leaves out, and how much of it is added to the next reduction.

With c = contribution + e, of which C(c) is sent:

    e <- beta e + (1 - beta) (c - C(c))

beta = 0 is classic error feedback: everything, once. With more the memory is a moving average, so an outlier is
paid back little by little; what is owed is then e / (1 - beta), and nothing is lost either:

    sum of what is sent = sum of the contributions - e / (1 - beta)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Storage: TypeAlias = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True)
class LoCo:
    """Error feedback by a moving average, in few bytes, that starts anew now and then (LoCo, arXiv 2407.04480).

    The defaults are those of the authors' code in DeepSpeed.
    """

    beta: float = 0.8
    """How much of the memory stays; 0: classic error feedback."""

    reset: int | None = 1024
    """Reductions after which a slot's memory is forgotten, at the sender and at the owner; None: never."""

    stagger: bool = True
    """Slots are reset one after the other, at even distances, instead of all in the same reduction."""

    storage: Storage = "int8"
    """"int8": 1 byte per element and a float32 scale per block of the format; its rounding errors are lost."""

    def __post_init__(self) -> None:
        if not isinstance(self.beta, int | float) or not 0 <= self.beta < 1:
            raise ValueError(f"LoCo beta must be from 0 to less than 1, got {self.beta!r}")
        if self.reset is not None and (not isinstance(self.reset, int) or self.reset < 1):
            raise ValueError(f"LoCo reset must be a number of reductions or None, got {self.reset!r}")
        if self.storage not in get_args(Storage):
            raise ValueError(f"LoCo storage must be one of {', '.join(get_args(Storage))}, got {self.storage!r}")

    def forgotten(self, names: Sequence[str], reduction: int) -> list[str]:
        """The slots that are reset after reduction number `reduction`, from 1."""
        if self.reset is None:
            return []
        shift = self.reset / len(names) if self.stagger and names else 0.0
        return [name for place, name in enumerate(names) if (reduction + int(place * shift)) % self.reset == 0]


CLASSIC = LoCo(beta=0.0, reset=None, storage="float32")

Feedback: TypeAlias = Literal["none", "error"] | LoCo
"""Nothing is kept; all of it, in float32; a moving average."""


def memory_of(feedback: Feedback) -> LoCo | None:
    """What a feedback keeps; None: nothing. Raises ValueError for what is no feedback."""
    if isinstance(feedback, LoCo):
        return feedback
    if feedback not in ("none", "error"):
        raise ValueError(f"Quantized feedback must be 'none', 'error' or a LoCo, got {feedback!r}")
    return CLASSIC if feedback == "error" else None
