"""The matrices in a parameter: how a stored tensor is cut into matrices whose rows are outputs and columns inputs.

A parameter may be stored transposed (GPT-2's Conv1D), hold a stack (the experts of a layer, each its own matrix),
be a convolution (its window counts as inputs), or several layers in one: `repeat` times rows of `sizes`. A fused
query, key and value of widths q, k, v is `sizes=(q, k, v)`; where each of h heads stores its own three (GPT-NeoX),
`repeat=h, sizes=(d, d, d)`, and the rows of all heads' queries make one matrix, unless heads are kept `apart`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """How to cut. The fields are also keys of a matrix group, so that they are printed and saved with it."""

    stacked: bool = False
    """The first dimension numbers independent matrices."""
    transposed: bool = False
    """Stored as (inputs, outputs)."""
    repeat: int = 1
    """How many times the rows of `sizes` follow each other."""
    sizes: tuple[int, ...] | None = None
    """Rows of each part; None: all of them are one part."""
    apart: bool = False
    """Whether each repetition of a part is a matrix of its own."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Blocks:
        """As a group's keys say."""
        sizes = group.get("sizes")
        return cls(
            stacked=bool(group.get("stacked", False)),
            transposed=bool(group.get("transposed", False)),
            repeat=int(group.get("repeat", 1)),
            sizes=None if sizes is None else tuple(int(size) for size in sizes),
            apart=bool(group.get("apart", False)),
        )

    def keys(self) -> dict[str, Any]:
        """For a group."""
        return asdict(self)

    def cut(self, tensor: Tensor) -> list[Tensor]:
        """For each part its matrices, (count, rows, columns). Views where the memory allows it."""
        whole = self._stack(tensor)  # (stack, rows, columns)
        stack, _, columns = whole.shape
        rows = whole.reshape(stack, self.repeat, -1, columns) if whole.numel() else whole[:, None]
        parts = rows.split(list(self.sizes), dim=2) if self.sizes else (rows,)
        if self.apart:
            return [part.reshape(-1, part.shape[2], columns) for part in parts]
        return [part.reshape(stack, part.shape[1] * part.shape[2], columns) for part in parts]

    def join(self, parts: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The tensor of this shape that `cut` cuts into `parts`."""
        stack = shape[0] if self.stacked else 1
        columns = parts[0].shape[-1]
        if len(parts) == 1:
            whole = parts[0].reshape(stack, -1, columns)
        else:
            split = [part.reshape(stack, self.repeat, -1, columns) for part in parts]
            whole = torch.cat(split, dim=2).reshape(stack, -1, columns)
        return (whole.mT if self.transposed else whole).reshape(tuple(shape))

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise ValueError naming a parameter that cannot be cut so."""
        least = 3 if self.stacked else 2
        if len(shape) < least:
            raise ValueError(
                f"{name!r} of shape {tuple(shape)} is in a matrix group, which needs {least} dimensions or more: "
                "put it in a group of kind 'vector'"
            )
        if self.transposed and len(shape) > least:
            raise ValueError(f"{name!r} of shape {tuple(shape)} cannot be a transposed matrix: it has a window")
        rows = shape[-1] if self.transposed else shape[least - 2]
        if self.sizes is None and rows % self.repeat:
            raise ValueError(
                f"{name!r} of shape {tuple(shape)} has {rows} outputs, not a multiple of {self.repeat}"
            )
        if self.sizes is not None and rows != self.repeat * sum(self.sizes):
            raise ValueError(
                f"{name!r} of shape {tuple(shape)} has {rows} outputs, not {self.repeat} times {self.sizes}"
            )

    def _stack(self, tensor: Tensor) -> Tensor:
        stack = tensor if self.stacked else tensor[None]
        return stack.mT if self.transposed else stack.flatten(2)
