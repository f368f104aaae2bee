from pathlib import Path

import pytest

from thinwire.doctor import findings
from thinwire.doctor.compiler import CompileCheck
from thinwire.doctor.installed import Package, requirements, torch_build
from thinwire.doctor.interfaces import Interface
from thinwire.doctor.probe import Probe

GOOD = {"": [Package("torch", ">=2.13,<2.15", "2.13.0+cpu")], "train": [Package("tyro", ">=1.0", "1.0.17")]}
CARRIED = {op: {"float32": "yes", "float64": "yes", "uint8": "yes"} for op, _ in findings.NEEDED}
KNOWN = [Interface("lo", ("127.0.0.1",), "unknown", None), Interface("eth0", ("10.0.0.2",), "up", 1000)]
WORKS = CompileCheck(True, "/usr/bin/g++", 3.0)


def _rank(rank: int, host: str, interface: str) -> dict[str, object]:
    return {"rank": rank, "host": host, "interface": interface, "address": "10.0.0.1"}


def test_a_complete_machine_has_no_problem() -> None:
    assert list(findings.machine_problems(GOOD, KNOWN)) == []
    assert list(findings.probe_problems(Probe(2, [_rank(0, "a", "lo")], {"gloo": CARRIED}))) == []


def test_a_missing_extra_comes_with_its_pip_command() -> None:
    missing = {**GOOD, "train": [Package("tyro", ">=1.0", None), Package("rich", ">=14.0", None)]}
    (problem,) = findings.machine_problems(missing, KNOWN)
    assert problem == "thinwire train needs tyro, rich: pip install 'thinwire[train]'"


@pytest.mark.parametrize(
    ("found", "needs", "fits"),
    [("2.13.0+cpu", ">=2.13,<2.15", True), ("2.9.1", ">=2.13,<2.15", False), ("2.15.0", "<2.15", False)],
)
def test_versions_are_compared_as_versions(found: str, needs: str, fits: bool) -> None:
    assert Package("torch", needs, found).fits is fits


def test_an_old_torch_is_a_problem() -> None:
    old = {**GOOD, "": [Package("torch", ">=2.13,<2.15", "2.9.1")]}
    assert list(findings.machine_problems(old, KNOWN)) == ["thinwire needs torch >=2.13,<2.15, found 2.9.1"]


def test_an_interface_that_does_not_exist_is_named_with_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    (problem,) = findings.machine_problems(GOOD, KNOWN)
    assert problem == "GLOO_SOCKET_IFNAME=eth9 names no interface of this machine; it has lo, eth0"


def test_a_python_without_sources_needs_other_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (problem,) = findings.machine_problems(GOOD, KNOWN)
    assert problem.startswith("data.files: no Python sources")


def test_what_gloo_cannot_carry_is_a_problem() -> None:
    lacking = {**CARRIED, "all_to_all": {"uint8": "Invalid scalar type"}}
    (problem,) = findings.probe_problems(Probe(2, [_rank(0, "a", "lo")], {"gloo": lacking}))
    assert problem == "gloo's all_to_all does not carry uint8 here: Invalid scalar type"


def test_another_machine_s_problem_is_reported_with_its_name() -> None:
    ranks = [_rank(0, "a", "eth0"), {**_rank(1, "b", "eth0"), "problems": ["thinwire train needs tyro"]}]
    (problem,) = findings.probe_problems(Probe(2, ranks, {"gloo": CARRIED}))
    assert problem == "rank 1 on b: thinwire train needs tyro"


def test_ranks_that_cannot_talk_are_a_problem() -> None:
    (problem,) = findings.probe_problems(Probe(2, error="rank 1: connection refused"))
    assert problem == "2 ranks cannot talk to each other: rank 1: connection refused"


def test_loopback_between_machines_is_advised_against() -> None:
    probe = Probe(2, [_rank(0, "a", "eth0"), _rank(1, "b", "lo")], {"gloo": CARRIED})
    advice = list(findings.advice(probe, KNOWN, None, WORKS))
    assert "gloo listens on loopback on b: set GLOO_SOCKET_IFNAME there" in advice


def test_the_interface_for_several_machines_is_told_with_how_to_set_it() -> None:
    probe = Probe(2, [_rank(0, "a", "lo"), _rank(1, "a", "lo")], {"gloo": CARRIED})
    (advice,) = findings.advice(probe, KNOWN, {"interface": "lo", "address": "127.0.0.1"}, WORKS)
    assert "gloo would use lo here" in advice
    assert "set GLOO_SOCKET_IFNAME" in advice
    assert advice.endswith("choose from eth0")


def test_a_missing_compiler_is_advice_not_a_problem() -> None:
    broken = CompileCheck(False, None, 4.0, "No working C++ compiler found")
    probe = Probe(2, [_rank(0, "a", "lo")], {"gloo": CARRIED})
    advice = list(findings.advice(probe, KNOWN, None, broken))
    assert any(line.startswith("install g++") and "No working C++ compiler" in line for line in advice)


def test_the_requirements_are_thinwire_s_own() -> None:
    found = requirements()
    assert [package.name for package in found[""]] == ["torch"]
    assert {"transformers", "tyro"} <= {package.name for package in found["train"]}
    assert "gloo" in torch_build()["built_with"]
