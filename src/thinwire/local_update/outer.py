"""The outer optimizer, of the anchors: made, measured, and saved by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thinwire.local_update.method import MakeOptimizer
from thinwire.reducers.reducer import State


def make_outer(make: MakeOptimizer, anchors: Mapping[str, Tensor]) -> Optimizer:
    """Of nothing on a rank that holds no part of a small sharded model. Raises ValueError for what is no
    optimizer, or one whose step needs a closure."""
    outer = make(list(anchors.values()) or [torch.zeros(0)])
    if not isinstance(outer, Optimizer) or isinstance(outer, torch.optim.LBFGS):
        raise ValueError(f"outer must make an optimizer whose step needs no closure, got {type(outer).__name__}")
    return outer


def outer_bytes(outer: Optimizer) -> int:
    """Of the tensors that it keeps."""
    values = [value for state in outer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def outer_state(outer: Optimizer, anchors: Mapping[str, Tensor]) -> State:
    """`outer.<name>.<key>`, and what it takes to know that all of them are there."""
    saved = outer.state_dict()
    kept = {
        f"{name}.{key}": value.clone() if isinstance(value, Tensor) else value
        for index, name in enumerate(anchors)
        for key, value in saved["state"].get(index, {}).items()
    }
    return {
        "outer_class": type(outer).__name__,
        "outer_groups": [
            {key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]
        ],
        "outer_keys": sorted(kept),
        **{f"outer.{key}": value for key, value in kept.items()},
    }


def check_outer_state(outer: Optimizer, state: Mapping[str, Any]) -> None:
    """Raise ValueError naming what is missing, or an optimizer of another class."""
    if state.get("outer_class") != type(outer).__name__:
        raise ValueError(
            f"the local-update state has outer_class {state.get('outer_class')!r}, "
            f"expected {type(outer).__name__!r}"
        )
    if missing := [key for key in state["outer_keys"] if f"outer.{key}" not in state]:
        raise ValueError(f"the local-update state has no 'outer.{missing[0]}' of the outer optimizer")


def load_outer(outer: Optimizer, anchors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Restore what `outer_state` returned, into the optimizer's own order."""
    groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(state["outer_groups"], outer.state_dict()["param_groups"])
    ]
    states: dict[int, dict[str, Any]] = {}
    for index, name in enumerate(anchors):
        prefix = f"outer.{name}."
        if found := {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}:
            states[index] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in found.items()}
    outer.load_state_dict({"state": states, "param_groups": groups})
