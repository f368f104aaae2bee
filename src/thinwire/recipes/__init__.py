"""Recipes: whole methods by name, one file each."""

from __future__ import annotations

from thinwire.recipes import (
    ddp,
    ddp_bf16,
    diloco,
    diloco_int8,
    fp8,
    fp8_ef,
    gift_fp8,
    gift_int4,
    gift_nvfp4,
    int4,
    int4_hadamard,
    int4_loco,
    int8,
    local_sgd,
    muloco,
    mxfp4,
    mxfp8,
    nvfp4,
    pier,
    pier_fp8,
    post_local_sgd,
    powersgd,
    powersgd_fp8,
    slowmo,
    streaming_diloco,
)
from thinwire.recipes.recipe import Recipe

__all__ = ["Recipe", "get", "names"]

_RECIPES = {
    recipe.name: recipe
    for recipe in (
        ddp.RECIPE,
        ddp_bf16.RECIPE,
        fp8.RECIPE,
        fp8_ef.RECIPE,
        mxfp8.RECIPE,
        int8.RECIPE,
        nvfp4.RECIPE,
        mxfp4.RECIPE,
        int4.RECIPE,
        int4_hadamard.RECIPE,
        int4_loco.RECIPE,
        powersgd.RECIPE,
        powersgd_fp8.RECIPE,
        gift_fp8.RECIPE,
        gift_nvfp4.RECIPE,
        gift_int4.RECIPE,
        diloco.RECIPE,
        diloco_int8.RECIPE,
        streaming_diloco.RECIPE,
        pier.RECIPE,
        pier_fp8.RECIPE,
        muloco.RECIPE,
        local_sgd.RECIPE,
        post_local_sgd.RECIPE,
        slowmo.RECIPE,
    )
}


def names() -> tuple[str, ...]:
    """Names of all recipes."""
    return tuple(_RECIPES)


def get(name: str) -> Recipe:
    """The recipe called `name`. Raises ValueError listing the names."""
    if name not in _RECIPES:
        raise ValueError(f"unknown recipe {name!r}; choose one of {', '.join(_RECIPES)}")
    return _RECIPES[name]
