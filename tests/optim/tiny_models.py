"""Tiny language models of many architectures, built from configurations without a network."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

COMMON = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
GPT = {"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 4}
GROUPED = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 48}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**GROUPED, "tie_word_embeddings": False},
    "gpt2": GPT,
    "gpt_neox": {**COMMON, "intermediate_size": 48},
    "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "gemma": {**GROUPED, "head_dim": 8},
    "opt": {**COMMON, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "falcon": {**COMMON, "num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt_bigcode": GPT,
    "codegen": {**GPT, "rotary_dim": 4},
    "mixtral": {**GROUPED, "num_local_experts": 3},
    "gpt_oss": {**GROUPED, "num_local_experts": 3, "head_dim": 8, "num_experts_per_tok": 2},
}


def tiny(kind: str, **changes: Any) -> nn.Module:
    """A model of this `model_type`, with random weights."""
    config = CONFIG_MAPPING[kind](**{**CONFIGS[kind], **changes})
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
