"""The pages on methods: scripts print what stands below them, command lines are taken, and tables of bytes are
those of `thinwire recipes`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import run_ranks
from thinwire.bench import local_updates as bench_local_updates
from thinwire.bench import recipes as bench_recipes
from thinwire.cli import COMMANDS
from thinwire.recipes import table
from thinwire.train.arguments import parse
from thinwire.train.config import check

DOCS = Path(__file__).parents[1] / "docs"
METHODS = sorted((DOCS / "methods").glob("*.md"))
GUIDE = DOCS / "which-method.md"
PARSERS: dict[str, Any] = {"recipes": bench_recipes._parse, "local-updates": bench_local_updates._parse}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that are marked with this language."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for marked, text in fenced if marked == language]


def commands(page: Path) -> list[list[str]]:
    """The words after `thinwire` of every command line in a page."""
    lines = "".join(blocks(page, "")).splitlines()
    return [shlex.split(found[1]) for line in lines if (found := re.search(r"thinwire\)? (\w.*)", line))]


def printed(script: str, store: Path) -> str:
    """What the script prints on this rank, which meets the others as torchrun would have it."""
    rank, world_size, port = dist.get_rank(), dist.get_world_size(), [0]
    if rank == 0:
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [agent.port]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port[0])}
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(script, {"__name__": "__main__"})
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    return output.getvalue()


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.stem)
def test_the_script_of_a_method_prints_what_its_page_says(page: Path, tmp_path: Path) -> None:
    [script], [said] = blocks(page, "python"), blocks(page, "text")
    assert run_ranks(printed, 2, script, tmp_path / "store") == [said, ""]


def test_the_example_of_the_guide_prints_what_stands_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    [script], [said] = blocks(GUIDE, "python"), blocks(GUIDE, "text")
    exec(script, {})
    assert capsys.readouterr().out == said


def test_every_command_line_is_taken() -> None:
    found = [line for page in (*METHODS, GUIDE) for line in commands(page)]
    assert len(found) > len(METHODS)
    for command, *arguments in found:
        assert command in COMMANDS
        if command == "train":
            config = parse(arguments).config
            check(config, world_size=config.workers)
        elif command == "bench":
            PARSERS[arguments[0]](arguments[1:])


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.stem)
def test_the_bytes_of_a_page_are_those_of_thinwire_recipes(page: Path) -> None:
    rows = r"^\| `([a-z0-9-]+)` \|[^|]*\| ([0-9.]+ \| [0-9.]+) \|"
    said = dict(re.findall(rows, page.read_text(), re.MULTILINE))
    found = {
        two.name: f"{two.sent_bytes_per_param_per_step:.3f} | {four.sent_bytes_per_param_per_step:.3f}"
        for two, four in zip(table.rows(2), table.rows(4))
    }
    assert said
    assert said == {name: found[name] for name in said}
    assert {name for command, *words in commands(page) for name in words if name in found} == said.keys()
