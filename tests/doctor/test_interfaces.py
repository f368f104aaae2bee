import json
import socket
import subprocess
import sys

import torch.distributed as dist

from tests.support.namespaces import needs_namespaces
from tests.support.ranks import run_ranks
from thinwire.bench.network import emulated_network
from thinwire.doctor.interfaces import Interface, interface_of, interfaces, listening_sockets

SHOW = """
import json
from thinwire.doctor.interfaces import interfaces
print(json.dumps([vars(entry) for entry in interfaces()]))
"""


def test_loopback_has_its_address() -> None:
    (loopback,) = [entry for entry in interfaces() if entry.name == "lo"]
    assert "127.0.0.1" in loopback.addresses


@needs_namespaces
def test_a_namespace_shows_its_own_interfaces() -> None:
    with emulated_network(2) as hosts:
        shown = subprocess.run(
            hosts[1].command([sys.executable, "-c", SHOW]), capture_output=True, text=True, check=True
        ).stdout
    found = {entry["name"]: entry for entry in json.loads(shown)}
    assert set(found) == {"lo", "wire"}
    assert found["wire"]["addresses"] == [hosts[1].address]
    assert found["wire"]["state"] == "up"


def test_an_address_is_traced_to_its_interface() -> None:
    known = [Interface("lo", ("127.0.0.1", "::1"), "unknown", None), Interface("eth0", ("10.0.0.2",), "up", 1000)]
    assert interface_of("10.0.0.2", known) == "eth0"
    assert interface_of("::ffff:127.0.0.1", known) == "lo"
    assert interface_of("10.0.0.3", known) is None


def test_only_this_process_own_listening_sockets_are_seen() -> None:
    before = listening_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        new = {i: a for i, a in listening_sockets().items() if i not in before}
        assert list(new.values()) == ["127.0.0.1"]
        with socket.create_connection(server.getsockname()):
            assert len(listening_sockets()) == len(before) + 1, "a connection does not listen"
    assert listening_sockets() == before


def _listeners_of_a_new_group() -> int:
    before = listening_sockets()
    dist.new_group([0, 1], backend="gloo")
    return len(listening_sockets()) - len(before)


def test_a_gloo_group_opens_a_listening_socket() -> None:
    assert run_ranks(_listeners_of_a_new_group, 2) == [1, 1]
