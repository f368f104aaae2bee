"""Layers that are several in one: where the rows of query, key and value, or of gate and up, lie.

Models store them in three ways: parts one after the other (Phi-3's `qkv_proj`, GPT-2's `c_attn`), per head or
group of heads (`query_key_value` of GPT-NeoX, BLOOM, Falcon, Persimmon), or in slices for tensor parallelism
(CodeGen).
What does not add up to the widths that the configuration says is left whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thinwire.optim.blocks import Blocks

QKV = ("qkv", "qkv_proj", "Wqkv", "W_pack", "c_attn", "att_proj", "in_proj_weight", "in_proj", "query_key_value")
GATE_UP = ("gate_up_proj",)
HEADS = ("q_proj", "k_proj", "v_proj", "query", "key", "value", "q_lin", "k_lin", "v_lin")
"""Layers whose outputs are heads."""


@dataclass(frozen=True)
class Heads:
    """Attention of a model, as its configuration says."""

    queries: int
    """Heads."""
    keys: int
    """Heads that keys and values have, from 1 to `queries`."""
    width: int
    """Of a head."""
    slices: int = 1
    """For tensor parallelism, in which the parts of CodeGen follow each other as query, value, key."""
    keys_with_queries: bool = False
    """Whether a fused layer stores each key and value beside its queries."""

    @classmethod
    def of(cls, config: Any) -> Heads | None:
        """None where the configuration does not say, or there is none."""
        text = getattr(config, "get_text_config", lambda: config)()
        queries = _first(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
        hidden = _first(text, "hidden_size", "n_embd", "d_model")
        if not queries or not hidden:
            return None
        kind = getattr(text, "model_type", "")
        keys = _first(text, "num_key_value_heads") or queries
        if kind == "falcon" and getattr(text, "new_decoder_architecture", False):
            keys = text.num_kv_heads
        elif getattr(text, "multi_query", False):
            keys = 1
        return cls(
            queries,
            keys,
            _first(text, "head_dim") or hidden // queries,
            slices=4 if kind == "codegen" else 1,
            keys_with_queries=kind == "gpt_bigcode" and keys > 1,
        )


def split_of(layer: str, rows: int, heads: Heads | None, *, interleaved: bool = False) -> Blocks | None:
    """How the rows of `layer`, the last part of its name, are several layers; None where they are one."""
    if layer in GATE_UP and rows % 2 == 0:
        return Blocks(repeat=rows // 2, sizes=(1, 1)) if interleaved else Blocks(sizes=(rows // 2, rows // 2))
    if layer not in QKV or heads is None:
        return None
    q, k = heads.queries * heads.width, heads.keys * heads.width
    if rows != q + 2 * k:
        return None
    if heads.slices > 1:
        return Blocks(repeat=heads.slices, sizes=(rows // heads.slices // 3,) * 3)
    if layer == "query_key_value" or heads.keys_with_queries:
        return Blocks(repeat=heads.keys, sizes=(q // heads.keys, heads.width, heads.width))
    return Blocks(sizes=(q, k, k))


def heads_of(layer: str, rows: int, heads: Heads | None) -> Blocks | None:
    """How the rows of `layer` are heads; None where they are none."""
    if heads is None or not 0 < heads.width < rows:
        return None
    q, k = heads.queries * heads.width, heads.keys * heads.width
    if rows in ((q, k) if layer in HEADS else (q + 2 * k,) if layer in QKV else ()):
        return Blocks(repeat=rows // heads.width, sizes=(heads.width,), apart=True)
    return None


def _first(config: Any, *names: str) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
