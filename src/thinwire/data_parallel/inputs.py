"""Layer inputs for whoever observes them: forward hooks that are there only while a forward pass is watched.

Before each forward pass of a model that records gradients the link is asked who wants to see inputs. If anybody
does, the Linear layers in question get a hook for the time of that pass alone: so activation checkpointing, which
runs layers again in the backward pass, shows them once, and other passes cost nothing. Padded tokens (zeros of an
`attention_mask=`) are left out. In a compiled model such hooks do not run: there an extra forward pass without
gradients, uncompiled, with the same random numbers and buffers, is watched instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from thinwire.data_parallel.parameters import plain_name
from thinwire.geometry import Observer


class InputWatch:
    """The hooks of one model."""

    def __init__(self, model: nn.Module, observers: Callable[[], Mapping[str, Observer]], prefix: str) -> None:
        """`prefix`: what the names of parameters begin with in `model` and not in the link ("module.")."""
        self._observers = observers
        self._prefix = prefix
        self._layers: list[RemovableHandle] = []
        self._last: tuple[Tensor, Tensor] | None = None  # an input and its rows
        self._handles = [
            model.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True),
            model.register_forward_hook(torch.compiler.disable(self._after), always_call=True),
        ]

    def remove(self) -> None:
        """Take all hooks away."""
        self._unwatch()
        for handle in self._handles:
            handle.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._layers or not torch.is_grad_enabled():
            return
        observers = self._observers()
        if not observers:
            return
        self._watch(model, observers, kwargs.get("attention_mask"))
        if _is_compiled(model):
            devices = {p.device for p in model.parameters() if p.is_cuda}
            try:
                with (
                    torch.no_grad(),
                    torch.random.fork_rng(devices=devices),
                    _buffers_as_they_are(model),
                    torch.compiler.set_stance("force_eager"),
                ):
                    _bare(model)(*args, **kwargs)
            finally:
                self._unwatch()

    def _after(self, *_: Any) -> None:
        self._unwatch()

    def _watch(self, model: nn.Module, observers: Mapping[str, Observer], mask: object) -> None:
        for name, module in model.named_modules():
            weight = plain_name(f"{name}.weight").removeprefix(self._prefix)
            if isinstance(module, nn.Linear) and weight in observers:
                hook = partial(self._show, observers[weight], mask)
                self._layers.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _unwatch(self) -> None:
        for handle in self._layers:
            handle.remove()
        self._layers.clear()
        self._last = None

    def _show(
        self,
        observer: Observer,
        mask: object,
        module: nn.Linear,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Layers that get the very same tensor are shown the very same rows. A layer of a kind of its own, called
        with something else, is passed over."""
        x = args[0] if args else kwargs.get("input")
        if not isinstance(x, Tensor) or x.is_nested or x.shape[-1:] != (module.in_features,):
            return
        if self._last is None or self._last[0] is not x:
            self._last = (x, _rows(x, mask))
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            observer(self._last[1])


def _rows(x: Tensor, mask: object) -> Tensor:
    """(tokens, columns), float32, without the tokens that a mask of the same leading shape hides."""
    x = x.detach()
    if isinstance(mask, Tensor) and mask.shape == x.shape[:-1]:
        x = x[mask.bool()]
    return x.reshape(-1, x.shape[-1]).float()


@contextmanager
def _buffers_as_they_are(model: nn.Module) -> Iterator[None]:
    """Running statistics and counters take no part in what is done meanwhile."""
    held = [
        (module._buffers, name, buffer, buffer.clone(), buffer._version)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for buffers, name, buffer, before, version in held:
            buffers[name] = buffer if buffer._version == version else buffer.copy_(before)


def _is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None for module in model.modules()
    )


def _bare(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DDP: its forward pass alone, with no bookkeeping of theirs."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner
