"""Anchors: the weights that all ranks agreed on last, in float32 at least, and the optimizer that moves them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.local_update.method import MakeOptimizer
from thinwire.local_update.outer import check_outer_state, load_outer, make_outer, outer_bytes, outer_state
from thinwire.local_update.weights import Weights
from thinwire.reducers.reducer import State


class Anchors:
    """Of what this rank keeps of the weights."""

    def __init__(self, weights: Weights, outer: MakeOptimizer, *, device: torch.device, offload: bool) -> None:
        """`device`: where the weights are; with `offload` anchors and optimizer stay on the host."""
        self._weights = weights
        self._device = device
        home = torch.device("cpu") if offload else device
        self._tensors = {slot.name: _anchor(weights[slot.name], slot.dtype, home) for slot in weights.slots()}
        self.outer = make_outer(outer, self._tensors)

    @property
    def tensors(self) -> Iterable[Tensor]:
        """All of them, in one order on all ranks that keep the same."""
        return self._tensors.values()

    @property
    def nbytes(self) -> int:
        """Of the anchors and of what the optimizer keeps."""
        return sum(anchor.nbytes for anchor in self.tensors) + outer_bytes(self.outer)

    def pseudo_gradient(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Anchor - parameter, on the device of the parameters; the anchor as the parameter's dtype had it, or what
        was rounded away then would be taken for progress."""
        return {name: self._as_parameter(name) - self._weights[name] for name in self._weights.kept(names)}

    def _as_parameter(self, name: str) -> Tensor:
        anchor = self._tensors[name].to(self._device)
        return anchor.to(self._weights[name].dtype).to(anchor.dtype)

    def move(self, means: Mapping[str, Tensor], settings: Mapping[str, float]) -> None:
        """Take a step of the optimizer along these, with these settings."""
        for group in self.outer.param_groups:
            group.update(settings)
        for name, mean in means.items():
            self._tensors[name].grad = mean.to(self._tensors[name].device)
        self.outer.step()
        self.outer.zero_grad()

    def follow(self, names: Iterable[str]) -> None:
        """Become the parameters."""
        for name in self._weights.kept(names):
            self._tensors[name].copy_(self._weights[name])

    def lead(self, names: Iterable[str], merge: float = 0.0) -> None:
        """Have the parameters become merge x their own + (1 - merge) x the anchors."""
        self._weights.open()
        for name in names:
            own, anchor = self._weights[name], self._tensors[name].to(self._device)
            own.copy_(anchor.lerp(own.to(anchor.dtype), merge) if merge else anchor)

    def lead_all(self) -> None:
        """Of what this rank keeps."""
        self.lead(self._tensors)

    def state_dict(self) -> State:
        """`anchor.<name>` and `outer.<name>.<key>`."""
        anchors = {f"anchor.{name}": anchor.clone() for name, anchor in self._tensors.items()}
        return anchors | outer_state(self.outer, self._tensors)

    def check(self, state: Mapping[str, Any], arriving: Iterable[str] = ()) -> None:
        """Raise ValueError naming what a state lacks, `arriving.<name>` of these included."""
        check_outer_state(self.outer, state)
        expected = {f"anchor.{name}": anchor for name, anchor in self._tensors.items()}
        expected |= {f"arriving.{name}": self._tensors[name] for name in arriving}
        for key, tensor in expected.items():
            if not isinstance(state.get(key), Tensor) or state[key].shape != tensor.shape:
                raise ValueError(f"the local-update state has no {key!r} of shape {tuple(tensor.shape)}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that was checked."""
        for name, anchor in self._tensors.items():
            anchor.copy_(state[f"anchor.{name}"])
        load_outer(self.outer, self._tensors, state)


def _anchor(weights: Tensor, dtype: torch.dtype, home: torch.device) -> Tensor:
    anchor = weights.to(home, dtype, copy=True)
    return anchor.pin_memory() if home.type == "cpu" and weights.is_cuda else anchor
