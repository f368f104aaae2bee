"""`thinwire bench local-updates`: its rows, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from thinwire import recipes
from thinwire.bench import local_updates
from thinwire.bench.jobs import Trained
from thinwire.bench.methods import LOCAL_UPDATES, description, optimizer_of


def test_rows_compare_seed_by_seed_with_ddp() -> None:
    def run(loss: float, sent: int) -> Trained:
        return Trained(0.1, sent, [(10, loss)])

    rows = local_updates.compare({"ddp": [run(2.0, 800), run(3.0, 800)], "pier": [run(2.2, 40), run(3.0, 40)]})
    assert rows[1].val_loss == pytest.approx(2.6)
    assert rows[1].ratio_to_ddp == pytest.approx(1.05)
    assert rows[1].ratio_spread == pytest.approx(0.05 * 2**0.5)
    assert rows[1].sent_ratio_to_ddp == 0.05
    assert "pier                        2.6000 ± 0.5657   1.0500 ± 0.0707      0.0500" in local_updates.table(rows)


def test_methods_are_told_apart_and_muon_goes_with_muloco() -> None:
    assert len({description(method) for method in LOCAL_UPDATES}) == len(LOCAL_UPDATES)
    assert optimizer_of("muloco") == "muon"
    assert {optimizer_of(name) for name in (*LOCAL_UPDATES, "nvfp4", "torch-fp16")} == {"adamw"}
    assert "DiLoCo" in description("diloco")
    assert recipes.get("diloco").method is not None


def test_it_trains_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "diloco-0.9-0.8",
        "--ranks",
        "2",
        "--steps",
        "50",
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
        "--json",
    ]
    assert local_updates.main(arguments) == 0
    first = capsys.readouterr()
    rows = {row["method"]: row for row in json.loads(first.out)["rows"]}
    assert rows["ddp"]["ratio_to_ddp"] == 1.0
    assert rows["diloco-0.9-0.8"]["ratio_to_ddp"] == pytest.approx(
        0.87, abs=0.1
    )  # outer momentum makes up for a low rate
    # two rounds and the ten steps after them, against a reduction in each of 47 counted steps
    assert rows["diloco-0.9-0.8"]["sent_ratio_to_ddp"] == pytest.approx(3 / 47, rel=0.01)
    assert local_updates.main(arguments) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "running" not in again.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fedavg"], "unknown method 'fedavg'; choose of local-sgd"),
        (["--ranks", "3"], "--ranks 3: two of the methods have two groups of ranks, so it must be even"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        local_updates.main(arguments)
    assert sentence in capsys.readouterr().err
