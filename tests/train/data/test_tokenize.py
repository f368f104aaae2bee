"""`thinwire tokenize`, from its arguments to a directory that training maps."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.train.data.made_tokenizers import make_tokenizer
from thinwire.train.data import shards
from thinwire.train.data.samples import DataConfig, build_data
from thinwire.train.data.tokenize import main


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A parquet file and a JSONL file, 400 documents in all."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [f"document {i}: {'words ' * (i % 11)}" for i in range(400)]
    pq.write_table(pa.table({"body": rows[:200]}), folder / "a.parquet")
    (folder / "b.jsonl").write_text("".join(json.dumps({"body": row}) + "\n" for row in rows[200:]))
    return folder


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 2) -> str:
    """The one line on stderr of a call that fails."""
    assert main(arguments) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("thinwire tokenize: ")
    return output.err


def test_its_shards_give_the_samples_that_the_text_gives(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, out = str(make_tokenizer(tmp_path / "tokenizer")), str(tmp_path / "deep" / "out")
    arguments = [str(corpus / "*"), "--out", out, "--tokenizer", tokenizer, "--text-key", "body"]
    assert main([*arguments, "--sequence-length", "16", "--shard-tokens", "1000", "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    from_text = build_data(
        DataConfig((str(corpus),), text_key="body", tokenizer=tokenizer, sequence_length=16), seed=0
    )
    from_shards = build_data(DataConfig(shards=out, sequence_length=16), seed=0)
    for name, text, mapped in zip(("train", "validation"), from_text, from_shards):
        assert text.num_tokens == mapped.num_tokens == report[name]["tokens"]
        everything = range(text.num_sequences)
        assert text.batch(everything).input_ids.equal(mapped.batch(everything).input_ids)
    assert report["corpus_hash"] == from_text[0].corpus_hash == from_shards[0].corpus_hash
    assert report["tokenizer"]["vocab_size"] == 400
    assert report["dtype"] == "uint16"
    assert len(report["train"]["files"]) > 3


def test_it_says_what_it_wrote_and_how_to_use_it(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(corpus), "--out", str(tmp_path / "out"), "--text-key", "body"]) == 0
    output = capsys.readouterr().out
    assert "bytes tokens, uint16" in output
    assert "documents" in output
    assert f"thinwire train --data.shards {tmp_path / 'out'}" in output
    assert main(["--check", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == output


def test_without_files_it_takes_the_default_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path / "out"), "--json"]) == 0
    default, _ = build_data(DataConfig(), seed=0)
    report = json.loads(capsys.readouterr().out)
    assert report["train"]["tokens"] == default.num_tokens
    assert report["corpus_hash"] == default.corpus_hash


def test_a_directory_with_something_in_it_is_kept_unless_told(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(corpus), "--out", str(tmp_path / "out"), "--text-key", "body"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert "--overwrite" in refused(capsys, arguments)
    assert main([*arguments, "--overwrite"]) == 0
    capsys.readouterr()
    (tmp_path / "out" / "notes.md").write_text("mine")
    assert "left as it is" in refused(capsys, [*arguments, "--overwrite"])
    assert (tmp_path / "out" / "notes.md").read_text() == "mine"


def test_bad_input_is_one_line_in_terms_of_the_options(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty.txt").write_text("")
    out = ["--out", str(tmp_path / "out")]
    for arguments, message in (
        ([str(corpus)], "--out is missing"),
        ([str(corpus), *out], "--text-key: "),
        ([str(tmp_path / "none"), *out], "FILES: '"),
        ([str(tmp_path / "short.txt"), *out], "lower --sequence-length"),
        ([str(tmp_path / "empty.txt"), *out], "empty.txt: empty"),
        ([str(corpus), *out, "--tokenizer", "no-one/nothing"], "--tokenizer: can't load"),
        ([str(corpus), *out, "--dataset", "x"], "FILES and --dataset are both set"),
        (
            [str(corpus), *out, "--validation-fraction", "2"],
            "--validation-fraction: must be at most 0.9999",
        ),
        ([str(corpus), *out, "--validation-fraction", "1e-320"], "--validation-fraction: must be at least 1e-06"),
        ([str(corpus), *out, "--sequence-length", "9" * 4000], "--sequence-length: must be at most 16777216"),
        ([str(corpus), *out, "--validation-fraction", "half"], "--validation-fraction: invalid float value"),
        ([str(corpus), *out, "--shard-tokens", "0"], "--shard-tokens: must be at least 1, got 0"),
        ([str(corpus), *out, "--speed"], "unrecognized arguments: --speed"),
        (["--check", str(corpus)], "--check: "),
    ):
        assert message in refused(capsys, arguments)
        assert not (tmp_path / "out").exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_damage_is_found_by_check(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(corpus), "--out", str(tmp_path / "out"), "--text-key", "body"]) == 0
    capsys.readouterr()
    file = tmp_path / "out" / "train-00000.bin"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")  # was the high byte of 256
    assert "train-00000.bin are damaged" in refused(capsys, ["--check", str(tmp_path / "out")])


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.ShardSink, "append", full)
    arguments = [str(corpus), "--out", str(tmp_path / "out"), "--text-key", "body"]
    assert "No space left on device" in refused(capsys, arguments, code=1)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]
