"""Where documents come from, in which order, and which are held out."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from thinwire.train.data.text import (
    Corpus,
    DataError,
    Document,
    expand,
    from_dataset,
    from_files,
    held_out,
    split,
    standard_library,
)


def texts(*patterns: object, text_key: str = "text") -> list[str]:
    corpus = from_files([str(pattern) for pattern in patterns], text_key=text_key)
    return [document.text for document in corpus.documents]


def corpus_of(documents: Sequence[str]) -> Corpus:
    return Corpus("memory", (Document(text, f"document {i}") for i, text in enumerate(documents)))


def split_of(documents: Sequence[str], fraction: float) -> tuple[list[str], list[str], str]:
    digest = hashlib.sha256()
    parts: tuple[list[str], list[str]] = ([], [])
    for document, validation in split(corpus_of(documents), fraction=fraction, digest=digest):
        parts[validation].append(document.text)
    return *parts, digest.hexdigest()


def write_jsonl(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_the_default_corpus_is_the_standard_library_without_its_tests() -> None:
    corpus = standard_library()
    names = [document.key or "" for document in corpus.documents]
    assert {"argparse.py", "asyncio/events.py"} <= set(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert names == sorted(names, key=lambda name: name.split("/"))
    assert corpus.size is not None
    assert 8e6 < corpus.size < 20e6


def test_no_single_file_dominates_the_held_out_standard_library() -> None:
    documents = list(standard_library().documents)
    sizes = [len(document.text) for document in documents if held_out(document, 0.05)]
    assert 0.02 < sum(sizes) / sum(len(document.text) for document in documents) < 0.1
    assert max(sizes) < sum(sizes) / 3


def test_files_directories_and_globs_give_each_file_once_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b/two.md", "a/one.txt", "a/ten.py", "c.txt", ".hidden", "a/__pycache__/x.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/one.txt", "a/ten.py", "b/two.md", "c.txt"]
    assert texts(tmp_path / "**/*.md") == ["b/two.md"]
    assert texts(tmp_path / "[ac]*") == ["a/one.txt", "a/ten.py", "c.txt"]
    assert texts(tmp_path / "c.txt", tmp_path / "*.txt", tmp_path / "b") == ["c.txt", "b/two.md"]


def test_a_file_whose_name_looks_like_a_glob_is_read(tmp_path: Path) -> None:
    (tmp_path / "[draft].txt").write_text("words")
    assert texts(tmp_path / "[draft].txt") == ["words"]


def test_text_keeps_its_line_ends_and_loses_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert texts(tmp_path / "a.txt") == ["one\r\ntwo\n"]


def test_jsonl_gives_one_document_per_row(tmp_path: Path) -> None:
    rows = [{"text": "één", "id": 1}, {"text": "two\nlines"}, {"text": None}]
    assert texts(write_jsonl(tmp_path / "a.jsonl", rows)) == ["één", "two\nlines", ""]
    assert texts(write_jsonl(tmp_path / "b.jsonl", [{"body": "x"}]), text_key="body") == ["x"]


def test_compressed_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "row"}\n\n'))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"whole"))
    (tmp_path / "c.TXT.GZ").write_bytes(gzip.compress(b"loud"))
    (tmp_path / "d.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "loud row"}'))
    assert texts(tmp_path) == ["row", "whole", "loud", "loud row"]
    assert from_files([str(tmp_path / "c.TXT.GZ")]).size is None


def test_parquet_gives_one_document_per_row(tmp_path: Path) -> None:
    words = [f"row {i}" for i in range(10_000)]
    table = pa.table({"text": words, "id": range(10_000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3000)
    assert texts(tmp_path / "a.parquet") == words


@pytest.mark.parametrize("column_type", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_text_may_be_large_or_dictionary_encoded(tmp_path: Path, column_type: pa.DataType) -> None:
    array = pa.array(["x", "y", "x", None]).cast(column_type)
    pq.write_table(pa.table({"text": array}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["x", "y", "x", ""]


def test_a_local_directory_of_the_datasets_library_is_read(tmp_path: Path) -> None:
    import datasets

    data = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": data}).save_to_disk(str(tmp_path / "splits"))
    write_jsonl(tmp_path / "plain.jsonl", [{"text": "c"}])
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain.jsonl").rename(tmp_path / "plain" / "train.jsonl")

    def read(name: str, split: str = "train", text_key: str = "text") -> list[str]:
        corpus = from_dataset(str(tmp_path / name), config=None, split=split, text_key=text_key)
        return [document.text for document in corpus.documents]

    assert read("one") == ["a", "b"]
    assert read("splits", "test") == ["a", "b"]
    assert read("plain") == ["c"]
    with pytest.raises(DataError, match=r"data\.dataset_split: .* no split 'train'; it has 'test'"):
        read("splits")
    with pytest.raises(DataError, match=r"data\.text_key: .* no column 'body'; it has 'text', 'n'"):
        read("one", text_key="body")
    with pytest.raises(DataError, match=r"data\.text_key: .*row 0: 'n' is int, not text"):
        read("one", text_key="n")


def test_a_dataset_that_cannot_be_reached_is_one_line() -> None:
    with pytest.raises(DataError, match=r"data\.dataset: can't load 'no-one/nothing'") as caught:
        from_dataset("no-one/nothing", config=None, split="train", text_key="text")
    assert "\n" not in str(caught.value)


def bad_files() -> Iterator[tuple[str, bytes, str]]:
    yield "a.txt", b"caf\xe9 and more", r"a\.txt is not UTF-8 text .*at byte 3.*glob"
    yield "b.bin", b"PK\0\0", r"b\.bin is not text: it holds zero bytes"
    yield "c.txt.gz", b"not gzip", r"can't read .*c\.txt\.gz"
    yield "d.jsonl", b'{"text": "x"}\n{"text": \n', r"d\.jsonl line 2: not JSON"
    yield (
        "e.jsonl",
        b'{"body": "x", "id": 1}\n',
        r"data\.text_key: .*e\.jsonl line 1 has no column 'text'; .*'body', 'id'",
    )
    yield "f.jsonl", b"[1]\n", r"f\.jsonl line 1: expected a JSON object, got list"
    yield "g.jsonl", b'{"text": 3}\n', r"data\.text_key: .*g\.jsonl line 1: 'text' is int, not text"
    yield "k.jsonl", b"[" * 100_000, r"k\.jsonl line 1: not JSON that can be read \(maximum recursion depth"
    yield "l.jsonl", b'{"text": "x"}\n{"n": ' + b"9" * 5000 + b"}", r"l\.jsonl line 2: not JSON that can .*4300"
    yield "h.jsonl", b'{"text": "\xff"}\n', r"h\.jsonl line 1: not UTF-8"
    yield "i.parquet", b"PAR1 but not really", r"can't read .*i\.parquet"
    yield "j.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 999)[:40], r"can't read .*j\.jsonl\.gz"


@pytest.mark.parametrize(("name", "data", "message"), bad_files(), ids=lambda value: str(value)[:9])
def test_a_file_that_cannot_be_read_as_text_is_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        texts(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unknown_parquet_column_lists_the_columns_there_are(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data\.text_key: .* no column 'text'; it has 'content', 'id'"):
        texts(tmp_path / "a.parquet")


def test_names_that_stand_for_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.files: '.*/none\.txt' does not exist"):
        expand([str(tmp_path / "none.txt")])
    with pytest.raises(DataError, match=r"data\.files: nothing matches '.*\*\.txt'"):
        expand([str(tmp_path / "*.txt")])
    with pytest.raises(DataError, match=r"data\.files: no files in directory"):
        expand([str(tmp_path)])
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"link\.txt is a link to a file that does not exist"):
        expand([str(tmp_path / "link.txt")])


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file whose reads fail, even for root")
def test_a_file_whose_reads_fail_is_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        (tmp_path / name).symlink_to("/proc/self/mem")
        with pytest.raises(DataError, match=rf"can't read .*{name}") as caught:
            texts(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("documents", [[], [""], [" \n", "\t"]])
def test_empty_text_is_refused(documents: list[str]) -> None:
    with pytest.raises(DataError, match="memory: empty"):
        split_of(documents, 0.1)


def test_half_a_surrogate_pair_is_refused_by_place() -> None:
    with pytest.raises(DataError, match="document 1: not text"):
        split_of(["fine", "\ud83d"], 0.1)


def test_documents_are_held_out_by_contents_whatever_surrounds_them() -> None:
    documents = [f"document number {i}" for i in range(2000)]
    train, validation, _ = split_of(documents, 0.1)
    assert sorted(train + validation) == sorted(documents)
    assert 120 < len(validation) < 280
    _, again, _ = split_of(documents[::-1][:1000] + ["new"] * 50, 0.1)
    assert set(again) - {"new"} == set(validation) & set(documents[1000:])


def test_equal_documents_are_never_on_both_sides() -> None:
    train, validation, _ = split_of([f"document {i % 97}" for i in range(1000)], 0.1)
    assert not set(train) & set(validation)


def test_the_end_of_each_document_is_held_out_where_documents_are_few() -> None:
    document = "".join(f"line {i:05d}\n" for i in range(1000))
    train, validation, _ = split_of([document, document.upper()], 0.05)
    assert [a + b for a, b in zip(train, validation)] == [document, document.upper()]
    assert all(b.lower().startswith("line") and 0.03 < len(b) / len(document) < 0.08 for b in validation)
    train, validation, _ = split_of(["x" * 1000], 0.05)
    assert (len(train[0]), len(validation[0])) == (950, 50)


def test_the_corpus_hash_depends_on_documents_and_their_order_alone() -> None:
    *_, one = split_of(["ab", "c"], 0.5)
    assert one == split_of(["ab", "", "c"], 0.1)[2]
    assert one != split_of(["c", "ab"], 0.5)[2]
    assert one != split_of(["a", "bc"], 0.5)[2]
