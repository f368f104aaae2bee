"""Batches of token sequences, addressed by sample id.

Text becomes tokens, one array per split with an end-of-document token after each document. A sample is a
stretch of that array, so `batch(sample_ids)` is a pure function and every rank can fetch any sample: which
rank takes which is the sampler's business, and nothing here has state to save.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.train.data.shards import open_shards
from thinwire.train.data.store import MemorySink, TokenSink, TokenStore
from thinwire.train.data.text import (
    Corpus,
    DataError,
    from_dataset,
    from_files,
    local_path,
    split,
    standard_library,
)
from thinwire.train.data.tokenizers import Tokenizer, TokenizerInfo, load_tokenizer
from thinwire.usage import out_of_range

__all__ = ["IGNORED", "Batch", "DataConfig", "DataError", "TokenData", "build_data"]

logger = logging.getLogger(__name__)

IGNORED = -100  # the label of a position that has no next token to predict
_MANY_TOKENS = 1 << 29  # from here on every rank would hold over a gigabyte


@dataclass(frozen=True)
class DataConfig:
    """What to train on."""

    files: tuple[str, ...] = ()
    """Text, JSONL and parquet files, directories and globs; none: the Python standard library's sources."""
    dataset: str | None = None
    """A `datasets` name or a local directory of one, instead of files."""
    dataset_config: str | None = None
    """The configuration of `dataset`, where it has several."""
    dataset_split: str = "train"
    """The split of `dataset` to read. Validation text is held out of it."""
    text_key: str = "text"
    """The column that holds the text, in JSONL, parquet and `dataset`."""
    shards: str | None = None
    """A directory that `thinwire tokenize` wrote, instead of text."""
    tokenizer: str = "bytes"
    """"bytes", or the id or directory of a Hugging Face tokenizer. Shards come with their own."""
    trust_remote_code: bool = False
    """Let a tokenizer from the Hub run the code that comes with it."""
    sequence_length: int = 256
    """Tokens per sample."""
    pack: bool = True
    """Cut the concatenated documents into full sequences; off: each document by itself, padded."""
    validation_fraction: float = 0.05
    """Share of the files or documents that a hash holds out for validation. Fixed in shards."""
    validation_sequences: int = 64
    """At most this many samples, spread over the validation text, are evaluated."""

    def check(self) -> None:
        """Refuse values that can't work, by key, before anything is read."""
        sources = {"files": self.files, "dataset": self.dataset, "shards": self.shards}
        given = [f"data.{key}" for key, value in sources.items() if value]
        if len(given) > 1:
            raise DataError(f"{' and '.join(given)} are both set; give one source of text")
        if self.dataset_config and not self.dataset:
            raise DataError("data.dataset_config is set, but data.dataset is not")
        for key, value, least, most in (
            ("sequence_length", self.sequence_length, 2, 2**24),
            ("validation_fraction", self.validation_fraction, 1e-6, 1 - 1e-6),
            ("validation_sequences", self.validation_sequences, 1, 2**40),
        ):
            if wrong := out_of_range(f"data.{key}", value, least, most):
                raise DataError(wrong)


@dataclass(frozen=True)
class Batch:
    """Samples of equal length. Labels are the inputs; the model shifts them by one."""

    input_ids: Tensor  # (batch, sequence_length) int64
    attention_mask: Tensor | None  # the same shape, 1 for tokens and 0 for padding; None: no padding
    labels: Tensor  # the same shape; -100 on padding
    sample_ids: Tensor  # (batch,) int64


class TokenData:
    """One split as samples 0 to num_sequences - 1."""

    def __init__(
        self,
        store: TokenStore,
        tokenizer: TokenizerInfo,
        corpus_hash: str,
        *,
        sequence_length: int,
        num_sequences: int,
        span: Callable[[int], tuple[int, int]],
        padded: bool,
    ) -> None:
        self.tokenizer, self.corpus_hash = tokenizer, corpus_hash
        self.sequence_length, self.num_sequences = sequence_length, num_sequences
        self.num_tokens = store.num_tokens
        self.bytes_per_token = store.text_bytes / store.num_tokens  # divides nats per token: nats per byte
        self._store, self._span, self._padded = store, span, padded

    def batch(self, sample_ids: Sequence[int]) -> Batch:
        """These samples, in this order."""
        ids = torch.full((len(sample_ids), self.sequence_length), self.tokenizer.pad_id)  # int64
        mask = torch.zeros_like(ids)
        for row, sample in enumerate(sample_ids):
            if not 0 <= sample < self.num_sequences:
                raise IndexError(f"sample {sample} of {self.num_sequences}")
            start, stop = self._span(sample)
            ids[row, : stop - start] = torch.from_numpy(self._read(start, stop))
            mask[row, : stop - start] = 1
        labels = ids.masked_fill(mask == 0, IGNORED)
        return Batch(ids, mask if self._padded else None, labels, torch.tensor(sample_ids, dtype=torch.int64))

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        tokens = self._store.read(start, stop)
        largest = int(tokens.max())
        if largest >= self.tokenizer.vocab_size:
            raise DataError(
                f"data.shards: {self._store.file_of(start)} holds token {largest}, "
                f"but the vocabulary ends at {self.tokenizer.vocab_size - 1}: it is damaged"
            )
        return tokens


def build_data(config: DataConfig, *, seed: int) -> tuple[TokenData, TokenData]:
    """(training, validation) data. The same config gives the same tokens on every rank.

    Tokens that don't fill a last training sequence are dropped; `seed` decides how many of them at the front,
    so that runs with different seeds cut the text in different places.
    """
    config.check()
    if config.shards is not None:
        shards = open_shards(local_path(config.shards))
        _check_tokenizer(config, shards.tokenizer)
        tokenizer, corpus_hash = shards.tokenizer, shards.corpus_hash
        train, validation = shards.train, shards.validation
    else:
        encoder = load_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code)
        sinks = MemorySink(), MemorySink()
        corpus_hash = encode_corpus(open_corpus(config), encoder, *sinks, fraction=config.validation_fraction)
        tokenizer, train, validation = encoder.info, sinks[0].store(), sinks[1].store()
        if train.num_tokens > _MANY_TOKENS:
            logger.warning(
                "%d tokens in the memory of every rank; `thinwire tokenize` maps them", train.num_tokens
            )
    common: dict[str, Any] = {"tokenizer": tokenizer, "corpus_hash": corpus_hash, "config": config}
    return (
        _samples(train, **common, offset=seed % (train.num_tokens % config.sequence_length + 1)),
        _samples(validation, **common, most=config.validation_sequences),
    )


def open_corpus(config: DataConfig) -> Corpus:
    """The text that a configuration names."""
    if config.dataset:
        return from_dataset(
            config.dataset, config=config.dataset_config, split=config.dataset_split, text_key=config.text_key
        )
    return from_files(config.files, text_key=config.text_key) if config.files else standard_library()


def encode_corpus(
    corpus: Corpus,
    tokenizer: Tokenizer,
    train: TokenSink,
    validation: TokenSink,
    *,
    fraction: float,
    progress: Callable[[int], None] = lambda text_bytes: None,
    batch_characters: int = 1 << 20,
) -> str:
    """Tokenise every document into its split's sink, in batches; the hash of the corpus."""
    digest = hashlib.sha256()
    sinks: tuple[TokenSink, TokenSink] = (train, validation)
    waiting: tuple[list[str], list[str]] = ([], [])
    characters = [0, 0]

    def flush(which: int) -> None:
        texts = waiting[which]
        if texts:
            text_bytes = sum(len(text.encode()) for text in texts)
            sinks[which].append(*tokenizer.encode(texts), text_bytes)
            progress(text_bytes)
            texts.clear()
            characters[which] = 0

    for document, held_out in split(corpus, fraction=fraction, digest=digest):
        waiting[held_out].append(document.text)
        characters[held_out] += len(document.text)
        if characters[held_out] >= batch_characters:
            flush(held_out)
    flush(False)
    flush(True)
    return digest.hexdigest()


def check_length(num_tokens: int, sequence_length: int, *, validation: bool) -> None:
    """Refuse a split that doesn't fill one sequence."""
    if num_tokens >= sequence_length:
        return
    remedy = "raise data.validation_fraction" if validation else "give more text"
    raise DataError(
        f"data.sequence_length: the {'validation' if validation else 'training'} text has {num_tokens} "
        f"tokens and one sequence needs {sequence_length}; lower data.sequence_length or {remedy}"
    )


def _samples(
    store: TokenStore,
    *,
    tokenizer: TokenizerInfo,
    corpus_hash: str,
    config: DataConfig,
    offset: int = 0,
    most: int | None = None,
) -> TokenData:
    """Cut a split into samples; for validation at most `most` of them, evenly spread (offset 0)."""
    length = config.sequence_length
    if config.pack:
        check_length(store.num_tokens, length, validation=most is not None)
        available = store.num_tokens // length

        def span(sample: int) -> tuple[int, int]:
            return offset + sample * length, offset + (sample + 1) * length
    else:
        starts, stops = _document_spans(store.ends, length)
        available = len(starts)
        if not available:
            check_length(store.num_tokens, 2, validation=most is not None)

        def span(sample: int) -> tuple[int, int]:
            return int(starts[sample]), int(stops[sample])

    count = available if most is None else min(most, available)
    return TokenData(
        store,
        tokenizer,
        corpus_hash,
        sequence_length=length,
        num_sequences=count,
        span=span if most is None else lambda sample: span(sample * available // count),
        padded=not config.pack,
    )


def _document_spans(ends: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and stop of each document's stretches of at most `length` tokens, of two or more."""
    begins = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    stretches = -(-(ends - begins) // length)  # per document
    first = np.cumsum(stretches) - stretches
    number = np.arange(stretches.sum()) - np.repeat(first, stretches)  # of the stretch in its document
    starts = np.repeat(begins, stretches) + number * length
    stops = np.minimum(starts + length, np.repeat(ends, stretches))
    useful = stops - starts >= 2  # one token alone predicts nothing
    return starts[useful], stops[useful]


def _check_tokenizer(config: DataConfig, info: TokenizerInfo) -> None:
    """Shards bring their tokenizer; another one that was asked for is a mistake."""
    if config.tokenizer in ("bytes", info.name):
        return
    asked = load_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code).info
    if asked.fingerprint != info.fingerprint:
        raise DataError(
            f"data.tokenizer is {config.tokenizer!r}, but {config.shards} was written with {info.name!r}; "
            "leave data.tokenizer out or tokenize again"
        )
