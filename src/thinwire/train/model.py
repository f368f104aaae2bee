"""The model of a run: a Hugging Face causal language model, from a preset or by id or directory.

Presets are configurations with random weights, drawn from the run's seed, so every rank starts from the same
model; the vocabulary is the tokenizer's. Any other name is loaded with its weights. Nothing that comes with a
model is executed unless `model.trust_remote_code` asks for it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from thinwire.train.config import ConfigError, ModelConfig
from thinwire.train.data.text import local_path
from thinwire.usage import first_line, shown

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
    "llama-nano": Preset("llama", width=64, layers=2, heads=4, hidden=160, longest=2048, tied=True),
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

    if config.name in PRESETS:
        p = PRESETS[config.name]
        llama = {"intermediate_size": p.hidden, "rms_norm_eps": 1e-5}
        described = transformers.AutoConfig.for_model(
            p.family,
            hidden_size=p.width,
            num_hidden_layers=p.layers,
            num_attention_heads=p.heads,
            max_position_embeddings=p.longest,
            tie_word_embeddings=p.tied,
            **({"n_inner": p.hidden} if p.family == "gpt2" else llama),
        )
    else:
        described = _read_config(config)
    described.vocab_size = vocabulary.size
    described.bos_token_id = described.eos_token_id = vocabulary.eos_id
    described.pad_token_id = vocabulary.pad_id
    return described


def _read_config(config: ModelConfig) -> Any:
    import transformers

    with _loading(config.name) as location:
        return transformers.AutoConfig.from_pretrained(location, trust_remote_code=config.trust_remote_code)


def _load(config: ModelConfig) -> Any:
    import transformers

    with _loading(config.name) as location:
        return transformers.AutoModelForCausalLM.from_pretrained(
            location,
            dtype=torch.float32,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,  # a pickled state dict is never read
        )


@contextmanager
def _loading(name: str) -> Iterator[str]:
    """Where a model id or directory is; what goes wrong with it is one line that also names the presets."""
    directory = local_path(name)
    try:
        if not directory.is_dir():
            _look_up(name)
        yield str(directory) if directory.is_dir() else name
    except (OSError, ValueError, KeyError) as error:
        close = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.8)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"model.name: {shown(name)} is neither a preset ({', '.join(PRESETS)}) nor a loadable model id or "
            f"directory: {first_line(error)}{hint}"
        ) from error


def _look_up(name: str) -> None:
    """Ask for a model that was never downloaded once: `from_pretrained` asks for half a minute, file by file."""
    import huggingface_hub

    if isinstance(huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        huggingface_hub.HfApi().model_info(name, timeout=10)
    except Exception as error:  # of its HTTP library too, which is not one of ours
        raise OSError(f"asked the Hugging Face hub: {first_line(error)}") from error


def _check_vocabulary(name: str, rows: int, vocabulary: Vocabulary) -> None:
    if vocabulary.size > rows:
        raise ConfigError(
            f"data.tokenizer: its {vocabulary.size} tokens do not fit the {rows} embedding rows of model "
            f"{name!r}; use the model's own tokenizer, or model.random_weights"
        )
