"""Ranks that really talk: the job's own under torchrun, else two that are started here as a training job's are.

Every rank tells its host, the interface that gloo listens on and what it found wrong with its machine;
together they try what the collectives of each backend carry and measure the links between them. As those of
`thinwire train` do, the two ranks talk over loopback unless GLOO_SOCKET_IFNAME names another interface.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import elastic_launch

from thinwire.doctor.carries import carried_dtypes
from thinwire.doctor.interfaces import interface_of, interfaces, listening_sockets
from thinwire.doctor.links import measure_links
from thinwire.train.local import local_launch, quiet_launcher, use_loopback
from thinwire.usage import first_line

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=300)  # another host's compile check may take four minutes
LOCAL_RANKS = 2
LOOPBACK = "lo"

Local = dict[str, Any]
"""What a rank says about its own machine; gathered from all ranks as it is."""


@dataclass(frozen=True)
class Probe:
    """What the ranks found out; `error` says why they could not."""

    world_size: int
    ranks: list[Local] = field(default_factory=list)
    carries: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    """backend -> collective -> dtype -> "yes", or why not"""
    links: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


def under_torchrun() -> bool:
    """Whether this process is one rank of a job."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def probe_here() -> Probe:
    """Start two ranks on this machine, let them probe, and wait for them."""
    with tempfile.TemporaryDirectory(prefix="thinwire-doctor-") as folder, _loopback():
        quiet_launcher()
        config = local_launch(
            LOCAL_RANKS,
            run_id="thinwire-doctor",
            start_method="spawn",
            logs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
        )
        try:
            results: dict[int, Any] = elastic_launch(config, _probe_in_new_group)()
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            return Probe(LOCAL_RANKS, error=f"rank {rank}: {_gist(failure.message)}")
        except (RuntimeError, OSError) as error:
            return Probe(LOCAL_RANKS, error=f"the launcher failed: {first_line(error)}")
    found: Probe = results[0]
    return found


def probe_job(local: Local) -> Probe:
    """Probe with the ranks of the torchrun job that this process belongs to; all of them must call this."""
    try:
        return _probe(local)
    except (RuntimeError, ValueError) as error:
        world = int(os.environ["WORLD_SIZE"])
        return Probe(world, error=f"rank {os.environ['RANK']}: {first_line(error)}")


def gloo_address() -> dict[str, str | None] | None:
    """Where gloo listens in this environment; found by a group of one rank, None where it cannot be made."""
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's __all__
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    except (RuntimeError, ValueError) as error:
        logger.info("gloo finds no interface: %s", first_line(error))
        return None
    try:
        return _new_listener()
    finally:
        dist.destroy_process_group()


@record
def _probe_in_new_group() -> Probe:
    return _probe({})


def _probe(local: Local) -> Probe:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        world = dist.get_world_size()
        ranks: list[Local] = [{} for _ in range(world)]
        dist.all_gather_object(ranks, {**_this_rank(), **local})
        group = dist.group.WORLD
        assert group is not None
        carries = {"gloo": carried_dtypes(group, torch.device("cpu"))}
        if torch.cuda.is_available() and dist.is_nccl_available():
            carries["nccl"] = _nccl_carries(world)
        return Probe(world, ranks, carries, measure_links())
    finally:
        dist.destroy_process_group()


def _nccl_carries(world: int) -> dict[str, dict[str, str]]:
    """NCCL allows one rank per GPU: where there are fewer GPUs than ranks, rank 0 tries it alone."""
    enough = int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count()
    members = list(range(world)) if enough else [0]
    group = dist.new_group(members, backend="nccl")
    if dist.get_rank() not in members:
        return {}
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return carried_dtypes(group, device)


def _this_rank() -> Local:
    return {"rank": dist.get_rank(), "host": socket.gethostname(), **_new_listener()}


def _new_listener() -> dict[str, str | None]:
    """Interface and address on which a new gloo group listens."""
    before = listening_sockets()
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    address = next((a for inode, a in listening_sockets().items() if inode not in before), None)
    dist.destroy_process_group(group)
    return {"interface": interface_of(address, interfaces()) if address else None, "address": address}


def _gist(message: Any) -> str:
    """The first line of an elastic error message, which is a string or {"message": ..., "extraInfo": ...}."""
    text = message.get("message", "") if isinstance(message, dict) else message
    return str(text).strip().partition("\n")[0] or "no message"


@contextmanager
def _loopback() -> Iterator[None]:
    """Loopback as the trainer chooses it, for the ranks started meanwhile."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    use_loopback()
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
