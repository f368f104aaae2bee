"""Shards on disk hold exactly the tokens that were written, or are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.train.data.shards import ShardWriter, open_shards
from thinwire.train.data.store import MemorySink, TokenStore
from thinwire.train.data.text import DataError
from thinwire.train.data.tokenizers import ByteTokenizer, TokenizerInfo

BYTES = ByteTokenizer().info


def write(
    directory: Path, *, tokenizer: TokenizerInfo = BYTES, shard_tokens: int = 100, overwrite: bool = False
) -> None:
    """Three training batches (250 tokens, 5 documents) and one of validation."""
    with ShardWriter(directory, tokenizer, shard_tokens=shard_tokens, overwrite=overwrite) as writer:
        for start, lengths in ((0, [30, 0, 100]), (130, [70]), (200, [50])):
            count = sum(lengths)
            writer.train.append(np.arange(start, start + count), np.array(lengths), text_bytes=count)
        writer.validation.append(np.arange(40), np.array([40]), text_bytes=39)
        writer.finish("hash")


def test_written_tokens_come_back(tmp_path: Path) -> None:
    write(tmp_path / "out")
    shards = open_shards(tmp_path / "out", check_data=True)
    assert [len(piece) for piece in shards.train.pieces] == [100, 100, 50]
    assert all(isinstance(piece, np.memmap) and piece.dtype == np.uint16 for piece in shards.train.pieces)
    assert shards.train.read(0, 250).tolist() == list(range(250))
    assert shards.train.ends.tolist() == [30, 30, 130, 200, 250]
    assert shards.validation.read(3, 5).tolist() == [3, 4]
    assert (shards.train.text_bytes, shards.validation.text_bytes) == (250, 39)
    assert (shards.corpus_hash, shards.tokenizer) == ("hash", BYTES)


def test_large_vocabularies_take_four_bytes_per_token(tmp_path: Path) -> None:
    large = replace(BYTES, vocab_size=100_000)
    with ShardWriter(tmp_path / "out", large) as writer:
        writer.train.append(np.array([99_999, 5]), np.array([2]), text_bytes=2)
        writer.finish("hash")
    assert open_shards(tmp_path / "out").train.read(0, 2).tolist() == [99_999, 5]
    assert (tmp_path / "out" / "train-00000.bin").stat().st_size == 64 + 2 * 4


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=1), data=st.data())
def test_a_stretch_is_read_across_pieces(sizes: list[int], data: st.DataObject) -> None:
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    store = TokenStore(tuple(np.split(tokens, np.cumsum(sizes))[:-1]), np.array([len(tokens)]), 0)
    assert store.num_tokens == len(tokens)
    if len(tokens):
        start = data.draw(st.integers(0, len(tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(tokens)))
        assert store.read(start, stop).tolist() == list(range(start, stop))


def test_memory_and_shards_hold_the_same(tmp_path: Path) -> None:
    write(tmp_path / "out")
    sink = MemorySink()
    sink.append(np.arange(200), np.array([30, 0, 100, 70]), 200)
    sink.append(np.arange(200, 250), np.array([50]), 50)
    store, mapped = sink.store(), open_shards(tmp_path / "out").train
    assert store.read(0, 250).tolist() == mapped.read(0, 250).tolist()
    assert store.ends.tolist() == mapped.ends.tolist()


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path / "out", BYTES) as writer:
            writer.train.append(np.arange(9), np.array([9]), 9)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_only_shards_are_overwritten_and_only_if_asked(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with pytest.raises(DataError, match="not empty; use --overwrite"):
        write(tmp_path / "out")
    write(tmp_path / "out", overwrite=True, shard_tokens=1000)
    assert len(open_shards(tmp_path / "out").train.pieces) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match=r"no shard directory \(thesis\.tex\), it is left as it is"):
        write(tmp_path / "out", overwrite=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "firmware.bin").write_text("x")
    with pytest.raises(DataError, match=r"no shard directory \(no index\.json\)"):
        write(tmp_path / "home", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        write(tmp_path / "file", overwrite=True)


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")
    assert open_shards(tmp_path / "out").train.num_tokens == 250


def damage(directory: Path, name: str, how: str) -> None:
    path = directory / name
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[:-10])
    elif how == "longer":
        path.write_bytes(data + b"\0\0")
    elif how == "short header":
        path.write_bytes(data[:20])
    elif how == "header":
        path.write_bytes(data[:17] + b"\x01" + data[18:])
    elif how == "foreign":
        path.write_bytes(b"\x80\x04" + data[2:])
    elif how == "missing":
        path.unlink()
    elif how == "swapped":
        path.write_bytes((directory / "validation-00000.bin").read_bytes())


@pytest.mark.parametrize("name", ["train-00001.bin", "train-documents.bin"])
@pytest.mark.parametrize("how", ["cut", "longer", "short header", "header", "foreign", "missing", "swapped"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, how: str) -> None:
    write(tmp_path)
    damage(tmp_path, name, how)
    with pytest.raises(DataError, match=rf"data\.shards: .*{name}") as caught:
        open_shards(tmp_path)
    assert "\n" not in str(caught.value)


def test_changed_tokens_are_found_when_asked_to_look(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "train-00002.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"\x77")
    open_shards(tmp_path)
    with pytest.raises(DataError, match=r"train-00002\.bin are damaged \(checksum\)"):
        open_shards(tmp_path, check_data=True)


def test_an_index_that_is_damaged_or_foreign_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no index\.json; `thinwire tokenize` writes one"):
        open_shards(tmp_path)
    write(tmp_path / "out")
    index = tmp_path / "out" / "index.json"
    good = json.loads(index.read_text())
    for text, message in (
        (index.read_text()[:50], ": Unterminated string"),
        ("[]", "is not an index of token shards"),
        (json.dumps(good | {"format": "other"}), "is not an index of token shards"),
        (json.dumps(good | {"version": 9}), "has version 9, this reads 1"),
        (json.dumps({key: value for key, value in good.items() if key != "splits"}), "incomplete .*splits"),
        (json.dumps(good | {"tokenizer": {}}), "incomplete"),
        (json.dumps(good | {"splits": {"train": {"files": 3}}}), "incomplete"),
    ):
        index.write_text(text)
        with pytest.raises(DataError, match=rf"data\.shards: .*index\.json.*{message}"):
            open_shards(tmp_path / "out")


def test_an_index_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "out")
    index = tmp_path / "out" / "index.json"
    index.write_text(index.read_text().replace('"train-00000.bin"', '"../secret.bin"'))
    with pytest.raises(DataError, match=r"can't read .*out/secret\.bin"):
        open_shards(tmp_path / "out")
