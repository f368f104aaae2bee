"""What is installed: Python, torch with its backends and devices, and thinwire's extras."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion


@dataclass(frozen=True)
class Package:
    """A requirement of one of thinwire's extras, and the version found."""

    name: str
    needs: str  # such as ">=5.0"
    found: str | None

    @property
    def fits(self) -> bool:
        return self.found is not None and _satisfies(self.found, self.needs)


def machine() -> dict[str, Any]:
    """Python, operating system, cores."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def torch_build() -> dict[str, Any]:
    """The torch build: version, accelerators, distributed backends it was built with."""
    cuda = torch.cuda.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
        "distributed": dist.is_available(),
        "built_with": _built_with() if dist.is_available() else [],
    }


def requirements() -> dict[str, list[Package]]:
    """extra -> its packages, from thinwire's own metadata; the core's are under ""."""
    found: dict[str, list[Package]] = {"": []}
    for line in metadata.requires("thinwire") or []:
        match = re.match(r"([A-Za-z0-9._-]+)\s*([^;]*)(?:;.*extra\s*==\s*['\"]([\w-]+)['\"])?", line)
        if match:
            name, needs, extra = match[1], match[2].strip(), match[3] or ""
            found.setdefault(extra, []).append(Package(name, needs, _version(name)))
    return found


def _built_with() -> list[str]:
    checks = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, available in checks.items() if available()]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfies(version: str, needs: str) -> bool:
    """Whether a version meets a list of bounds such as ">=2.13,<2.15"."""
    own = TorchVersion(version)
    for operator, bound in re.findall(r"(>=|<=|==|!=|<|>)\s*([\w.]+)", needs):
        compared = {
            ">=": own >= bound,
            "<=": own <= bound,
            "==": own == bound,
            "!=": own != bound,
            "<": own < bound,
            ">": own > bound,
        }
        if not compared[operator]:
            return False
    return True
