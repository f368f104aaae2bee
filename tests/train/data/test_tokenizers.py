"""Bytes and Hugging Face tokenizers give flat arrays with an end after each document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.data.made_tokenizers import make_tokenizer
from thinwire.train.data.text import DataError
from thinwire.train.data.tokenizers import ByteTokenizer, load_tokenizer, token_dtype

TEXT = ["def f(x):\n    return x", "", "naïve 😀 <|endoftext|> words"]


def test_bytes_are_tokens_and_256_ends_a_document() -> None:
    tokens, lengths = load_tokenizer("bytes").encode(["ab", "", "é"])
    assert tokens.tolist() == [97, 98, 256, 256, 0xC3, 0xA9, 256]
    assert lengths.tolist() == [3, 1, 3]
    assert ByteTokenizer().info.vocab_size == 257


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text()))
def test_bytes_round_trip(texts: list[str]) -> None:
    tokens, lengths = ByteTokenizer().encode(texts)
    documents = np.split(tokens, np.cumsum(lengths))[:-1]
    assert [bytes(document[:-1].astype(np.uint8)).decode() for document in documents] == texts


def test_an_exported_byte_tokenizer_has_the_same_ids(tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    exported = load_tokenizer(str(tmp_path))
    text = [*TEXT, "".join(map(chr, range(1, 0x800)))]
    for ours, theirs in zip(ByteTokenizer().encode(text), exported.encode(text)):
        np.testing.assert_array_equal(ours, theirs)
    assert (exported.info.vocab_size, exported.info.eos_id, exported.info.pad_id) == (257, 256, 256)


def test_a_tokenizer_directory_is_loaded_and_ends_every_document(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path)))
    tokens, lengths = tokenizer.encode(TEXT)
    ends = np.cumsum(lengths) - 1
    assert (tokens == tokenizer.info.eos_id).nonzero()[0].tolist() == ends.tolist()
    assert tokens.max() < tokenizer.info.vocab_size == 400
    import transformers

    plain = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert plain.decode(tokens[: lengths[0] - 1]) == TEXT[0]


def test_a_limit_in_the_tokenizer_file_does_not_cut_documents(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path, truncation=8)))
    assert tokenizer.encode(["word " * 100])[1][0] > 100


def test_a_tokenizer_without_an_end_token_adds_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path, end=None)))
    assert tokenizer.info.eos_id is None
    assert tokenizer.info.pad_id == 0
    assert tokenizer.encode([""])[1].tolist() == [0]
    assert "no end-of-text token" in caplog.text


def test_equal_tokenizers_have_equal_fingerprints(tmp_path: Path) -> None:
    one = load_tokenizer(str(make_tokenizer(tmp_path / "one")))
    same = load_tokenizer(str(make_tokenizer(tmp_path / "two", truncation=8)))
    other = load_tokenizer(str(make_tokenizer(tmp_path / "three", vocab_size=300)))
    assert one.info.fingerprint == same.info.fingerprint != other.info.fingerprint


def test_the_token_type_is_the_narrowest_that_holds_the_vocabulary() -> None:
    assert token_dtype(1 << 16) == np.uint16
    assert token_dtype((1 << 16) + 1) == np.uint32


def test_a_tokenizer_that_cannot_be_loaded_is_one_line_with_its_name(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("no-one/nothing", str(tmp_path), str(tmp_path / "none")):
        with pytest.raises(DataError, match=r"data\.tokenizer: can't load '") as caught:
            load_tokenizer(name)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["evil.Evil", null]}, "tokenizer_class": "Evil"}'
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(DataError, match=r"data\.tokenizer"):
        load_tokenizer(str(tmp_path))
    assert not (tmp_path / "ran").exists()
