"""A real Hugging Face tokenizer directory, trained here on a few lines, without a network."""

from __future__ import annotations

import inspect
from pathlib import Path

import tokenizers
import transformers


def make_tokenizer(
    directory: Path,
    *,
    vocab_size: int = 400,
    end: str | None = "<|endoftext|>",
    truncation: int | None = None,
) -> Path:
    """Byte-level BPE as GPT-2's, saved as `save_pretrained` does."""
    level = tokenizers.pre_tokenizers.ByteLevel
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = level(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end] if end else [],
        initial_alphabet=level.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([inspect.getsource(inspect)], trainer)
    if truncation is not None:
        backend.enable_truncation(truncation)
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end)
    wrapped.save_pretrained(str(directory))
    return directory
