"""Text to token ids: bytes by default, or any Hugging Face tokenizer.

A tokenizer encodes a batch of documents into one flat array and ends each with an end-of-document token.
Text is data: a special token spelled out in a document ("<|endoftext|>") is encoded as its characters.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thinwire.train.data.text import DataError, local_path
from thinwire.usage import first_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenizerInfo:
    """What a model, a checkpoint and a shard directory need to know of a tokenizer; plain JSON values."""

    name: str
    vocab_size: int  # every id is below this
    eos_id: int | None  # ends a document; None: the tokenizer has no such token, documents run together
    pad_id: int
    fingerprint: str  # of the vocabulary: equal for equal tokenizers, wherever they are stored


class Tokenizer(Protocol):
    """Encodes documents and can write itself where `AutoTokenizer.from_pretrained` reads it."""

    info: TokenizerInfo

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The tokens of all texts in one array, and the number of tokens of each text, its end included."""
        ...

    def save(self, directory: Path) -> None: ...


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """`"bytes"`, or a Hugging Face tokenizer by id or directory."""
    if name == "bytes":
        return ByteTokenizer()
    return HuggingFaceTokenizer(name, trust_remote_code=trust_remote_code)


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 for the end of a document (also padding). Vocabulary: 257."""

    END = 256

    def __init__(self) -> None:
        self.info = TokenizerInfo("bytes", vocab_size=257, eos_id=self.END, pad_id=self.END, fingerprint="bytes")

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        data = [text.encode() + b"\0" for text in texts]
        lengths = np.array([len(part) for part in data], dtype=np.int64)
        tokens = np.frombuffer(b"".join(data), dtype=np.uint8).astype(np.uint16)
        tokens[np.cumsum(lengths) - 1] = self.END
        return tokens, lengths

    def save(self, directory: Path) -> None:
        """The same ids as a Hugging Face tokenizer: byte-level BPE without a single merge."""
        import tokenizers
        import transformers

        byte_of = {character: byte for byte, character in _byte_level_alphabet().items()}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_of, merges=[]))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        end = "<|endoftext|>"
        wrapped = transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=end, bos_token=end, pad_token=end
        )
        wrapped.save_pretrained(str(directory))


def _byte_level_alphabet() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


class HuggingFaceTokenizer:
    """Any tokenizer that `AutoTokenizer` loads. Code that comes with one runs only if asked for."""

    def __init__(self, name: str, *, trust_remote_code: bool = False) -> None:
        import transformers

        directory = local_path(name)
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                str(directory) if directory.is_dir() else name, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # the tokenizer libraries raise plain Exception too
            raise DataError(f"data.tokenizer: can't load {name!r}: {first_line(error)}") from error
        special = [self._tokenizer.eos_token_id, self._tokenizer.sep_token_id, self._tokenizer.bos_token_id]
        eos = next((token for token in special if token is not None), None)
        if eos is None:
            logger.warning("tokenizer %s has no end-of-text token: documents run into each other", name)
        padding = [self._tokenizer.pad_token_id, eos, 0]
        vocabulary = self._tokenizer.get_vocab()
        self.info = TokenizerInfo(
            name=name,
            vocab_size=max(vocabulary.values()) + 1,
            eos_id=eos,
            pad_id=next(token for token in padding if token is not None),
            fingerprint=_fingerprint(self._tokenizer, vocabulary),
        )
        self._dtype = token_dtype(self.info.vocab_size)

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            padding=False,
            truncation=False,  # a tokenizer.json may come with a limit of its own
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        if self.info.eos_id is not None:
            for document in ids:
                document.append(self.info.eos_id)
        lengths = np.array([len(document) for document in ids], dtype=np.int64)
        tokens = np.fromiter(itertools.chain.from_iterable(ids), dtype=self._dtype, count=int(lengths.sum()))
        return tokens, lengths

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(str(directory))


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that holds every token id."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _fingerprint(tokenizer: Any, vocabulary: dict[str, int]) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules.pop("truncation", None)  # set per call
        rules.pop("padding", None)
    else:
        rules = vocabulary
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()
