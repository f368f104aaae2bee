"""What a checkpoint holds, and the words for what does not fit: a key, the saved value, the present one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.train.checkpoint.manifest import JSON, CheckpointError, differences


@dataclass(frozen=True)
class Saved:
    """The shape and dtype of every key, the numbers, and how to read tensors."""

    name: str
    step: int
    world_size: int
    index: Mapping[str, tuple[torch.Size, torch.dtype]]
    state: dict[str, JSON]
    read: Callable[[dict[str, Tensor]], None]  # fills the given tensors in place, on all ranks together

    def refuse(self, lines: Sequence[str]) -> None:
        """Raise if there are any differences."""
        if lines:
            more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
            raise CheckpointError(
                f"{self.name} is a checkpoint of another run: {'; '.join(lines[:5])}{more}. Resume with the "
                "settings it was made with, or start afresh in another directory"
            )

    def compare(self, prefix: str, here: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> None:
        """Refuse unless the keys under `prefix`, their shapes and dtypes are those of `here`."""
        there = {key: described(*entry) for key, entry in self.index.items() if key.startswith(prefix)}
        self.refuse(differences(there, {key: described(*entry) for key, entry in here.items()}))


def described(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def json_value(key: str, value: Any) -> JSON:
    """`value` as JSON; a 0-d tensor (a learning rate, say) as its number."""
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and all(isinstance(name, str | int) for name in value):
        return {str(name): json_value(f"{key}.{name}", entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(f"{key}[{number}]", entry) for number, entry in enumerate(value)]
    raise CheckpointError(f"{key} is a {type(value).__name__}; a checkpoint holds only tensors and plain numbers")
