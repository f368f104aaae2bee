"""The model of a run: a Hugging Face causal language model, from a preset or by id or directory.

Presets are configurations with random weights, drawn from the run's seed, so every rank starts from the same
model; the vocabulary is the tokenizer's. Any other name is loaded with its weights. Nothing that comes with a
model is executed unless `model.trust_remote_code` asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from thinwire.train.config import ConfigError, ModelConfig
from thinwire.train.data.text import first_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preset:
    """An architecture and its sizes."""

    family: Literal["llama", "gpt2"]
    width: int
    layers: int
    heads: int
    hidden: int  # of the feed-forward layers
    longest: int  # positions
    tied: bool  # input and output embedding are one matrix


# The large Llamas are named by their parameters without the embeddings.
PRESETS: Mapping[str, Preset] = {
    "llama-tiny": Preset("llama", width=128, layers=4, heads=4, hidden=344, longest=2048, tied=True),
    "llama-small": Preset("llama", width=384, layers=8, heads=6, hidden=1024, longest=2048, tied=True),
    "llama-300m": Preset("llama", width=1024, layers=24, heads=16, hidden=2736, longest=4096, tied=False),
    "llama-600m": Preset("llama", width=1280, layers=32, heads=20, hidden=3456, longest=4096, tied=False),
    "gpt2": Preset("gpt2", width=768, layers=12, heads=12, hidden=3072, longest=1024, tied=True),
    "gpt2-xl": Preset("gpt2", width=1600, layers=48, heads=25, hidden=6400, longest=1024, tied=True),
}


@dataclass(frozen=True)
class Vocabulary:
    """What a model must know of the tokenizer."""

    size: int
    eos_id: int | None = None
    pad_id: int | None = None


def longest_sequence(config: ModelConfig) -> int | None:
    """The positions that the model has, None where it does not say. Loads the configuration, no weights."""
    if config.name in PRESETS:
        return PRESETS[config.name].longest
    found = _read_config(config)
    longest = getattr(found, "max_position_embeddings", None) or getattr(found, "n_positions", None)
    return int(longest) if longest else None


def build_model(config: ModelConfig, vocabulary: Vocabulary, *, seed: int) -> nn.Module:
    """The model in float32 on the CPU, in training mode."""
    import transformers

    loads = config.name not in PRESETS and not config.random_weights
    if loads:
        model = _load(config)
        _check_vocabulary(config.name, model.get_input_embeddings().num_embeddings, vocabulary)
    else:
        described = _describe(config, vocabulary)
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            described, dtype=torch.float32, trust_remote_code=config.trust_remote_code
        )
    model.config.use_cache = False
    if config.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    module: nn.Module = model
    return module


def identity(model: nn.Module) -> dict[str, Any]:
    """What must be equal between a checkpoint's model and this one: architecture and every parameter's shape."""
    described: Any = model.config
    keep = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    return {
        "type": str(described.model_type),
        **{key: getattr(described, key, None) for key in keep},
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _describe(config: ModelConfig, vocabulary: Vocabulary) -> Any:
    """The Hugging Face configuration of a preset, or of an id or directory whose weights are not wanted."""
    import transformers

    special = {
        "bos_token_id": vocabulary.eos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
    }
    if config.name not in PRESETS:
        found = _read_config(config)
        for key, value in {"vocab_size": vocabulary.size, **special}.items():
            setattr(found, key, value)
        return found
    p = PRESETS[config.name]
    if p.family == "gpt2":
        return transformers.GPT2Config(
            vocab_size=vocabulary.size,
            n_positions=p.longest,
            n_embd=p.width,
            n_layer=p.layers,
            n_head=p.heads,
            n_inner=p.hidden,
            tie_word_embeddings=p.tied,
            **special,
        )
    return transformers.LlamaConfig(
        vocab_size=vocabulary.size,
        hidden_size=p.width,
        intermediate_size=p.hidden,
        num_hidden_layers=p.layers,
        num_attention_heads=p.heads,
        num_key_value_heads=p.heads,
        max_position_embeddings=p.longest,
        rms_norm_eps=1e-5,
        tie_word_embeddings=p.tied,
        **special,
    )


def _read_config(config: ModelConfig) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(
            _location(config.name), trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_not_loadable(config.name, error)) from error


def _load(config: ModelConfig) -> Any:
    import transformers

    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            _location(config.name),
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,  # a pickled state dict is never read
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(_not_loadable(config.name, error)) from error


def _location(name: str) -> str:
    directory = Path(name).expanduser()
    return str(directory) if directory.is_dir() else name


def _not_loadable(name: str, error: Exception) -> str:
    presets = ", ".join(PRESETS)
    return (
        f"model.name: {name!r} is neither a preset ({presets}) nor a loadable model id or directory: "
        f"{first_line(error)}"
    )


def _check_vocabulary(name: str, rows: int, vocabulary: Vocabulary) -> None:
    if vocabulary.size > rows:
        raise ConfigError(
            f"data.tokenizer: its {vocabulary.size} tokens do not fit the {rows} embedding rows of model "
            f"{name!r}; use the model's own tokenizer, or model.random_weights"
        )
