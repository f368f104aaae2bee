"""A slow network on one machine, carrying real traffic: namespaces on a bridge, limited by HTB.

    rank 0's namespace     rank 1's namespace      every rank owns a network namespace with one veth, `wire`
       [wire]──HTB            [wire]──HTB          HTB on it limits everything the rank sends
          │                      │
      HTB──[port0]───bridge───[port1]──HTB         HTB on the bridge's end limits everything it receives
                 switch's namespace

With `nodes`, ranks that are neighbours share a node, whose bridge reaches the other nodes by one uplink:

    [port0] [port1]──node0──HTB uplink HTB──core──HTB uplink HTB──node1──[port2] [port3]

The burst is small (about ten packets), so short messages feel the rate too. Nothing is created outside the
namespaces, whose names hold the id of the process that made them. Leaving the context removes them, also
after an exception, Ctrl-C, SIGTERM or SIGHUP; what a SIGKILL left behind the next network removes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from thinwire.bench.processes import signals_become_exceptions

logger = logging.getLogger(__name__)

PREFIX = "thinwire"
INTERFACE = "wire"
BURST_BYTES = 15_000
MASTER_PORT = 29_500
MAX_RANKS = 64

_networks = itertools.count()
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class NetworkUnavailable(RuntimeError):
    """This machine or this user cannot emulate a network; the message says why and what to do."""


def parse_rate(text: str) -> int:
    """Of an option: `"200mbit"` -> 200_000_000 bits per second; also bit, kbit and gbit, as tc spells them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", text.strip().lower())
    rate = round(float(match[1]) * _BITS[match[2]]) if match else 0
    if rate < 8_000:
        raise argparse.ArgumentTypeError(
            f"rate {text!r} is not a rate of at least 8kbit; write it like 200mbit, 1gbit or 500kbit"
        )
    return rate


@dataclass(frozen=True)
class Host:
    """One rank's namespace; processes started in it see the loopback device and `wire`, nothing else."""

    rank: int
    namespace: str
    switch: str
    """The namespace of the other end of `wire`."""
    address: str
    master: str

    @property
    def port(self) -> str:
        """The name of the other end of `wire`."""
        return f"port{self.rank}"

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv`, run inside this namespace."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a process here needs to find rank 0 and to make gloo and NCCL use `wire`."""
        return {
            **(os.environ if base is None else base),
            "MASTER_ADDR": self.master,
            "MASTER_PORT": str(MASTER_PORT),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
        }

    def counters(self) -> Counters:
        """The kernel's own counters of `wire`."""
        shown = _run("ip", "-n", self.namespace, "-j", "-s", "link", "show", "dev", INTERFACE)
        stats = json.loads(shown)[0]["stats64"]
        return Counters(sent_bytes=stats["tx"]["bytes"], received_bytes=stats["rx"]["bytes"])

    def limit(self, rate: int) -> None:
        """Change how much this rank sends and receives, in bits per second; needs a network with a rate."""
        for namespace, device in ((self.namespace, INTERFACE), (self.switch, self.port)):
            _set_class(namespace, device, "change", rate)

    def cut(self) -> None:
        """Take the link down: what is sent meanwhile is lost, until `mend`."""
        _run("ip", "-n", self.namespace, "link", "set", INTERFACE, "down")

    def mend(self) -> None:
        """Bring the link up again."""
        _run("ip", "-n", self.namespace, "link", "set", INTERFACE, "up")


@dataclass(frozen=True)
class Counters:
    """Bytes that crossed an interface since it was made, link-layer headers included."""

    sent_bytes: int
    received_bytes: int


@contextmanager
def emulated_network(
    ranks: int, *, rate: int | None = None, nodes: int = 1, uplink: int | None = None
) -> Iterator[tuple[Host, ...]]:
    """Yield one `Host` per rank; `rate` limits each one's total egress and total ingress, in bits per second, and
    `uplink` what each of `nodes` of equally many ranks sends to and receives from the others.

    Processes still running in the namespaces when the context ends are killed.
    """
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"an emulated network has 1 to {MAX_RANKS} ranks, got {ranks}")
    if nodes < 1 or ranks % nodes:
        raise ValueError(f"{ranks} ranks cannot be shared out equally over {nodes} nodes")
    _require_tools()
    with signals_become_exceptions():
        _remove_stale()
        owner = f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_networks)}"
        try:
            yield _build(owner, ranks, rate, nodes, uplink)
        finally:
            with _signals_held_back():
                _remove(name for name in _namespaces() if name.startswith(owner + "-"))


@cache
def why_unavailable() -> str | None:
    """The reason why no network can be emulated here, or None; found out by building a small one."""
    try:
        with emulated_network(1, rate=10**9):
            return None
    except NetworkUnavailable as error:
        return str(error)


def _build(owner: str, ranks: int, rate: int | None, nodes: int, uplink: int | None) -> tuple[Host, ...]:
    switch = f"{owner}-switch"
    _add_namespace(switch)
    bridges = [f"node{node}" for node in range(nodes)]
    for bridge in bridges:
        _add_bridge(switch, bridge)
    if nodes > 1:
        _add_bridge(switch, "core")
        for bridge in bridges:
            ends = (switch, f"{bridge}-up"), (switch, f"{bridge}-down")
            _connect(ends, uplink)
            for (_, device), to in zip(ends, (bridge, "core")):
                _run("ip", "-n", switch, "link", "set", device, "master", to, "up")
    hosts = tuple(
        Host(rank, f"{owner}-rank{rank}", switch, address=f"10.78.0.{rank + 1}", master="10.78.0.1")
        for rank in range(ranks)
    )
    for host in hosts:
        _add_namespace(host.namespace)
        _connect(((host.namespace, INTERFACE), (switch, host.port)), rate)
        _run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
        _run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
        bridge = bridges[host.rank * nodes // ranks]
        _run("ip", "-n", switch, "link", "set", host.port, "master", bridge, "up")
    return hosts


def _add_bridge(namespace: str, name: str) -> None:
    _run("ip", "-n", namespace, "link", "add", name, "type", "bridge", "mcast_snooping", "0")
    _run("ip", "-n", namespace, "link", "set", name, "addrgenmode", "none", "up")


def _connect(ends: tuple[tuple[str, str], tuple[str, str]], rate: int | None) -> None:
    """A veth between two (namespace, device), limited in both directions."""
    (namespace, device), (other, peer) = ends
    _run(*f"ip -n {namespace} link add {device} type veth peer name {peer} netns {other}".split())
    for namespace, device in ends:
        _run("ip", "-n", namespace, "link", "set", device, "addrgenmode", "none")  # no IPv6 chatter to count
        if rate is not None:
            _limit(namespace, device, rate)


def _add_namespace(name: str) -> None:
    try:
        _run("ip", "netns", "add", name)
    except NetworkUnavailable as error:
        raise NetworkUnavailable(f"this machine lets no network namespace be made: {error}") from error
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _limit(namespace: str, device: str, rate: int) -> None:
    """Everything that leaves `device` passes one HTB class of `rate` bits per second."""
    try:
        _run(*f"tc -n {namespace} qdisc add dev {device} root handle 1: htb default 1".split())
    except NetworkUnavailable as error:
        raise NetworkUnavailable(
            f"this kernel cannot limit a rate with HTB (module sch_htb): {error}; leave out the rate"
        ) from error
    _set_class(namespace, device, "add", rate)


def _set_class(namespace: str, device: str, do: str, rate: int) -> None:
    burst = f"burst {BURST_BYTES} cburst {BURST_BYTES} quantum {BURST_BYTES}"
    limit = f"rate {rate}bit ceil {rate}bit {burst}"
    _run(*f"tc -n {namespace} class {do} dev {device} parent 1: classid 1:1 htb {limit}".split())


def _require_tools() -> None:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NetworkUnavailable(
            f"an emulated network needs {' and '.join(missing)}, which this machine lacks: "
            "install iproute2 (apt-get install iproute2)"
        )
    if os.geteuid() != 0:
        raise NetworkUnavailable(
            "an emulated network needs root (it makes network namespaces): use sudo, or leave out the rate"
        )


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise NetworkUnavailable(f"`{' '.join(argv)}` failed: {reason}")
    return done.stdout


def _namespaces() -> list[str]:
    listing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listing.splitlines() if line.startswith(PREFIX + "-")]


def _remove(names: Iterator[str] | Sequence[str]) -> None:
    """Kill what runs in the namespaces, then delete them; their interfaces go with them."""
    names = list(names)
    for name in names:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
        for pid in pids.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                logger.debug("process %s of namespace %s had just ended", pid, name)
    for name in names:
        done = subprocess.run(["ip", "netns", "delete", name], capture_output=True, text=True)
        if done.returncode != 0 and name in _namespaces():
            logger.warning("network namespace %s could not be deleted: %s", name, done.stderr.strip())


def _remove_stale() -> None:
    """Delete the namespaces whose maker no longer lives (it was killed with SIGKILL)."""
    stale = []
    for name in _namespaces():
        match = re.match(rf"{PREFIX}-(\d+)-(\d+)-\d+-", name)
        if match and _start_time(int(match[1])) != int(match[2]):
            stale.append(name)
    if stale:
        logger.info("removing %d network namespaces that a killed run left behind", len(stale))
        _remove(stale)


def _start_time(pid: int) -> int | None:
    """When a living process began, in clock ticks since boot: tells it from a later one that got its id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])  # a zombie is dead, whether or not its parent knows


@contextmanager
def _signals_held_back() -> Iterator[None]:
    """A second Ctrl-C waits until everything is removed."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
