"""Commands whose standard output is closed or goes away."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr

import pytest

from tests.support.ranks import run_ranks
from thinwire import cli, streams


def _to_a_pipe_that_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    os.close(reading)
    sys.stdout = os.fdopen(1, "w", closefd=False)


def _exit_code_and_complaint(*command: str) -> tuple[int | str | None, str]:
    _to_a_pipe_that_nobody_reads()
    with redirect_stderr(io.StringIO()) as complaint:
        try:
            code: int | str | None = cli.main(command)
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()  # as at the end of the process
    return code, complaint.getvalue()


@pytest.mark.parametrize("command", [("recipes",), ("recipes", "--help"), ("train", "--print-config")])
def test_a_command_whose_reader_leaves_ends_without_a_word(command: tuple[str, ...]) -> None:
    assert run_ranks(_exit_code_and_complaint, 1, *command) == [(1, "")]


def _exit_code_and_complaint_on_a_full_disk() -> tuple[int, str]:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    with redirect_stderr(io.StringIO()) as complaint:
        code = cli.main(["recipes"])
        sys.stdout.flush()
    return code, complaint.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is full")
def test_a_full_disk_is_one_line() -> None:
    expected = "thinwire: cannot write to standard output: No space left on device\n"
    assert run_ranks(_exit_code_and_complaint_on_a_full_disk, 1) == [(1, expected)]


def _write_on() -> bool:
    _to_a_pipe_that_nobody_reads()
    stdout = streams.Lasting(sys.stdout)
    for _ in range(3):
        stdout.write("word " * 10_000)
        stdout.flush()
    return os.path.samestat(os.fstat(1), os.stat(os.devnull))


def test_a_process_that_must_last_goes_on_when_its_reader_leaves() -> None:
    assert run_ranks(_write_on, 1) == [True]


def _without_stdout() -> tuple[int, bool, bool]:
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]  # as Python starts with `>&-`
    code = cli.main(["--version"])
    with open(os.devnull) as file:
        return code, os.get_inheritable(1), file.fileno() > 2


def test_a_closed_stdout_is_the_null_device_and_no_other_file_takes_its_number() -> None:
    assert run_ranks(_without_stdout, 1) == [(0, True, True)]


def test_what_a_killed_progress_bar_leaves_on_a_terminal_is_undone_and_nothing_is_written_elsewhere() -> None:
    terminal, writing = os.openpty()
    with os.fdopen(writing, "w") as stream:
        streams.end_progress_bar(stream)
        assert os.read(terminal, 100) == b"\r\x1b[K\x1b[?25h"
    os.close(terminal)
    elsewhere = io.StringIO()
    streams.end_progress_bar(elsewhere)
    assert elsewhere.getvalue() == ""
