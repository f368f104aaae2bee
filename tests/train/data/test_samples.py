"""From a configuration to batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.ranks import run_ranks
from tests.train.data.made_tokenizers import make_tokenizer
from thinwire.train.data.sampler import GlobalSampler
from thinwire.train.data.samples import DataConfig, DataError, TokenData, build_data
from thinwire.train.data.shards import ShardWriter
from thinwire.train.data.tokenizers import ByteTokenizer, load_tokenizer


def write_text(path: Path, size: int) -> str:
    """A text file of `size` bytes whose every stretch is different."""
    path.write_text("".join(f"{i:07d}\n" for i in range(size // 8 + 1))[:size])
    return str(path)


def write_rows(path: Path, rows: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return str(path)


def tokens_of(data: TokenData) -> list[int]:
    tokens: list[int] = data.batch(range(data.num_sequences)).input_ids.flatten().tolist()
    return tokens


def test_the_default_configuration_loads() -> None:
    train, validation = build_data(DataConfig(), seed=0)
    assert train.num_sequences > 30_000
    assert validation.num_sequences == 64
    assert train.tokenizer.vocab_size == 257
    batch = train.batch([5, 0])
    assert batch.input_ids.shape == (2, 256)
    assert batch.input_ids.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.attention_mask is None
    assert torch.equal(batch.labels, batch.input_ids)
    assert batch.sample_ids.tolist() == [5, 0]
    assert torch.equal(train.batch([0]).input_ids[0], batch.input_ids[1])
    assert 0.99 < validation.bytes_per_token < 1


def test_packed_samples_are_the_text_end_to_end(tmp_path: Path) -> None:
    file = write_text(tmp_path / "a.txt", 10_000)
    train, _ = build_data(DataConfig((file,), sequence_length=64, validation_fraction=0.1), seed=0)
    text = bytes(tokens_of(train)).decode()
    assert text == Path(file).read_text()[: len(text)]
    assert train.num_sequences == train.num_tokens // 64


def test_the_seed_moves_the_cuts_and_never_the_number_of_samples(tmp_path: Path) -> None:
    config = DataConfig((write_text(tmp_path / "a.txt", 5000),), sequence_length=64)
    splits = [build_data(config, seed=seed) for seed in range(4)]
    starts = [
        Path(config.files[0]).read_text().index(bytes(tokens_of(train)[:64]).decode()) for train, _ in splits
    ]
    assert len(set(starts)) == 4
    assert len({train.num_sequences for train, _ in splits}) == 1
    assert all(tokens_of(validation) == tokens_of(splits[0][1]) for _, validation in splits)


def test_an_end_token_stands_between_documents(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"{i:03d}" for i in range(400)])
    train, validation = build_data(DataConfig((file,), sequence_length=4), seed=0)
    rows = train.batch(range(train.num_sequences)).input_ids
    assert (rows[:, 3] == ByteTokenizer.END).all()
    assert train.num_tokens + validation.num_tokens == 1600
    assert train.bytes_per_token == 0.75


def test_validation_samples_are_spread_over_all_the_held_out_text(tmp_path: Path) -> None:
    config = DataConfig((write_text(tmp_path / "a.txt", 80_000),), sequence_length=64, validation_sequences=8)
    _, validation = build_data(config, seed=0)
    assert validation.num_sequences == 8
    assert validation.num_tokens > 3500
    numbers = [int(bytes(row.tolist()).split(b"\n")[1]) for row in validation.batch(range(8)).input_ids]
    assert numbers[-1] - numbers[0] > 0.8 * 3500 / 8
    assert numbers == sorted(numbers)


def test_unpacked_documents_are_padded_and_padding_has_no_label(tmp_path: Path) -> None:
    lengths = [1, 3, 7, 8, 20, 15]
    rows = [chr(97 + i % 26) * lengths[i % 6] for i in range(300)]
    config = DataConfig((write_rows(tmp_path / "a.jsonl", rows),), sequence_length=8, pack=False)
    train, validation = build_data(config, seed=0)
    batch = train.batch(range(train.num_sequences))
    assert batch.attention_mask is not None
    used = batch.attention_mask.sum(1)
    assert set(used.tolist()) == {2, 4, 5, 8}  # 1, 3; 20 = 8 + 8 + (4 + end); 7 and 15 fill up; 8 leaves end alone
    assert torch.equal(batch.labels != -100, batch.attention_mask.bool())
    assert torch.equal(batch.labels[batch.labels != -100], batch.input_ids[batch.attention_mask.bool()])
    assert (batch.input_ids[~batch.attention_mask.bool()] == train.tokenizer.pad_id).all()
    for ids, count in zip(batch.input_ids, used.tolist()):
        assert len(set(ids[:count].tolist()) - {ByteTokenizer.END}) == 1  # one document per sample
    assert validation.num_sequences > 0


def test_shards_and_text_give_the_same_samples(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"document {i} " * (i % 9) for i in range(400)])
    name = str(make_tokenizer(tmp_path / "tokenizer"))
    from thinwire.train.data.samples import encode_corpus, open_corpus

    text = DataConfig((file,), tokenizer=name, sequence_length=16)
    tokenizer = load_tokenizer(name)
    with ShardWriter(tmp_path / "shards", tokenizer.info, shard_tokens=1000) as writer:
        corpus = open_corpus(text)
        corpus_hash = encode_corpus(
            corpus, tokenizer, writer.train, writer.validation, fraction=0.05, batch_characters=100
        )
        writer.finish(corpus_hash)
    for pack in (True, False):
        mapped = DataConfig(shards=str(tmp_path / "shards"), sequence_length=16, pack=pack)
        in_memory = DataConfig((file,), tokenizer=name, sequence_length=16, pack=pack)
        for ours, theirs in zip(build_data(in_memory, seed=3), build_data(mapped, seed=3)):
            assert ours.num_sequences == theirs.num_sequences
            assert ours.corpus_hash == theirs.corpus_hash
            assert ours.bytes_per_token == theirs.bytes_per_token
            assert tokens_of(ours) == tokens_of(theirs)


def test_bytes_per_token_makes_losses_of_different_tokenizers_comparable(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [f"return self.value_{i}" for i in range(400)])
    _, by_bytes = build_data(DataConfig((file,), sequence_length=16), seed=0)
    config = DataConfig((file,), tokenizer=str(make_tokenizer(tmp_path / "t")), sequence_length=16)
    _, by_pieces = build_data(config, seed=0)
    text = by_bytes.bytes_per_token * by_bytes.num_tokens
    assert by_pieces.bytes_per_token * by_pieces.num_tokens == pytest.approx(text)
    assert by_pieces.bytes_per_token > 1.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(files=("a",), shards="b"), r"data\.files and data\.shards are both set"),
        (DataConfig(dataset_config="x"), r"data\.dataset_config is set, but data\.dataset is not"),
        (DataConfig(sequence_length=1), r"data\.sequence_length: must be at least 2, got 1"),
        (DataConfig(validation_fraction=1.0), r"data\.validation_fraction: must be at most 0\.999999, got 1\.0"),
        (DataConfig(validation_fraction=float("nan")), r"data\.validation_fraction: .* got nan"),
        (DataConfig(validation_sequences=0), r"data\.validation_sequences: must be at least 1"),
        (DataConfig(files=("/no/such.txt",)), r"data\.files: '/no/such\.txt' does not exist"),
        (DataConfig(files=("~no-such-user/a.txt",)), r"data\.files: '~no-such-user/a\.txt' does not exist"),
        (DataConfig(shards="/no/such"), r"data\.shards: /no/such has no index\.json"),
        (DataConfig(tokenizer="no-one/nothing"), r"data\.tokenizer: can't load 'no-one/nothing'"),
    ],
)
def test_what_cannot_work_is_refused_by_key(config: DataConfig, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_data(config, seed=0)


def test_text_shorter_than_a_sequence_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    file = write_text(tmp_path / "a.txt", 200)
    with pytest.raises(
        DataError,
        match=r"training text has 19\d tokens and one sequence needs 256; lower data\.sequence_length",
    ):
        build_data(DataConfig((file,)), seed=0)
    with pytest.raises(
        DataError,
        match=r"validation text has \d+ tokens and one sequence needs 32; .*raise data\.validation_fraction",
    ):
        build_data(DataConfig((file,), sequence_length=32), seed=0)


def test_empty_text_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt: empty, there is no text in it"):
        build_data(DataConfig((str(tmp_path / "empty.txt"),)), seed=0)


def test_shards_refuse_another_tokenizer(tmp_path: Path) -> None:
    name = str(make_tokenizer(tmp_path / "t"))
    with ShardWriter(tmp_path / "shards", load_tokenizer(name).info) as writer:
        for sink in (writer.train, writer.validation):
            sink.append(np.arange(64), np.array([64]), 64)
        writer.finish("hash")
    moved = (tmp_path / "t").rename(tmp_path / "moved")
    config = {"shards": str(tmp_path / "shards"), "sequence_length": 16}
    build_data(DataConfig(**config, tokenizer=str(moved)), seed=0)  # type: ignore[arg-type]
    other = str(make_tokenizer(tmp_path / "other", vocab_size=300))
    with pytest.raises(DataError, match=r"data\.tokenizer is '.*other', but .* was written with"):
        build_data(DataConfig(**config, tokenizer=other), seed=0)  # type: ignore[arg-type]


def test_a_token_outside_the_vocabulary_is_refused_with_its_file(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shards", ByteTokenizer().info) as writer:
        for sink in (writer.train, writer.validation):
            sink.append(np.full(64, 9999), np.array([64]), 64)
        writer.finish("hash")
    train, _ = build_data(DataConfig(shards=str(tmp_path / "shards"), sequence_length=16), seed=0)
    with pytest.raises(DataError, match=r"train-00000\.bin holds token 9999, .* vocabulary ends at 256"):
        train.batch([0])


def test_a_sample_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    train, _ = build_data(DataConfig((write_text(tmp_path / "a.txt", 9000),)), seed=0)
    with pytest.raises(IndexError, match=f"sample {train.num_sequences} of {train.num_sequences}"):
        train.batch([train.num_sequences])


def ranks_batches(file: str) -> tuple[str, list[list[int]]]:
    """Ids and first tokens of this rank's share of an epoch."""
    import torch.distributed as dist

    train, _ = build_data(DataConfig((file,), sequence_length=32), seed=5)
    sampler = GlobalSampler(train.num_sequences, seed=5)
    share = train.num_sequences // dist.get_world_size()
    batch = train.batch(sampler.take(dist.get_rank() * share, share))
    return train.corpus_hash, [[i, *ids] for i, ids in zip(batch.sample_ids.tolist(), batch.input_ids.tolist())]


def test_all_ranks_read_the_same_corpus_and_share_its_samples(tmp_path: Path) -> None:
    file = write_text(tmp_path / "a.txt", 8000)
    results = run_ranks(ranks_batches, 2, file)
    assert len({corpus_hash for corpus_hash, _ in results}) == 1
    train, _ = build_data(DataConfig((file,), sequence_length=32), seed=5)
    rows = [row for _, share in results for row in share]
    assert len({row[0] for row in rows}) == len(rows) >= train.num_sequences - 1
    for sample, *ids in rows[::17]:
        assert train.batch([sample]).input_ids[0].tolist() == ids
