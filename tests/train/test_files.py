from __future__ import annotations

from pathlib import Path

import pytest

from thinwire.train import files


def test_a_file_is_the_old_one_until_it_is_the_whole_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.toml"
    files.replace(path, "old")

    def killed(*_: object) -> None:
        assert path.read_text() == "old"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            files.replace(path, "new")
    assert path.read_text() == "old"
    files.replace(path, "newer")
    assert path.read_text() == "newer"
    assert [child.name for child in tmp_path.iterdir()] == ["config.toml"]
