"""The machine's network interfaces, and the one that gloo listens on.

Which one gloo takes is observed, not predicted: a new process group opens a listening socket, and the
kernel's socket table (/proc/self/net/tcp) tells its address. Gloo takes the interface that GLOO_SOCKET_IFNAME
names, else the one that the host's name resolves to, else loopback.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915
_LISTENING = "0A"


@dataclass(frozen=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    state: str  # up, down, unknown (as the kernel says; loopback is "unknown")
    speed_mbit: int | None  # what the driver claims; virtual devices claim nothing


def interfaces() -> list[Interface]:
    """All interfaces of this machine (of this network namespace), in the kernel's order."""
    return [
        Interface(name, (*_ipv4(name), *_ipv6(name)), _attribute(name, "operstate") or "unknown", _speed(name))
        for _, name in socket.if_nameindex()
    ]


def interface_of(address: str, known: list[Interface]) -> str | None:
    """The interface that holds `address`."""
    plain = ip_address(address)
    if isinstance(plain, IPv6Address) and plain.ipv4_mapped:
        plain = plain.ipv4_mapped
    return next((entry.name for entry in known if str(plain) in entry.addresses), None)


def listening_sockets() -> dict[int, str]:
    """This process's listening TCP sockets: inode -> address; empty where there is no /proc."""
    own = set(_own_sockets())
    found = {}
    for table in ("tcp", "tcp6"):
        path = Path("/proc/self/net", table)
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = line.split()
            inode = int(fields[9])
            if fields[3] == _LISTENING and inode in own:
                found[inode] = _address(fields[1].partition(":")[0])
    return found


def _own_sockets() -> Iterator[int]:
    folder = Path("/proc/self/fd")
    for link in folder.iterdir() if folder.exists() else []:
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue  # the descriptor that lists the folder
        if target.startswith("socket:["):
            yield int(target[len("socket:[") : -1])


def _address(text: str) -> str:
    """The kernel prints an address as 32-bit words in host byte order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    raw = b"".join(struct.pack("=I", word) for word in words)
    return str(IPv4Address(raw) if len(raw) == 4 else IPv6Address(raw))


def _ipv4(name: str) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return  # the interface has no IPv4 address
    yield socket.inet_ntoa(answer[20:24])


def _ipv6(name: str) -> Iterator[str]:
    path = Path("/proc/net/if_inet6")
    for line in path.read_text().splitlines() if path.exists() else []:
        fields = line.split()
        if fields[5] == name:
            yield str(IPv6Address(bytes.fromhex(fields[0])))


def _speed(name: str) -> int | None:
    text = _attribute(name, "speed")
    return int(text) if text and int(text) > 0 else None


def _attribute(name: str, attribute: str) -> str | None:
    try:
        return Path("/sys/class/net", name, attribute).read_text().strip()
    except OSError:
        return None  # the kernel refuses to read some attributes of an interface that is down
