"""How a kernel runs: eagerly, or fused by torch's compiler, with the same bits.

A kernel is a plain function `kernel(*tensors)` that writes into its last arguments or returns a tensor. Fused,
one shape is specialised (the full chunk) and one dynamic version serves every other; short tails stay eager.
Scale and code views are *arguments* of a kernel: slicing or reinterpreting a buffer inside it stops the compiler
from vectorising.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Protocol

import torch
import torch._inductor
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

Kernel = Callable[..., Any]
Like = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
"""Shape, strides, dtype and device of a tensor."""

SHORT = 1 << 13
"""Chunks of fewer elements than this run eagerly even where kernels are compiled."""

_tracing: ContextVar[bool] = ContextVar("tracing", default=False)


def is_compiling() -> bool:
    """Whether a kernel is being traced for the compiler rather than run."""
    return torch.compiler.is_compiling() or _tracing.get()


class Run(Protocol):
    """A way to run kernels."""

    def __call__(self, kernel: Kernel, *tensors: Tensor, numel: int) -> Any:
        """`kernel(*tensors)` for a chunk of `numel` elements."""

    def scratch(self, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised vector on the device of the chunk `like`, to be used before the next such call."""


@dataclass(frozen=True)
class Eager:
    """Run kernels op by op."""

    def __call__(self, kernel: Kernel, *tensors: Tensor, numel: int) -> Any:
        return kernel(*tensors)

    def scratch(self, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=like.device)


@dataclass(frozen=True)
class Compiled:
    """Run kernels fused, specialised for chunks of `chunk` elements; for one format, and one thread at a time."""

    chunk: int
    _kernels: dict[Hashable, Kernel] = field(default_factory=dict, repr=False, compare=False)
    _scratch: dict[Hashable, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, kernel: Kernel, *tensors: Tensor, numel: int) -> Any:
        if numel < SHORT:
            return kernel(*tensors)
        # Guards see the grad mode: the worker thread and the backward pass must agree on it.
        with torch.no_grad():
            if numel != self.chunk:
                return _dynamic(kernel)(*tensors)
            key = (kernel, *(t.stride() for t in tensors))
            if key not in self._kernels:
                like = ((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
                self._kernels[key] = _specialised(kernel, *like)
            return self._kernels[key](*tensors)[0]

    def scratch(self, size: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Kept for the next call: the page faults of fresh memory cost more than a kernel."""
        if like.numel() != self.chunk:  # tails are short
            return torch.empty(size, dtype=dtype, device=like.device)
        key = (size, dtype, like.device)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(size, dtype=dtype, device=like.device)
        return self._scratch[key]


@functools.cache
def _dynamic(kernel: Kernel) -> Kernel:
    return torch.compile(kernel, dynamic=True, fullgraph=True)


@functools.cache
def _specialised(kernel: Kernel, *like: Like) -> Kernel:
    """The kernel for tensors of exactly these shapes and strides; what it returns comes as a tuple. Calls are not
    guarded: the guards of torch.compile take longer than some kernels do."""
    examples = []
    for shape, stride, dtype, device in like:
        extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride))
        examples.append(torch.zeros(extent, dtype=dtype, device=device).as_strided(shape, stride))
    token = _tracing.set(True)
    try:
        graph = make_fx(lambda *tensors: (kernel(*tensors),))(*examples)
    finally:
        _tracing.reset(token)
    compiled: Kernel = torch._inductor.standalone_compile(graph, [*examples], dynamic_shapes="from_example_inputs")
    return compiled


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
