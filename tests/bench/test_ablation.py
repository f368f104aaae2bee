"""`thinwire bench ablation`: its cells are what the recipes are, and its rows what they say."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from thinwire import recipes
from thinwire.bench import ablation
from thinwire.bench.jobs import Trained
from thinwire.bench.methods import FEEDBACKS, GEOMETRIES, cell, cell_reducer


@pytest.mark.parametrize(
    ("parts", "recipe"),
    [
        (("nvfp4", "gift", "error"), "gift-nvfp4"),
        (("int4", "euclidean", "error"), "int4"),
        (("int4", "hadamard", "error"), "int4-hadamard"),
        (("fp8_e5m2_pow2", "euclidean", "none"), "fp8"),
        (("int4", "euclidean", "loco"), "int4-loco"),
    ],
)
def test_cells_that_are_recipes_are_those(parts: tuple[str, str, str], recipe: str) -> None:
    assert cell_reducer(cell(*parts)) == recipes.get(recipe).reducer


def test_all_cells_of_a_format_differ() -> None:
    grid = product(["nvfp4"], GEOMETRIES, FEEDBACKS)
    assert len({repr(cell_reducer(cell(*parts))) for parts in grid}) == 9


def test_rows_compare_seed_by_seed_with_ddp() -> None:
    def run(loss: float, sent: int) -> Trained:
        return Trained(0.1, sent, [(10, loss)])

    parts = ("nvfp4", "gift", "none")
    trained = {"ddp": [run(2.0, 800), run(3.0, 800)], cell(*parts): [run(2.2, 100), run(3.0, 100)]}
    (row,) = ablation.compare(trained, [parts])
    assert row.ratio_to_ddp == pytest.approx(1.05)
    assert row.ratio_spread == pytest.approx(0.05 * 2**0.5)
    assert row.val_loss == pytest.approx(2.6)
    assert row.sent_ratio_to_ddp == 0.125


def test_an_unknown_format_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        ablation.main(["nvfp4", "fp3"])
    assert capsys.readouterr().err.startswith("thinwire bench ablation: unknown format 'fp3'; choose of fp32")


@pytest.mark.full
def test_a_grid_is_trained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["nvfp4", "--steps", "10", "--seeds", "1", "--out", str(tmp_path), "--json"]
    assert ablation.main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    assert [(row["geometry"], row["feedback"]) for row in first["rows"]] == [
        (geometry, feedback) for geometry in ("euclidean", "hadamard", "gift") for feedback in ("none", "error")
    ]
    assert all(0.13 < row["sent_ratio_to_ddp"] < 0.25 for row in first["rows"])  # refreshes at 1, 2, 3, 5, 9
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert ablation.main(argv) == 0
    assert json.loads(capsys.readouterr().out) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
