"""How a kernel runs: eagerly, or fused by torch.compile, with the same bits.

A kernel is a plain function `kernel(*tensors)` that writes into its last arguments. Compiled, one
shape is specialised (the full chunk) and one dynamic version serves every other; short tails stay eager,
since a compiled call costs some 40 microseconds. Scale and code views are *arguments* of a kernel:
slicing or reinterpreting a buffer inside it stops the compiler from vectorising.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor

Kernel = Callable[..., Any]

SHORT = 1 << 15
"""Chunks of fewer elements than this run eagerly even where kernels are compiled."""


class Run(Protocol):
    """A way to run kernels."""

    def __call__(self, kernel: Kernel, *tensors: Tensor) -> Any:
        """`kernel(*tensors)`."""

    def scratch(self, numel: int, device: torch.device) -> Tensor:
        """An uninitialised uint8 vector, to be used before the next call for one of the same size."""


@dataclass(frozen=True)
class Eager:
    """Run kernels op by op."""

    def __call__(self, kernel: Kernel, *tensors: Tensor) -> Any:
        return kernel(*tensors)

    def scratch(self, numel: int, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=torch.uint8, device=device)


@dataclass(frozen=True)
class Compiled:
    """Run kernels through torch.compile, specialised for chunks of `chunk` elements; for one thread at a time."""

    chunk: int
    _scratch: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, kernel: Kernel, *tensors: Tensor) -> Any:
        numel = max(t.numel() for t in tensors)
        if numel < SHORT:
            return kernel(*tensors)
        # Guards see the grad mode: the worker thread and the backward pass must agree on it.
        with torch.no_grad():
            return _compiled(kernel, numel != self.chunk)(*tensors)

    def scratch(self, numel: int, device: torch.device) -> Tensor:
        """Kept for the next call: the page faults of fresh memory cost more than a kernel."""
        if numel != self.chunk:  # tails are short
            return torch.empty(numel, dtype=torch.uint8, device=device)
        if (numel, device) not in self._scratch:
            self._scratch[numel, device] = torch.empty(numel, dtype=torch.uint8, device=device)
        return self._scratch[numel, device]


@functools.cache
def _compiled(kernel: Kernel, dynamic: bool) -> Kernel:
    return torch.compile(kernel, dynamic=dynamic, fullgraph=True)


@functools.cache
def fixed(kernel: Kernel, **arguments: Hashable) -> Kernel:
    """The kernel with some keyword arguments fixed, as a function with code of its own: the compiler counts its
    specialisations by code, and past eight it would silently fall back to eager."""
    name = "_".join([kernel.__name__, *(str(getattr(value, "name", value)) for value in arguments.values())])
    own = FunctionType(kernel.__code__.replace(co_name=name), kernel.__globals__, name, kernel.__defaults__)
    own.__kwdefaults__ = dict(arguments)
    return own


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile has the compiler it needs on `device` (on the CPU, a C++ compiler)."""
    return device.type != "cpu" or cpp_compiler() is not None


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that torch.compile would use here, if there is one."""
    return next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
