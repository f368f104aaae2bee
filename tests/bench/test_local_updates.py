"""`thinwire bench local-updates`: its rows, and a run of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.namespaces import needs_namespaces
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


def test_times_to_a_target_are_read_on_the_clock_of_the_slow_network() -> None:
    def run(*losses: float) -> Trained:
        return Trained(0.1, 1, [(5 * (n + 1), loss) for n, loss in enumerate(losses)])

    trained = {"ddp": [run(3.0, 2.0), run(2.0, 2.0)], "pier": [run(2.03, 2.01), run(2.01, 2.01)]}
    slow, quick = Trained(2.0, 1, [], [2.0 * n for n in range(1, 11)]), Trained(0.4, 1, [], [0.5] * 5 + [4.0] * 5)
    ddp, pier = local_updates.compare(trained, {"ddp": slow, "pier": quick})
    assert ddp.seconds_to_target == {"1.01": 15.0, "1.02": 15.0}  # steps 10 and 5
    assert pier.seconds_to_target == {"1.01": 2.25, "1.02": 0.5}  # steps 10 and 5; always 5
    assert pier.speedup_vs_ddp == {"1.01": pytest.approx(15 / 2.25), "1.02": 30.0}
    assert pier.comm_share == pytest.approx(0.75)
    text = local_updates.table([ddp, pier])
    assert "  0.4000  75.0%      2.2 s   6.67x      0.5 s  30.00x" in text
    late = local_updates.compare({**trained, "pier": [run(9.0, 9.0)] * 2}, {"ddp": slow, "pier": quick})[1]
    assert late.seconds_to_target == late.speedup_vs_ddp == {"1.01": None, "1.02": None}


@needs_namespaces
@pytest.mark.slow  # two methods on two networks
def test_it_trains_among_nodes_and_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["diloco-0.9-0.8", "--ranks", "2", "--steps", "50", "--seeds", "1", "--uplink", "20mbit"]
    arguments += ["--model", "llama-nano", "--lr", "5e-4"]
    arguments += ["--out", str(tmp_path), "--json"]
    assert local_updates.main(arguments) == 0
    first = capsys.readouterr()
    rows = {row["method"]: row for row in json.loads(first.out)["rows"]}
    ddp, diloco = rows["ddp"], rows["diloco-0.9-0.8"]
    assert ddp["ratio_to_ddp"] == 1.0
    assert diloco["ratio_to_ddp"] == pytest.approx(0.87, abs=0.1)  # outer momentum makes up for a low rate
    # two rounds and the ten steps after them, against a reduction in each of 47 counted steps
    assert diloco["sent_ratio_to_ddp"] == pytest.approx(3 / 47, rel=0.01)
    assert ddp["comm_share"] > 0.5
    assert diloco["step_seconds"] < 0.5 * ddp["step_seconds"]
    assert diloco["speedup_vs_ddp"]["1.02"] > 2
    assert local_updates.main(arguments) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "running" not in again.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fedavg"], "unknown method 'fedavg'; choose of local-sgd"),
        (["--ranks", "3"], "--ranks 3: two of the methods have two groups of ranks, so it must be even"),
        (["--uplink", "1mbit", "--nodes", "3"], "--nodes 3: 4 ranks cannot be shared out equally over them"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        local_updates.main(arguments)
    assert sentence in capsys.readouterr().err
