"""What a parameter is to an optimizer, by the module that has it, by what it is tied to and by its name.

Orthonormalised updates are for the weights of hidden layers. Embeddings and the output head, whose rows are
looked up or compete one by one, train badly under them; vectors have nothing to orthonormalise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from thinwire.optim.blocks import Blocks
from thinwire.optim.fused import Heads, heads_of, split_of

Kind: TypeAlias = Literal["matrix", "embedding", "head", "vector"]
KINDS: tuple[Kind, ...] = ("matrix", "embedding", "head", "vector")

_HEADS = re.compile(
    r"^((.*\.)?(lm_head|embed_out|unembed\w*|score|classifier)|head|output|output_projection|decoder)$"
)
_EMBEDDINGS = re.compile(r"^(\w*embed\w*|wte|wpe|tok_emb|pos_emb|position_emb\w*)$")
_MATRICES = re.compile(r"^(weight|\w*proj|\w*proj_weight|weight_[ih]h_l\d+\w*)$")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True)
class Decision:
    """About one parameter."""

    name: str
    parameter: nn.Parameter
    kind: Kind
    blocks: Blocks
    """Of a matrix."""
    why: str


def decide(model: nn.Module, *, split_fused: bool, split_heads: bool) -> Iterator[Decision]:
    """For every trained parameter, in the model's order; a tied one once, under its first name."""
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    heads = Heads.of(getattr(model, "config", None))
    owners = _owners(model)
    output = _output_layer(model)
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        path, module, leaf = owners[name]
        layer = leaf if leaf not in ("weight", "bias") else path.rpartition(".")[2]
        if id(parameter) in embedded:
            tied = output is not None and output is parameter
            decision = _as("embedding", "an embedding" + (", tied to the output head" if tied else ""))
        elif output is not None and output is parameter:
            decision = _as("head", "the output head")
        else:
            decision = _decide(module, path, layer, leaf, parameter)
        kind, blocks, why = decision
        if kind == "matrix":
            blocks, more = _finer(blocks, module, layer, parameter, heads, split_fused, split_heads)
            why += more
        yield Decision(_plain(name), parameter, kind, blocks, why)


def _decide(module: nn.Module, path: str, layer: str, leaf: str, parameter: Tensor) -> tuple[Kind, Blocks, str]:
    wide = [size for size in parameter.shape if size != 1]
    if parameter.numel() == 0 or len(wide) < 2 or parameter.ndim < 2:
        return _as("vector", "fewer than two dimensions above 1")
    if leaf.endswith("bias") or "Norm" in type(module).__name__:
        return _as("vector", "a bias or norm")
    if isinstance(module, _ConvNd) and leaf == "weight":
        if isinstance(module, _ConvTransposeNd) or parameter.shape[1] == 1:
            return _as("vector", "a convolution of single channels or a transposed one")
        blocks = Blocks(repeat=module.groups, apart=module.groups > 1)
        return "matrix", blocks, "a convolution"
    if isinstance(module, nn.Linear) and leaf == "weight":
        return _as("head", "a linear layer named as a head") if _HEADS.match(path) else _as("matrix", "linear")
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and parameter.ndim == 2:
        return "matrix", Blocks(transposed=True), "a Conv1D, stored transposed"
    if _EMBEDDINGS.match(layer):
        return _as("embedding", "named as an embedding")
    if not _MATRICES.match(leaf) or parameter.ndim > 3:
        return _as("vector", f"{leaf!r} of {type(module).__name__} is no layer known here")
    if parameter.ndim == 3:
        transposed = _are_transposed(module, leaf, parameter)
        return "matrix", Blocks(stacked=True, transposed=transposed), "a stack of matrices"
    return _as("matrix", f"a weight of {type(module).__name__}")


def _as(kind: Kind, why: str) -> tuple[Kind, Blocks, str]:
    return kind, Blocks(), why


def _finer(
    blocks: Blocks,
    module: nn.Module,
    layer: str,
    parameter: Tensor,
    heads: Heads | None,
    split_fused: bool,
    split_heads: bool,
) -> tuple[Blocks, str]:
    """The matrices within, and what to say of them."""
    if blocks.repeat > 1:
        return blocks, ""
    rows = parameter.shape[-1] if blocks.transposed else parameter.shape[-2]
    if isinstance(module, nn.MultiheadAttention):
        heads = Heads(module.num_heads, module.num_heads, module.head_dim)
    finer, more = heads_of(layer, rows, heads) if split_heads else None, ", by heads"
    if finer is None and split_fused:
        interleaved = getattr(module, "is_concatenated", True) is False
        finer, more = split_of(layer, rows, heads, interleaved=interleaved), ", of several layers"
    if finer is None:
        return blocks, ""
    return replace(blocks, repeat=finer.repeat, sizes=finer.sizes, apart=finer.apart), more


def _are_transposed(module: nn.Module, leaf: str, parameter: Tensor) -> bool:
    """Whether experts are stored as (inputs, outputs)."""
    if isinstance(said := getattr(module, "is_transposed", None), bool) and said:
        return True
    hidden = getattr(module, "hidden_size", getattr(module, "hidden_dim", None))
    outputs, inputs = parameter.shape[-2:]
    if leaf.startswith("down"):
        return bool(inputs == hidden and outputs != hidden)
    return bool(outputs == hidden and inputs != hidden)


def _owners(model: nn.Module) -> dict[str, tuple[str, nn.Module, str]]:
    """By a parameter's name: path and module that have it, and its name there."""
    found = {}
    for path, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False):
            found[f"{path}.{leaf}" if path else leaf] = (_plain(path), module, leaf)
    return found


def _output_layer(model: nn.Module) -> Any:
    """The weight of the output head, where the model says which it is."""
    ask = getattr(model, "get_output_embeddings", None)
    layer = ask() if callable(ask) else None
    return getattr(layer, "weight", None)


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
