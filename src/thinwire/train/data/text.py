"""Documents: where text comes from, in a fixed order, and which of it is held out.

A corpus is an iterator of documents. A text file is one document, and so is a row of a JSONL file, a
parquet file or a `datasets` data set. The order depends on names and contents only, never on the file
system, so every rank and every restart reads the same corpus.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import itertools
import json
import logging
import math
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from thinwire.usage import first_line

logger = logging.getLogger(__name__)

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
CACHES = frozenset({"__pycache__"})
NOT_SOURCE = CACHES | {"test", "tests", "idle_test", "site-packages", "dist-packages"}


class DataError(ValueError):
    """The data can't be used as configured. One line that names the key or the file."""


@dataclass(frozen=True)
class Document:
    """One text, and where it was found (for messages)."""

    text: str
    source: str
    key: str | None = None  # what decides whether it is held out; None: its contents


class Digest(Protocol):
    """What hashlib's objects can do."""

    def update(self, data: bytes, /) -> None: ...


@dataclass(frozen=True)
class Corpus:
    """Documents to read once, in order."""

    name: str
    documents: Iterator[Document]
    size: int | None = None  # bytes on disk where that is about the size of the text, for progress bars


def standard_library() -> Corpus:
    """The sources of the Python standard library that runs this, without its tests: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in _walk(root, skip=NOT_SOURCE) if path.suffix == ".py"]
    if not paths:
        raise DataError(f"data.files: no Python sources in {root} to train on by default; name text files")
    return Corpus(
        name="the Python standard library",
        documents=(
            Document(read_text_file(path), str(path), key=path.relative_to(root).as_posix()) for path in paths
        ),
        size=sum(path.stat().st_size for path in paths),
    )


def from_files(patterns: Sequence[str], *, text_key: str = "text") -> Corpus:
    """Text, JSONL and parquet files; directories are walked, globs expanded, both in order of name."""
    paths = expand(patterns)
    plain = all(path.suffix.lower() not in (".gz", ".parquet") for path in paths)
    return Corpus(
        name=", ".join(patterns),
        documents=itertools.chain.from_iterable(read_file(path, text_key=text_key) for path in paths),
        size=sum(path.stat().st_size for path in paths) if plain else None,
    )


def from_dataset(name: str, *, config: str | None, split: str, text_key: str) -> Corpus:
    """A data set that the `datasets` library knows by name, or one in a local directory."""
    import datasets

    saved = local_path(name)
    try:
        if (saved / "dataset_dict.json").is_file() or (saved / "state.json").is_file():
            data = datasets.load_from_disk(str(saved))  # written by save_to_disk
            if isinstance(data, datasets.DatasetDict):
                if split not in data:
                    raise DataError(f"data.dataset_split: {name} has no split {split!r}; it has {_listed(data)}")
                data = data[split]
        else:
            data = datasets.load_dataset(str(saved) if saved.is_dir() else name, config, split=split)
    except DataError:
        raise
    except Exception as error:  # its builders raise whatever their readers and the network raise
        raise DataError(f"data.dataset: can't load {name!r} (split {split!r}): {first_line(error)}") from error
    _check_column(text_key, data.column_names, f"data set {name}")
    rows = data.select_columns([text_key])
    return Corpus(
        name=f"data set {name}",
        documents=_documents(((f"{name} row {i}", row[text_key]) for i, row in enumerate(rows)), text_key),
    )


def local_path(name: str) -> Path:
    """A path in which `~` is a home directory, if there is such a user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files that names, directories and globs stand for, each once."""
    paths: dict[Path, None] = {}
    for pattern in patterns:
        path = local_path(pattern)
        if path.is_dir():
            matches = _walk(path)
        elif path.exists() or path.is_symlink():
            matches = [path]
        elif glob.has_magic(pattern):
            entries = (Path(name) for name in sorted(glob.glob(str(path), recursive=True)))
            matches = [file for entry in entries for file in (_walk(entry) if entry.is_dir() else [entry])]
            if not matches:
                raise DataError(f"data.files: nothing matches {pattern!r}")
        else:
            raise DataError(f"data.files: {pattern!r} does not exist")
        if not matches:
            raise DataError(f"data.files: no files in directory {pattern!r}")
        paths.update(dict.fromkeys(matches))
    for path in paths:
        if not path.exists():
            raise DataError(f"data.files: {path} is a link to a file that does not exist")
    return list(paths)


def _walk(directory: Path, skip: frozenset[str] = CACHES) -> list[Path]:
    """Every file below a directory in order of relative path, hidden ones and folders to skip apart."""

    def unreadable(error: OSError) -> NoReturn:
        raise DataError(f"can't read directory {error.filename}: {error.strerror}") from error

    found: list[Path] = []
    for folder, subfolders, names in os.walk(directory, onerror=unreadable):
        subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skip]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(directory).parts)


def read_file(path: Path, *, text_key: str = "text") -> Iterator[Document]:
    """The documents of one file, by its suffix."""
    if path.name.lower().endswith(JSONL_SUFFIXES):
        return _documents(_jsonl_rows(path, text_key), text_key)
    if path.suffix.lower() == ".parquet":
        return _documents(_parquet_rows(path, text_key), text_key)
    return iter([Document(read_text_file(path), str(path))])


def read_text_file(path: Path) -> str:
    """A whole UTF-8 file, line ends as they are."""
    try:
        text = _read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}){_HINT}") from error
    if "\0" in text:
        raise DataError(f"{path} is not text: it holds zero bytes{_HINT}")
    return text


_HINT = "; leave it out with a glob such as 'DIR/**/*.txt'"


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if _is_compressed(path) else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"can't read {path}: {first_line(error)}") from error


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def _jsonl_rows(path: Path, text_key: str) -> Iterator[tuple[str, Any]]:
    """(where, value) of each line, read line by line."""
    try:
        with gzip.open(path, "rb") if _is_compressed(path) else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path} line {number}"
                    row = _json_object(line, "utf-8-sig" if number == 1 else "utf-8", where)
                    _check_column(text_key, row, where)
                    yield where, row[text_key]
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"can't read {path}: {first_line(error)}") from error


def _json_object(line: bytes, encoding: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode(encoding))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # a number too long or lists too deep for Python
        raise DataError(f"{where}: not JSON that can be read ({first_line(error)})") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _parquet_rows(path: Path, text_key: str) -> Iterator[tuple[str, Any]]:
    """(where, value) of each row, read batch by batch."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            _check_column(text_key, file.schema_arrow.names, str(path))
            number = 0
            for batch in file.iter_batches(batch_size=4096, columns=[text_key]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield f"{path} row {number}", value
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path}: {first_line(error)}") from error


def _check_column(text_key: str, columns: Iterable[str], where: str) -> None:
    if text_key not in columns:
        raise DataError(f"data.text_key: {where} has no column {text_key!r}; it has {_listed(columns)}")


def _documents(rows: Iterator[tuple[str, Any]], text_key: str) -> Iterator[Document]:
    """Rows as documents. A null is an empty document."""
    for where, value in rows:
        if value is not None and not isinstance(value, str):
            raise DataError(f"data.text_key: {where}: {text_key!r} is {type(value).__name__}, not text")
        yield Document(value or "", where)


def split(corpus: Corpus, *, fraction: float, digest: Digest) -> Iterator[tuple[Document, bool]]:
    """Every document that is not blank, and whether it is held out for validation.

    `digest` takes in every document, in order, so that at the end it stands for the corpus.

    Which documents are held out depends on a hash of each one's key or contents alone. Where a corpus has so
    few documents that this might pick none, the last `fraction` of each document is held out instead.
    """
    enough = math.ceil(5 / fraction)  # then none is picked with probability exp(-5)
    documents = _hashed(corpus.documents, digest)
    head = list(itertools.islice(documents, enough))
    if not head:
        raise DataError(f"{corpus.name}: empty, there is no text in it")
    if len(head) < enough:
        logger.info("%s: %d documents; the end of each is held out", corpus.name, len(head))
        for document in head:
            cut = _cut(document.text, fraction)
            for text, validation in ((document.text[:cut], False), (document.text[cut:], True)):
                if text:
                    yield Document(text, document.source), validation
        return
    for document in itertools.chain(head, documents):
        yield document, held_out(document, fraction)


def _hashed(documents: Iterator[Document], digest: Digest) -> Iterator[Document]:
    """The documents that are not blank, each put into the digest with its length."""
    for document in documents:
        if not document.text or document.text.isspace():
            continue
        try:
            data = document.text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{document.source}: not text, it holds half of a surrogate pair") from error
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        yield document


def held_out(document: Document, fraction: float) -> bool:
    """Whether this document's hash falls into the held-out fraction.

    BLAKE2b, because it spreads the standard library's few large files well: SHA-256 would hold out
    `pydoc_data/topics.py`, generated prose that then makes up most of the validation text.
    """
    key = document.text if document.key is None else document.key
    digest = hashlib.blake2b(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _cut(text: str, fraction: float) -> int:
    """Where the last `fraction` of a text starts: at the start of a line if one is near."""
    tail = max(1, round(len(text) * fraction))
    line = text.find("\n", max(0, len(text) - tail - tail // 2), len(text) - tail // 2)
    return len(text) - tail if line < 0 else line + 1


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
