"""Tokens on disk: the directory that `thinwire tokenize` writes and training memory-maps.

    DIR/index.json              format, version, tokenizer, corpus hash; per split: counts and file names
    DIR/train-00000.bin         a 64-byte header, then tokens, little endian
    DIR/train-documents.bin     the same header, then where each document ends (int64, counted in tokens)
    DIR/validation-...

A header holds magic, version, item size, item count and checksums of itself and of the data, so a file that
was cut short, mixed up or never ours is refused by name. Nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from thinwire.train.data.store import TokenStore
from thinwire.train.data.text import DataError
from thinwire.train.data.tokenizers import TokenizerInfo, token_dtype
from thinwire.train.files import write_synced
from thinwire.usage import first_line

FORMAT, VERSION = "thinwire-tokens", 1
SPLITS = ("train", "validation")
SHARD_TOKENS = 1 << 27

_MAGIC = b"THINWIRE"
_FIELDS = struct.Struct("<8sIIQI")  # magic, version, item size, item count, crc32 of the data
_HEADER_BYTES = 64  # the fields, zeros, and the crc32 of all that in the last four bytes
_ENDS: np.dtype[Any] = np.dtype("<i8")


class ShardSink:
    """Writes tokens to numbered files of one split, a new one whenever one is full."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._directory, self._split, self._dtype, self._shard_tokens = directory, split, dtype, shard_tokens
        self._files: list[_ArrayFile] = []
        self._documents = _ArrayFile(directory / f"{split}-documents.bin", _ENDS)
        self.num_tokens = 0
        self._text_bytes = 0

    def append(self, tokens: NDArray[Any], lengths: NDArray[np.int64], text_bytes: int) -> None:
        self._documents.write(self.num_tokens + np.cumsum(lengths))
        self.num_tokens += len(tokens)
        self._text_bytes += text_bytes
        while len(tokens):
            if not self._files or self._files[-1].count == self._shard_tokens:
                self._next_file()
            room = self._shard_tokens - self._files[-1].count
            self._files[-1].write(tokens[:room])
            tokens = tokens[room:]

    def _next_file(self) -> None:
        if self._files:
            self._files[-1].close()
        name = f"{self._split}-{len(self._files):05d}.bin"
        self._files.append(_ArrayFile(self._directory / name, self._dtype))

    def close(self) -> dict[str, Any]:
        """Finish the files; this split's entry of the index."""
        if self._files:
            self._files[-1].close()
        self._documents.close()
        return {
            "tokens": self.num_tokens,
            "documents": self._documents.count,
            "text_bytes": self._text_bytes,
            "files": [{"name": file.path.name, "tokens": file.count} for file in self._files],
        }


class ShardWriter:
    """Writes a shard directory beside its final place and renames it there when it is complete.

    Use as a context manager; without `finish` nothing is left behind.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer: TokenizerInfo,
        *,
        overwrite: bool = False,
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        self._final, self._tokenizer = directory, tokenizer
        self._refuse_to_destroy(overwrite)
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._partial = _beside(self._final)
        self._partial.mkdir()
        dtype = token_dtype(tokenizer.vocab_size)
        self._sinks = {split: ShardSink(self._partial, split, dtype, shard_tokens) for split in SPLITS}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    @property
    def train(self) -> ShardSink:
        return self._sinks["train"]

    @property
    def validation(self) -> ShardSink:
        return self._sinks["validation"]

    def finish(self, corpus_hash: str) -> dict[str, Any]:
        """Write the index, put the directory in its place and return the index."""
        splits = {name: sink.close() for name, sink in self._sinks.items()}
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": token_dtype(self._tokenizer.vocab_size).name,
            "tokenizer": asdict(self._tokenizer),
            "corpus_hash": corpus_hash,
            "splits": splits,
        }
        write_synced(self._partial / "index.json", json.dumps(index, indent=1))
        if self._final.exists() and any(self._final.iterdir()):
            old = _beside(self._final)
            os.replace(self._final, old)
            os.replace(self._partial, self._final)
            shutil.rmtree(old)
        else:
            os.replace(self._partial, self._final)
        return index

    def _refuse_to_destroy(self, overwrite: bool) -> None:
        """An existing directory must be empty, or hold shards and nothing else and be given up."""
        if not self._final.exists():
            return
        if not self._final.is_dir():
            raise DataError(f"--out: {self._final} is a file")
        names = {path.name for path in self._final.iterdir()}
        if names and not overwrite:
            raise DataError(f"--out: {self._final} is not empty; use --overwrite to replace shards in it")
        foreign = [name for name in names if name != "index.json" and not name.endswith(".bin")]
        if names and (foreign or "index.json" not in names):
            found = foreign[0] if foreign else "no index.json"
            raise DataError(f"--out: {self._final} is no shard directory ({found}), it is left as it is")


def _beside(directory: Path) -> Path:
    """A hidden path of its own on the same file system."""
    return directory.parent / f".{directory.name}.{secrets.token_hex(4)}"


class _ArrayFile:
    """A header and an array that grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self.path, self.count, self._dtype, self._crc = path, 0, dtype, 0
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115 (open across calls, see close)
        self._file.write(bytes(_HEADER_BYTES))

    def write(self, values: NDArray[Any]) -> None:
        data = values.astype(self._dtype, copy=False).tobytes()
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)
        self.count += len(values)

    def close(self) -> None:
        with self._file as file:
            file.seek(0)
            file.write(_header(self._dtype.itemsize, self.count, self._crc))
            file.flush()
            os.fsync(file.fileno())


def _header(item_bytes: int, count: int, data_crc: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, VERSION, item_bytes, count, data_crc).ljust(_HEADER_BYTES - 4, b"\0")
    return fields + zlib.crc32(fields).to_bytes(4, "little")


@dataclass(frozen=True)
class Shards:
    """A shard directory, opened: the index's facts and both splits, memory-mapped."""

    tokenizer: TokenizerInfo
    corpus_hash: str
    train: TokenStore
    validation: TokenStore


def open_shards(directory: Path, *, check_data: bool = False) -> Shards:
    """Map a directory that `thinwire tokenize` wrote; `check_data` also reads every byte for its checksum."""
    index_file = directory / "index.json"
    try:
        index = json.loads(index_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"data.shards: {directory} has no index.json; `thinwire tokenize` writes one") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data.shards: can't read {index_file}: {first_line(error)}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise DataError(f"data.shards: {index_file} is not an index of token shards")
    if index.get("version") != VERSION:
        raise DataError(f"data.shards: {index_file} has version {index.get('version')!r}, this reads {VERSION}")
    try:
        tokenizer = TokenizerInfo(**index["tokenizer"])
        dtype = token_dtype(tokenizer.vocab_size)
        stores = [_open_split(directory, name, index["splits"][name], dtype, check_data) for name in SPLITS]
        return Shards(tokenizer, str(index["corpus_hash"]), *stores)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"data.shards: {index_file} is incomplete ({first_line(error)})") from error


def _open_split(
    directory: Path, name: str, entry: dict[str, Any], dtype: np.dtype[Any], check_data: bool
) -> TokenStore:
    files = tuple(directory / Path(file["name"]).name for file in entry["files"])
    counts: Sequence[int] = [file["tokens"] for file in entry["files"]]
    pieces = tuple(_map(file, dtype, count, check_data) for file, count in zip(files, counts))
    documents_file = directory / f"{name}-documents.bin"
    ends = _map(documents_file, _ENDS, entry["documents"], check_data)
    last = int(ends[-1]) if len(ends) else 0
    if not sum(counts) == entry["tokens"] == last:
        raise DataError(f"data.shards: {documents_file} ends at token {last}, the index has {entry['tokens']}")
    return TokenStore(pieces, ends, int(entry["text_bytes"]), files)


def _map(path: Path, dtype: np.dtype[Any], count: int, check_data: bool) -> NDArray[Any]:
    """The array of one file, after its header and size have been compared with the index."""
    try:
        with open(path, "rb") as file:
            header = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"data.shards: can't read {path}: {first_line(error)}") from error
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        raise DataError(f"data.shards: {path} is not a token file")
    if zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "little"):
        raise DataError(f"data.shards: the header of {path} is damaged")
    _, version, item_bytes, items, data_crc = _FIELDS.unpack_from(header)
    if (version, item_bytes, items) != (VERSION, dtype.itemsize, count):
        raise DataError(
            f"data.shards: {path} holds {items} items of {item_bytes} bytes (version {version}), "
            f"the index has {count} of {dtype.itemsize} (version {VERSION})"
        )
    expected = _HEADER_BYTES + count * item_bytes
    if size != expected:
        raise DataError(f"data.shards: {path} has {size} bytes, {expected} were written: it is damaged")
    if not count:
        return np.empty(0, dtype)
    array = np.memmap(path, dtype=dtype, mode="r", offset=_HEADER_BYTES, shape=(count,))
    if check_data and zlib.crc32(array.data) != data_crc:
        raise DataError(f"data.shards: the tokens in {path} are damaged (checksum)")
    return array
