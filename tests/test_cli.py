"""The command table."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from thinwire import cli


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = "import sys; from thinwire import cli; cli.main(['--help']); print('tyro' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in result.stdout for name in cli.COMMANDS)
    assert result.stdout.endswith("False\n")


def test_an_unknown_command_is_answered_with_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("thinwire: there is no command 'trian'; there are train, tokenize")
    assert error.count("\n") == 1


def test_no_command_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "thinwire COMMAND" in capsys.readouterr().out


def test_every_command_names_a_module_that_exists() -> None:
    for target, _ in cli.COMMANDS.values():
        assert find_spec(target.partition(":")[0]) is not None, target


def test_a_missing_extra_is_one_line_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_tyro(name: str) -> object:
        raise ModuleNotFoundError("No module named 'tyro'", name="tyro")

    monkeypatch.setattr(cli.importlib, "import_module", no_tyro)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == (
        "thinwire: train needs the extra: pip install 'thinwire[train]' (no tyro)\n"
    )


def test_a_missing_module_of_thinwire_itself_is_not_blamed_on_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "train", ("thinwire.no_such_module:main", ""))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["train"])


class _Module:
    def __init__(self, error: Exception) -> None:
        self._error = error

    def main(self, argv: list[str]) -> int:
        raise self._error


def test_errors_of_the_machine_are_one_line_and_exit_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = _Module(OSError(28, "No space left on device", "x.json"))
    monkeypatch.setattr(cli.importlib, "import_module", lambda name: module)
    assert cli.main(["export"]) == 1
    assert capsys.readouterr().err == "thinwire export: [Errno 28] No space left on device: 'x.json'\n"
    assert cli.main(["export", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
