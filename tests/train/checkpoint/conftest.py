from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.train.small_run import save_steps


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[int, Any]]]:
    """A directory with steps 1 and 2 of a run on two ranks, and what it held at each. Copy it before use."""
    directory = tmp_path_factory.mktemp("two_steps")
    return directory, run_ranks(save_steps, 2, directory, [1, 2])
