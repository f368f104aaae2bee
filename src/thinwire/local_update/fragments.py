"""Cutting a model's parameters into fragments that are averaged at different times."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from thinwire.local_update.method import Fragments, Order

logger = logging.getLogger(__name__)

BALANCED = 1.1
"""Largest fragment / mean, above which layers are taken apart."""

_LAYER = re.compile(r"(.*?\.)?\d+(?=\.)")  # up to the first number: `model.layers.3`


def cut(sizes: Mapping[str, int], fragments: Fragments, order: Order) -> list[list[str]]:
    """The names of each fragment's parameters, in the order of the model. `sizes`: bytes of each.

    Layers stay whole and are dealt out in order; what belongs to none goes where least is. If fragments of whole
    layers differ by more than a tenth from their mean, single parameters are dealt out, the largest first.
    Raises ValueError naming what does not fit.
    """
    if not isinstance(fragments, int):
        return _named(sizes, fragments)
    if fragments > len(sizes):
        raise ValueError(f"fragments: {fragments} of {len(sizes)} parameters; choose at most that many")
    dealt = _by_layers(sizes, fragments, order)
    if _imbalance(sizes, dealt, fragments) > BALANCED:
        dealt = _by_size(sizes, fragments)
    if (worst := _imbalance(sizes, dealt, fragments)) > BALANCED:
        logger.warning("the largest fragment has %.2f times the mean bytes: a parameter is not cut", worst)
    return [[name for name in sizes if dealt[name] == index] for index in range(fragments)]


def _named(sizes: Mapping[str, int], fragments: tuple[tuple[str, ...], ...]) -> list[list[str]]:
    patterns = [(index, pattern) for index, fragment in enumerate(fragments) for pattern in fragment]
    dealt: dict[str, int] = {}
    for index, pattern in patterns:
        matching = [name for name in sizes if fnmatchcase(name, pattern)]
        if not matching:
            raise ValueError(f"fragments: no parameter is called {pattern!r}; there are {', '.join(sizes)}")
        for name in matching:
            if dealt.setdefault(name, index) != index:
                raise ValueError(f"fragments: {name!r} belongs to fragments {dealt[name]} and {index}")
    if missing := [name for name in sizes if name not in dealt]:
        raise ValueError(f"fragments: {missing[0]!r} belongs to none; name it or match it with a glob")
    return [[name for name in sizes if dealt[name] == index] for index in range(len(fragments))]


def _by_layers(sizes: Mapping[str, int], fragments: int, order: Order) -> dict[str, int]:
    """The fragment of each parameter."""
    layers = {name: match[0] for name in sizes if (match := _LAYER.match(name))}
    distinct = list(dict.fromkeys(layers.values()))
    index = {
        layer: number % fragments if order == "strided" else number * fragments // len(distinct)
        for number, layer in enumerate(distinct)
    }
    dealt = {name: index[layer] for name, layer in layers.items()}
    return dealt | _by_size(
        {name: n for name, n in sizes.items() if name not in dealt}, fragments, _loads(sizes, dealt, fragments)
    )


def _by_size(sizes: Mapping[str, int], fragments: int, loads: list[int] | None = None) -> dict[str, int]:
    """The largest first to the fragment with least."""
    loads = [0] * fragments if loads is None else loads
    dealt = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        dealt[name] = loads.index(min(loads))
        loads[dealt[name]] += sizes[name]
    return dealt


def _loads(sizes: Mapping[str, int], dealt: Mapping[str, int], fragments: int) -> list[int]:
    loads = [0] * fragments
    for name, index in dealt.items():
        loads[index] += sizes[name]
    return loads


def _imbalance(sizes: Mapping[str, int], dealt: Mapping[str, int], fragments: int) -> float:
    """The largest fragment's bytes / the mean."""
    loads = _loads(sizes, dealt, fragments)
    return max(loads) * fragments / max(sum(loads), 1)
