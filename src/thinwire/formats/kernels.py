"""How a kernel runs: eagerly, or fused by torch.compile, with the same bits.

A kernel is a plain function `kernel(*tensors)` that writes into its last arguments. Compiled, one
shape is specialised (the full chunk) and one dynamic version serves every other; short tails stay eager,
since a compiled call costs some 40 microseconds. Scale and code views are *arguments* of a kernel:
slicing or reinterpreting a buffer inside it stops the compiler from vectorising.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[..., Any]

SHORT = 1 << 15
"""Chunks of fewer elements than this run eagerly even where kernels are compiled."""


def eager(kernel: Kernel, *tensors: Tensor) -> Any:
    """Run the kernel op by op."""
    return kernel(*tensors)


@dataclass(frozen=True)
class Compiled:
    """Run kernels through torch.compile, specialised for chunks of `chunk` elements."""

    chunk: int

    def __call__(self, kernel: Kernel, *tensors: Tensor) -> Any:
        numel = max(t.numel() for t in tensors)
        if numel < SHORT:
            return kernel(*tensors)
        # Guards see the grad mode: the worker thread and the backward pass must agree on it.
        with torch.no_grad():
            return _compiled(kernel, numel != self.chunk)(*tensors)


@functools.cache
def _compiled(kernel: Kernel, dynamic: bool) -> Kernel:
    return torch.compile(kernel, dynamic=dynamic, fullgraph=True)


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has the compiler it needs on `device` (on the CPU, a C++ compiler)."""
    return device.type != "cpu" or any(shutil.which(name) for name in ("g++", "clang++", "c++"))
