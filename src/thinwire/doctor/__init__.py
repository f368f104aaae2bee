"""`thinwire doctor`: would a training job run on this machine, how fast is its wire, what should be set?

Started alone it tries everything with two ranks of its own; started under torchrun on every node of a cluster,
with the ranks of that job, and rank 0 reports for all. Exit code 1 if a `thinwire train` job would fail.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from thinwire.usage import Parser


def main(argv: list[str]) -> int:
    """Examine the machine, print the report, return the exit code."""
    parser = Parser(
        prog="thinwire doctor",
        description="Check this machine (or, under torchrun, all machines of a job): torch, backends and what "
        "they carry, network interfaces, link speed, torch.compile, extras. Exit code 1 if a training job would "
        "fail.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)

    from thinwire.doctor.show import show

    report = examine()
    if int(os.environ.get("RANK", "0")) == 0:
        if arguments.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            show(report)
    return 0 if report["ok"] else 1


def examine() -> dict[str, Any]:
    """Everything the doctor finds out, as plain values. Under torchrun all ranks must call this."""
    from thinwire.doctor import findings
    from thinwire.doctor.compiler import check_compile
    from thinwire.doctor.installed import machine, requirements, torch_build
    from thinwire.doctor.interfaces import interfaces
    from thinwire.doctor.probe import gloo_address, probe_here, probe_job, under_torchrun

    known, required, build = interfaces(), requirements(), torch_build()
    own_problems = list(findings.machine_problems(required, known))
    first_here = int(os.environ.get("LOCAL_RANK", "0")) == 0
    compiled = check_compile("cuda" if build["gpus"] else "cpu") if first_here else None
    if under_torchrun():
        probe = probe_job({"problems": own_problems, "compile": asdict(compiled)} if compiled else {})
        gloo = next(({k: r[k] for k in ("interface", "address")} for r in probe.ranks), None)
    else:
        gloo = gloo_address()
        probe = probe_here()
    problems = list(findings.probe_problems(probe))
    if not any("problems" in rank for rank in probe.ranks):
        problems = own_problems + problems
    return {
        "ok": not problems,
        "problems": problems,
        "advice": list(findings.advice(probe, known, gloo, compiled)) if compiled else [],
        "machine": machine(),
        "torch": build,
        "backends": {name: _backend(probe.carries.get(name, {})) for name in ("gloo", "nccl")},
        "interfaces": [asdict(entry) for entry in known],
        "gloo": gloo,
        "ranks": probe.ranks,
        "links": probe.links,
        "compile": asdict(compiled) if compiled else None,
        "extras": {extra or "core": [asdict(p) for p in packages] for extra, packages in required.items()},
    }


def _backend(carries: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Answers sorted into what is carried and what is not, with the backend's own words."""
    return {
        "available": bool(carries),
        "carries": {op: [d for d, a in answers.items() if a == "yes"] for op, answers in carries.items()},
        "refuses": {op: {d: a for d, a in answers.items() if a != "yes"} for op, answers in carries.items()},
    }
