import argparse
import importlib
import json

import pytest
import torch
import torch.distributed as dist

from tests.support.namespaces import needs_namespaces
from tests.support.ranks import RankFailed, run_ranks
from thinwire.bench import BENCHES, averaging, main, network
from thinwire.bench.averaging import Job, Method
from thinwire.bench.collectives import Row, table
from thinwire.collectives import all_reduce_bytes

MEBIBYTE = 2**20


def _rows(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, float]]:
    assert main(["collectives", *argv, "--json"]) == 0, capsys.readouterr().err
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


@needs_namespaces
def test_no_method_beats_the_rate_and_counters_agree_with_the_ledger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["--rate", "100mbit", "--ranks", "3", "--mib", "2", "--repeats", "2", "--formats", "fp8_e4m3,bf16"]
    rows = _rows(argv, capsys)
    assert list(rows) == ["gloo_fp32", "fp8_e4m3", "bf16"]
    assert rows["gloo_fp32"]["speedup_vs_fp32"] == 1.0
    assert rows["gloo_fp32"]["sent_bytes"] == all_reduce_bytes(2 * MEBIBYTE, 3)
    assert rows["bf16"]["sent_bytes"] == pytest.approx(rows["gloo_fp32"]["sent_bytes"] / 2, rel=1e-3)
    for row in rows.values():
        assert row["ratio_to_limit"] == pytest.approx(row["seconds"] / (row["sent_bytes"] * 8 / 100e6))
        assert row["ratio_to_limit"] > 0.9, "faster than the emulated wire"
        assert row["sent_bytes"] <= row["wire_bytes"] < 1.1 * row["sent_bytes"]


def test_without_a_rate_it_runs_over_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--ranks", "2", "--mib", "1", "--repeats", "1", "--formats", "fp8_e5m2"]
    rows = _rows(argv, capsys)
    assert rows["fp8_e5m2"]["ratio_to_limit"] is None
    assert rows["fp8_e5m2"]["wire_bytes"] is None
    assert 0 < rows["fp8_e5m2"]["error"] < 0.1


def test_the_table_explains_its_columns_in_its_last_line() -> None:
    rows = [Row("gloo_fp32", 2.0, 1.0, None, 10**6, None, 1e-8)]
    arguments = argparse.Namespace(rate=None, mib=1, ranks=2, repeats=1)
    title, heads, *_, legend = table(arguments, rows).splitlines()
    assert title.startswith("all-reduce of 1 MiB of float32 on 2 ranks, over loopback")
    for head in ("speed-up", "x limit", "MB sent", "on the wire", "error"):
        assert head in heads
        assert f"{head}: " in legend


def test_where_not_root_one_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert main(["collectives", "--rate", "200mbit"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("thinwire bench collectives: an emulated network needs root")
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--rate", "fast"], "--rate: rate 'fast' is not a rate of at least 8kbit; write it like 200mbit"),
        (["--formats", "fp7"], "--formats: unknown format 'fp7'; choose one of fp32"),
        (["--ranks", "1"], "--ranks: '1' is not a whole number from 2 to 64"),
        (["--mib", "0"], "--mib: '0' is not a whole number from 1"),
        (["--repeats", "some"], "--repeats: 'some' is not a whole number"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["collectives", *argv])
    assert ended.value.code == 2
    written = capsys.readouterr().err
    assert complaint in written
    assert written.count("\n") == 1


def test_an_unknown_bench_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 2
    assert "there is no bench 'speed'; there are formats, collectives" in capsys.readouterr().err


def _measure_sum_instead_of_mean() -> None:
    wrong = Method("wrong", dist.all_reduce, lambda: 0, tolerance=0.1)
    averaging._compressed = lambda name, values: wrong
    averaging.measure(Job(1024, 1, ("wrong",), store=""))


def _measure_with_ranks_that_differ() -> None:
    def drift(buffer: torch.Tensor) -> None:
        dist.all_reduce(buffer)
        buffer.div_(dist.get_world_size())
        buffer[dist.get_rank()] *= 1.0001

    averaging._compressed = lambda name, values: Method("drifting", drift, lambda: 0, tolerance=0.1)
    averaging.measure(Job(1024, 1, ("drifting",), store=""))


def test_a_wrong_mean_fails_the_bench() -> None:
    with pytest.raises(RankFailed, match=r"wrong: relative error .* of the mean, expected 1.00e-01"):
        run_ranks(_measure_sum_instead_of_mean, 2)


def test_ranks_with_different_bits_fail_the_bench() -> None:
    with pytest.raises(RankFailed, match="drifting: the ranks hold different bits"):
        run_ranks(_measure_with_ranks_that_differ, 2)


def test_every_bench_of_the_table_is_there() -> None:
    for module, purpose in BENCHES.values():
        assert callable(importlib.import_module(module).main)
        assert purpose
