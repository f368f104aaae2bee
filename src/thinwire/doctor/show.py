"""The doctor's report for people: sections of name and value, with rich where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

Section = tuple[str, list[tuple[str, str]]]

HIDDEN_EXTRAS = ("docs", "dev")  # nobody needs them to train


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    try:
        _show_rich(report)
    except ImportError:
        sys.stdout.write(plain(report))


def plain(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = []
    for title, rows in sections(report):
        width = max((len(name) for name, _ in rows), default=0)
        lines += [title, *(f"  {name:<{width}}  {value}" for name, value in rows), ""]
    return "\n".join([*lines, *verdict(report), ""])


def verdict(report: dict[str, Any]) -> list[str]:
    """Problems, advice, and whether a training job would run."""
    lines = [f"problem: {problem}" for problem in report["problems"]]
    lines += [f"advice: {advice}" for advice in report["advice"]]
    return [*lines, "a training job would run here" if report["ok"] else "a training job would FAIL here"]


def sections(report: dict[str, Any]) -> Iterator[Section]:
    """Everything found, in reading order."""
    machine, build = report["machine"], report["torch"]
    accelerator = (
        f"CUDA {build['cuda']}: {', '.join(build['gpus'])}" if build["gpus"] else "none, the CPU computes"
    )
    yield (
        "machine",
        [
            ("python", f"{machine['python']}, {machine['system']}, {machine['cores']} cores"),
            ("torch", f"{build['version']} (backends: {', '.join(build['built_with']) or 'none'})"),
            ("accelerator", accelerator),
            ("torch.compile", _compile(report["compile"])),
        ],
    )
    yield "extras", [(extra, _extra(packages)) for extra, packages in _extras(report)]
    for name, backend in report["backends"].items():
        if backend["available"]:
            yield f"{name} carries", list(_carries(backend))
        else:
            yield f"{name} carries", [("nothing", "not available here")]
    used = (report["gloo"] or {}).get("interface")
    yield "network interfaces", [(i["name"], _interface(i, i["name"] == used)) for i in report["interfaces"]]
    if len({rank["host"] for rank in report["ranks"]}) > 1:
        yield (
            "ranks",
            [(f"rank {r['rank']}", f"{r['host']}, {r['interface']} {r['address']}") for r in report["ranks"]],
        )
    names = sorted({str(rank["interface"]) for rank in report["ranks"]})
    title = f"links between ranks, over {', '.join(names)}" if names else "links between ranks"
    yield title, [_link(link) for link in report["links"]] or [("none", "not measured")]


def _compile(compiled: dict[str, Any] | None) -> str:
    if compiled is None:
        return "not checked"
    if compiled["works"]:
        return f"works ({compiled['compiler']}, {compiled['seconds']:.0f} s for a first kernel)"
    return f"does not work: {compiled['error']}"


def _extras(report: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for extra, packages in report["extras"].items():
        if extra not in HIDDEN_EXTRAS:
            yield extra, packages


def _extra(packages: list[dict[str, Any]]) -> str:
    return ", ".join(f"{p['name']} {p['found'] or 'MISSING'}" for p in packages)


def _carries(backend: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Collectives that carry the same dtypes share a line."""
    together: dict[tuple[str, ...], list[str]] = {}
    for collective, dtypes in backend["carries"].items():
        together.setdefault(tuple(dtypes), []).append(collective)
    for dtypes, collectives in together.items():
        refused = list(backend["refuses"][collectives[0]])
        carried = f"all but {', '.join(refused)}" if refused and dtypes else ", ".join(dtypes) or "nothing"
        yield ", ".join(collectives), carried if refused else "every dtype"


def _interface(entry: dict[str, Any], used: bool) -> str:
    speed = f", {entry['speed_mbit']} Mbit/s" if entry["speed_mbit"] else ""
    addresses = " ".join(entry["addresses"]) or "no address"
    return f"{addresses} ({entry['state']}{speed})" + ("  <- gloo uses this one" if used else "")


def _link(link: dict[str, Any]) -> tuple[str, str]:
    return (
        f"rank {link['source']} -> rank {link['target']}",
        f"{link['bandwidth_mbit']:,.0f} Mbit/s, {link['latency_us']:,.0f} µs",
    )


def _show_rich(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    for title, rows in sections(report):
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        console.print(table)
        console.print()
    for line in verdict(report):
        style = "red" if line.startswith("problem") else "yellow" if line.startswith("advice") else "bold"
        console.print(Text(line, style=style))
