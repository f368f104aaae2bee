"""`param_groups`: a model's parameters as groups for an optimizer: matrices, embeddings, the output head, vectors.

The groups are ordinary ones of torch, with names; those of matrices also say how each is cut (`blocks.py`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor, nn

from thinwire.optim.blocks import Blocks
from thinwire.optim.layers import KINDS, Decision, Kind, decide

logger = logging.getLogger(__name__)

Kinds: TypeAlias = Mapping[str, Kind] | Callable[[str, Tensor], Kind | None]
"""Globs over names, the first that matches wins; or a function of name and parameter, None: as it would be."""


class ParamGroups(list[dict[str, Any]]):
    """Groups for an optimizer: `params` (pairs of name and parameter), `kind`, and for matrices how they are cut.
    `print(groups)` shows a line per parameter, with the reason."""

    def __init__(self, groups: Sequence[dict[str, Any]] = (), decisions: Sequence[Decision] = ()) -> None:
        super().__init__(groups)
        self.decisions = tuple(decisions)

    def __str__(self) -> str:
        lines = [("parameter", "shape", "kind", "matrices", "because")]
        for each in self.decisions:
            matrices = _matrices(each) if each.kind == "matrix" else ""
            lines.append((each.name, _times(each.parameter.shape), each.kind, matrices, each.why))
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join("  ".join(cell.ljust(n) for cell, n in zip(line, widths)).rstrip() for line in lines)


def param_groups(
    model: nn.Module,
    *,
    kinds: Kinds | None = None,
    split_fused: bool = True,
    split_heads: bool = False,
) -> ParamGroups:
    """The trained parameters of `model` as groups of one kind each: "matrix" (hidden layers), "embedding", "head"
    and "vector" (biases, norms, and whatever is no layer known here).

    Decided by the type of the module that has a parameter, by what it is tied to and by its name; `print` the
    result to see each decision. `kinds` overrules it: globs over names, `{"*.router.weight": "vector"}`, or a
    function of name and parameter. With `split_fused` the query, key and value of a fused layer, and gate and up,
    are matrices of their own; with `split_heads` each attention head is one.

    `model` may be wrapped in DDP or compiled. Raises ValueError for a glob that matches nothing, a kind that is
    none, or a matrix of fewer than two dimensions.
    """
    decisions = [
        _overrule(decision, kinds) for decision in decide(model, split_fused=split_fused, split_heads=split_heads)
    ]
    if kinds is not None and not callable(kinds):
        for glob in kinds:
            if not any(fnmatchcase(decision.name, glob) for decision in decisions):
                raise ValueError(f"param_groups: kinds has {glob!r}, which matches no trained parameter")
    groups: dict[tuple[Kind, Blocks], dict[str, Any]] = {}
    for kind in KINDS:
        for each in decisions:
            if each.kind == kind:
                keys = each.blocks.keys() if kind == "matrix" else {}
                group = groups.setdefault((kind, each.blocks), {"params": [], "kind": kind, **keys})
                group["params"].append((each.name, each.parameter))
    counts = Counter(each.kind for each in decisions)
    logger.info("param_groups: %s", ", ".join(f"{count} of kind {kind}" for kind, count in counts.items()))
    return ParamGroups(list(groups.values()), decisions)


def _overrule(decision: Decision, kinds: Kinds | None) -> Decision:
    name, chosen = decision.name, None
    if callable(kinds):
        chosen = kinds(name, decision.parameter)
    elif kinds is not None:
        chosen = next((kind for glob, kind in kinds.items() if fnmatchcase(name, glob)), None)
    if chosen is not None and chosen not in KINDS:
        raise ValueError(f"param_groups: kinds gives {chosen!r} for {name!r}; the kinds are {', '.join(KINDS)}")
    if chosen is not None and chosen != decision.kind:
        decision = replace(decision, kind=chosen, blocks=Blocks(), why="you said so")
    if decision.kind == "matrix":
        decision.blocks.check(name, decision.parameter.shape)
    return decision


def _matrices(decision: Decision) -> str:
    """Such as "3 of 64 x 64"."""
    parts = decision.blocks.cut(decision.parameter.detach())
    counts: Counter[str] = Counter()
    for part in parts:
        counts[_times(part.shape[1:])] += part.shape[0]
    return ", ".join(f"{count} of {shape}" for shape, count in counts.items())


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "1"
