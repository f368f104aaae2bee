"""What is wrong (a training job would fail) and what to set (it would run, but better otherwise)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from thinwire.doctor.carries import NEEDED
from thinwire.doctor.compiler import CompileCheck
from thinwire.doctor.installed import Package
from thinwire.doctor.interfaces import Interface
from thinwire.doctor.probe import LOOPBACK, Probe
from thinwire.train.data.text import DataError, standard_library


def machine_problems(requirements: dict[str, list[Package]], known: list[Interface]) -> Iterator[str]:
    """What would make a training job fail on this machine alone, as sentences."""
    for package in requirements[""]:
        if not package.fits:
            yield f"thinwire needs {package.name} {package.needs}, found {package.found}"
    missing = [package.name for package in requirements.get("train", []) if package.found is None]
    if missing:
        yield f"thinwire train needs {', '.join(missing)}: pip install 'thinwire[train]'"
    for package in requirements.get("train", []):
        if package.found is not None and not package.fits:
            yield f"thinwire train needs {package.name} {package.needs}, found {package.found}"
    if not (dist.is_available() and dist.is_gloo_available()):
        yield "this torch build has no gloo backend: install a build with torch.distributed"
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    names = [entry.name for entry in known]
    if chosen and not set(chosen.split(",")) & set(names):
        yield f"GLOO_SOCKET_IFNAME={chosen} names no interface of this machine; it has {', '.join(names)}"
    if not os.access(Path.cwd(), os.W_OK):
        yield f"the working directory {Path.cwd()} cannot be written to: run elsewhere or pass --out DIR"
    try:
        standard_library()
    except DataError as error:
        yield str(error)


def probe_problems(probe: Probe) -> Iterator[str]:
    """What would make the ranks of a training job fail together."""
    for rank in probe.ranks:
        for problem in rank.get("problems", []):
            yield f"rank {rank['rank']} on {rank['host']}: {problem}"
    if probe.error:
        yield f"{probe.world_size} ranks cannot talk to each other: {probe.error}"
        return
    for backend, collectives in probe.carries.items():
        for collective, dtype in NEEDED:
            answer = collectives[collective][dtype]
            if answer != "yes":
                yield f"{backend}'s {collective} does not carry {dtype} here: {answer}"


def advice(
    probe: Probe, known: list[Interface], gloo: dict[str, str | None] | None, compiled: CompileCheck
) -> Iterator[str]:
    """What to set or install, as sentences."""
    if not compiled.works:
        remedy = "reinstall g++" if compiled.compiler else "install g++ (apt-get install g++)"
        yield (
            f"{remedy}: torch.compile does not work here ({compiled.error}), so encoding and decoding run "
            "uncompiled: the same bits, several times slower"
        )
    if len({rank["host"] for rank in probe.ranks}) < 2:
        if gloo is not None:
            others = [entry.name for entry in known if entry.name != LOOPBACK and entry.addresses]
            choice = f"choose from {', '.join(others)}" if others else "this machine has none but loopback"
            yield (
                f"in a job on several machines gloo would use {gloo['interface']} here; if that is not the wire "
                f"between them, set GLOO_SOCKET_IFNAME (NCCL_SOCKET_IFNAME for NCCL) on each: {choice}"
            )
        return
    for rank in probe.ranks:
        if rank["interface"] == LOOPBACK:
            yield f"gloo listens on loopback on {rank['host']}: set GLOO_SOCKET_IFNAME there"
    if len({rank["interface"] for rank in probe.ranks}) > 1:
        named = ", ".join(f"{rank['host']}: {rank['interface']}" for rank in probe.ranks)
        yield f"ranks use interfaces of different names ({named}): if one is wrong, set GLOO_SOCKET_IFNAME there"
