"""`thinwire tokenize`: text to memory-mapped token shards, once, for every later run."""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from thinwire.train.data.samples import DataConfig, check_length, encode_corpus, open_corpus
from thinwire.train.data.shards import SHARD_TOKENS, SPLITS, ShardWriter, open_shards
from thinwire.train.data.text import Corpus, DataError, local_path
from thinwire.train.data.tokenizers import load_tokenizer
from thinwire.usage import out_of_range

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> int:
    """Run the command; 0 fine, 2 bad input (one line on stderr), 1 anything else."""
    try:
        arguments = _parser().parse_args(argv)
        if arguments.check:
            report = check(Path(arguments.check))
        elif arguments.out is None:
            raise DataError("--out is missing: the directory to write")
        else:
            report = tokenize(arguments)
    except DataError as error:
        return _fail(_as_options(str(error)), 2)
    except OSError as error:
        return _fail(f"can't write the shards: {error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted, nothing was written", 1)
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        Console().print(_in_words(report), highlight=False, markup=False, soft_wrap=True)
    return 0


def tokenize(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read the text, write the shards and say what they hold."""
    given = {field.name: getattr(arguments, field.name, field.default) for field in fields(DataConfig)}
    config = DataConfig(**given | {"files": tuple(arguments.files)})
    config.check()
    if wrong := out_of_range("--shard-tokens", arguments.shard_tokens, 1, 2**40):
        raise DataError(wrong)
    tokenizer = load_tokenizer(config.tokenizer, trust_remote_code=config.trust_remote_code)
    corpus = open_corpus(config)
    out = local_path(arguments.out)
    with ShardWriter(
        out, tokenizer.info, overwrite=arguments.overwrite, shard_tokens=arguments.shard_tokens
    ) as writer:
        with _progress(corpus) as advance:
            corpus_hash = encode_corpus(
                corpus,
                tokenizer,
                writer.train,
                writer.validation,
                fraction=config.validation_fraction,
                progress=advance,
            )
        check_length(writer.train.num_tokens, config.sequence_length, validation=False)
        check_length(writer.validation.num_tokens, config.sequence_length, validation=True)
        index = writer.finish(corpus_hash)
    return _report(out, index)


def check(directory: Path) -> dict[str, Any]:
    """Compare every byte of a shard directory with its checksums."""
    open_shards(directory, check_data=True)
    return _report(directory, json.loads((directory / "index.json").read_text(encoding="utf-8")))


def _report(directory: Path, index: dict[str, Any]) -> dict[str, Any]:
    report = {"out": str(directory), "dtype": index["dtype"], "corpus_hash": index["corpus_hash"]}
    return report | {"tokenizer": index["tokenizer"], **{name: index["splits"][name] for name in SPLITS}}


def _in_words(report: dict[str, Any]) -> str:
    lines = [f"{report['out']}: {report['tokenizer']['name']} tokens, {report['dtype']}"]
    for name in SPLITS:
        part = report[name]
        lines.append(
            f"  {name}: {part['tokens']:,} tokens, {part['documents']:,} documents, "
            f"{part['text_bytes'] / max(1, part['tokens']):.2f} bytes per token, {len(part['files'])} files"
        )
    return "\n".join([*lines, f"  train on them: thinwire train --data.shards {report['out']}"])


@contextmanager
def _progress(corpus: Corpus) -> Iterator[Callable[[int], None]]:
    """A bar over bytes of text on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("tokenizing", total=corpus.size)
        yield lambda text_bytes: bar.advance(task, text_bytes)


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"thinwire tokenize: {message}\n")
    return code


def _as_options(message: str) -> str:
    """A message about configuration keys, in terms of this command's options."""
    keys = "|".join(field.name for field in fields(DataConfig))
    message = re.sub(rf"\bdata\.({keys})\b", lambda match: "--" + match[1].replace("_", "-"), message)
    return message.replace("--files", "FILES").replace("--shards", "--check")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DataError(message)


def _parser() -> argparse.ArgumentParser:
    defaults = DataConfig()
    parser = _Parser(prog="thinwire tokenize", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("files", nargs="*", metavar="FILES", help="text, JSONL and parquet files, directories, globs; "
        "none: the Python standard library's sources")  # fmt: skip
    add("--out", metavar="DIR", help="where to write")
    add("--overwrite", action="store_true", help="replace the shards that are there")
    add(
        "--tokenizer",
        default=defaults.tokenizer,
        help="'bytes', or a Hugging Face id or directory (default: %(default)s)",
    )
    add("--trust-remote-code", action="store_true", help="let a tokenizer run code that comes with it")
    add("--text-key", default=defaults.text_key, help="column that holds the text (default: %(default)s)")
    add("--dataset", help="a `datasets` name or directory instead of FILES")
    add("--dataset-config", help="its configuration, where it has several")
    add("--dataset-split", default=defaults.dataset_split, help="its split to read (default: %(default)s)")
    add(
        "--validation-fraction",
        type=float,
        default=defaults.validation_fraction,
        help="share to hold out (default: %(default)s)",
    )
    add(
        "--sequence-length",
        type=int,
        default=defaults.sequence_length,
        help="refuse text shorter than this (default: %(default)s)",
    )
    add("--shard-tokens", type=int, default=SHARD_TOKENS, help="tokens per file (default: %(default)s)")
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--check", metavar="DIR", help="only compare the shards in DIR with their checksums")
    return parser
