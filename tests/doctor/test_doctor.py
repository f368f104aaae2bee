"""The command itself. Slow part: torch.compile of a first kernel takes 15 s or more, so one run is shared."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import needs_namespaces
from thinwire.bench.network import emulated_network
from thinwire.doctor.show import plain, show

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
JOB = ["--master-port", "29500", "-m", "thinwire", "doctor", "--json"]
DOCTOR = [sys.executable, "-m", "thinwire", "doctor", "--json"]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def no_compiler(tmp_path: Path) -> str:
    """A PATH on which there is `ip` and no compiler."""
    ip = shutil.which("ip")
    if ip:
        (tmp_path / "ip").symlink_to(ip)
    return str(tmp_path)


def test_this_machine_can_train(report: dict[str, Any]) -> None:
    assert report["ok"]
    assert report["problems"] == []
    assert report["torch"]["version"]
    assert "uint8" in report["backends"]["gloo"]["carries"]["all_to_all"]
    assert "int16" in report["backends"]["gloo"]["refuses"]["all_to_all"]
    assert all(package["found"] for package in report["extras"]["train"])
    assert report["compile"]["works"] is (shutil.which("g++") is not None)


def test_the_interface_of_gloo_is_one_of_this_machine(report: dict[str, Any]) -> None:
    addresses = {i["name"]: i["addresses"] for i in report["interfaces"]}
    assert report["gloo"]["address"] in addresses[report["gloo"]["interface"]]
    assert [rank["interface"] for rank in report["ranks"]] == ["lo", "lo"]


def test_links_between_two_local_ranks_are_measured(report: dict[str, Any]) -> None:
    assert [(link["source"], link["target"]) for link in report["links"]] == [(0, 1), (1, 0)]
    assert all(link["bandwidth_mbit"] > 1 and link["latency_us"] > 0 for link in report["links"])


def test_people_read_the_same_with_and_without_rich(
    report: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show(report)
    with_rich = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(report)
    without = capsys.readouterr().out
    assert without == plain(report)
    for text in (with_rich, without):
        assert "gloo uses this one" in text
        assert "rank 0 -> rank 1" in text
        assert text.rstrip().endswith("a training job would run here")


def test_ranks_that_cannot_talk_mean_exit_code_1(no_compiler: str) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth99", "PATH": no_compiler}
    done = subprocess.run(DOCTOR, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"][0].startswith("GLOO_SOCKET_IFNAME=eth99 names no interface of this machine")
    assert "Unable to find address for: eth99" in found["problems"][1]
    assert not found["compile"]["works"]
    assert any(line.startswith("install g++") for line in found["advice"])


@needs_namespaces
def test_under_torchrun_the_job_s_own_wire_is_measured(no_compiler: str) -> None:
    rate = 100_000_000
    with emulated_network(2, rate=rate) as hosts:
        ranks = [
            subprocess.Popen(
                host.command([*TORCHRUN, "--node-rank", str(host.rank), "--master-addr", host.master, *JOB]),
                env=host.environment({**os.environ, "PATH": no_compiler}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for host in hosts
        ]
        outputs = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outputs
    found = json.loads(outputs[0][0])
    assert outputs[1][0] == "", "only rank 0 reports"
    assert [rank["interface"] for rank in found["ranks"]] == ["wire", "wire"]
    assert [rank["address"] for rank in found["ranks"]] == [host.address for host in hosts]
    assert all(0.5 * rate < link["bandwidth_mbit"] * 1e6 < 1.2 * rate for link in found["links"])
