import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.namespaces import needs_namespaces
from thinwire.bench import network
from thinwire.bench.network import Host, NetworkUnavailable, emulated_network, parse_rate, why_unavailable

RATE = 40_000_000  # bits per second
MEGABYTE = 10**6

# Builds a network, says so, and waits to be ended.
HOLDER = """
import signal, subprocess, sys, time
from thinwire.bench.network import emulated_network
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background would ignore these
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with emulated_network(2, rate=10**9) as hosts:
    inside = subprocess.Popen(hosts[1].command(["sleep", "100"]))
    print(hosts[0].namespace, inside.pid, flush=True)
    {then}
"""

# Receives everything on port 5000, then answers with the times of the first and the last byte.
RECEIVER = """
import selectors, socket, sys, time
server = socket.create_server(("0.0.0.0", 5000))
print("ready", flush=True)
total, begin, connections = int(sys.argv[1]), None, []
server.settimeout(30)
for _ in range(int(sys.argv[2])):
    connections.append(server.accept()[0])
chooser = selectors.DefaultSelector()
for connection in connections:
    chooser.register(connection, selectors.EVENT_READ)
while total > 0:
    for key, _ in chooser.select(30):
        received = len(key.fileobj.recv(1 << 16))
        begin = begin or time.monotonic()
        total -= received
print(begin, time.monotonic(), flush=True)
"""

SENDER = """
import socket, sys
connection = socket.create_connection((sys.argv[2], 5000))
connection.sendall(bytes(int(sys.argv[1])))
connection.recv(1)
"""


def _namespaces() -> set[str]:
    return set(subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split())


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def _holder(then: str = "time.sleep(100)") -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    script = HOLDER.format(then=then)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        namespace, pid = process.stdout.readline().split()
        yield process, namespace, int(pid)
    finally:
        process.terminate()  # so that it removes its network
        process.communicate(timeout=20)


def _transfer(hosts: tuple[Host, ...], senders: dict[int, list[int]], nbytes: int) -> float:
    """Every sender sends `nbytes` to each of its receivers at once; seconds until all has arrived."""
    receivers = sorted({receiver for targets in senders.values() for receiver in targets})
    counts = [sum(receiver in targets for targets in senders.values()) for receiver in receivers]
    receiving = [
        subprocess.Popen(
            hosts[r].command([sys.executable, "-c", RECEIVER, str(nbytes * count), str(count)]),
            stdout=subprocess.PIPE,
            text=True,
        )
        for r, count in zip(receivers, counts)
    ]
    for process in receiving:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    sending = [
        subprocess.Popen(hosts[s].command([sys.executable, "-c", SENDER, str(nbytes), hosts[target].address]))
        for s, targets in senders.items()
        for target in targets
    ]
    begins, ends = zip(*[map(float, process.communicate(timeout=60)[0].split()) for process in receiving])
    for process in sending:
        process.wait(60)
    return max(ends) - min(begins)


def test_rates_are_read_as_tc_writes_them() -> None:
    assert parse_rate("200mbit") == 200_000_000
    assert parse_rate(" 1.5Gbit ") == 1_500_000_000
    assert parse_rate("500kbit") == 500_000


@pytest.mark.parametrize("text", ["200", "fast", "-5mbit", "0mbit", "25mbps", "1e3mbit"])
def test_a_wrong_rate_is_answered_with_a_right_one(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"write it like 200mbit"):
        parse_rate(text)


@needs_namespaces
def test_a_rank_cannot_send_faster_than_its_rate() -> None:
    with emulated_network(3, rate=RATE) as hosts:
        seconds = _transfer(hosts, {0: [1, 2]}, MEGABYTE)  # 2 MB leave rank 0
    assert seconds > 0.9 * 2 * MEGABYTE * 8 / RATE


@needs_namespaces
def test_a_rank_cannot_receive_faster_than_its_rate() -> None:
    with emulated_network(3, rate=RATE) as hosts:
        seconds = _transfer(hosts, {0: [2], 1: [2]}, MEGABYTE)  # 2 MB reach rank 2
    assert seconds > 0.9 * 2 * MEGABYTE * 8 / RATE


@needs_namespaces
def test_the_ranks_of_a_node_share_its_uplink_and_not_what_they_send_each_other() -> None:
    with emulated_network(4, rate=10**9, nodes=2, uplink=RATE) as hosts:
        between = _transfer(hosts, {0: [2], 1: [2]}, MEGABYTE)
        within = _transfer(hosts, {0: [1]}, 4 * MEGABYTE)
    assert between > 0.9 * 2 * MEGABYTE * 8 / RATE
    assert within < 0.5 * 4 * MEGABYTE * 8 / RATE


@needs_namespaces
def test_a_link_becomes_slower_and_breaks_and_is_mended() -> None:
    with emulated_network(2, rate=10**9) as hosts:
        hosts[1].limit(RATE)
        seconds = _transfer(hosts, {0: [1]}, MEGABYTE)
        hosts[1].cut()
        send = hosts[1].command([sys.executable, "-c", SENDER, "1", hosts[0].address])
        assert b"unreachable" in subprocess.run(send, capture_output=True).stderr
        hosts[1].mend()
        _transfer(hosts, {0: [1]}, MEGABYTE)
    assert seconds > 0.9 * MEGABYTE * 8 / RATE


def test_ranks_that_do_not_fill_nodes_are_refused() -> None:
    message = "3 ranks cannot be shared out equally over 2 nodes"
    with pytest.raises(ValueError, match=message), emulated_network(3, nodes=2):
        pass


@needs_namespaces
def test_messages_of_one_burst_do_not_slip_past_the_limit() -> None:
    with emulated_network(2, rate=1_000_000) as hosts:
        seconds = _transfer(hosts, {0: [1]}, 60_000)
    assert seconds > 0.7 * (60_000 - 2 * network.BURST_BYTES) * 8 / 1_000_000


@needs_namespaces
def test_counters_see_what_was_sent_and_nothing_else() -> None:
    with emulated_network(3) as hosts:
        before = [host.counters() for host in hosts]
        _transfer(hosts, {0: [1]}, MEGABYTE)
        sent = [host.counters().sent_bytes - was.sent_bytes for host, was in zip(hosts, before)]
        received = [host.counters().received_bytes - was.received_bytes for host, was in zip(hosts, before)]
    assert MEGABYTE < sent[0] < 1.1 * MEGABYTE
    assert MEGABYTE < received[1] < 1.1 * MEGABYTE
    assert sent[2] < 1000
    assert received[2] < 1000


@needs_namespaces
def test_the_environment_points_at_rank_0_and_at_the_wire() -> None:
    with emulated_network(2) as hosts:
        environment = hosts[1].environment({"PATH": os.environ["PATH"], "GLOO_SOCKET_IFNAME": "eth9"})
        names = subprocess.run(
            hosts[1].command([sys.executable, "-c", "import socket; print(socket.if_nameindex())"]),
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout
    assert environment["MASTER_ADDR"] == hosts[0].address
    assert environment["OMP_NUM_THREADS"] == "1"
    assert f"'{environment['GLOO_SOCKET_IFNAME']}'" in names
    assert environment["GLOO_SOCKET_IFNAME"] not in [name for _, name in socket.if_nameindex()]


@needs_namespaces
def test_two_networks_live_side_by_side() -> None:
    with emulated_network(1) as first, emulated_network(1) as second:
        assert first[0].namespace != second[0].namespace
        assert {first[0].namespace, second[0].namespace} <= _namespaces()


@needs_namespaces
def test_an_exception_leaves_nothing_behind() -> None:
    def fail(hosts: tuple[Host, ...]) -> None:
        started.append(subprocess.Popen(hosts[0].command(["sleep", "100"])))
        raise ZeroDivisionError

    started: list[subprocess.Popen[bytes]] = []
    with pytest.raises(ZeroDivisionError), emulated_network(2, rate=RATE) as hosts:
        fail(hosts)
    (inside,) = started
    assert inside.wait(5) == -signal.SIGKILL
    assert not {host.namespace for host in hosts} & _namespaces()


@needs_namespaces
def test_a_failure_half_way_through_building_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_htb(*_: object) -> None:
        raise NetworkUnavailable("no HTB here")

    monkeypatch.setattr(network, "_limit", no_htb)
    before = _namespaces()
    with pytest.raises(NetworkUnavailable, match="no HTB here"), emulated_network(2, rate=RATE):
        pass
    assert _namespaces() <= before


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(number: signal.Signals) -> None:
    with _holder() as (process, namespace, inside):
        assert namespace in _namespaces()
        process.send_signal(number)
        process.wait(60)
        assert process.returncode != 0
        assert namespace not in _namespaces()
        assert not _alive(inside)


@needs_namespaces
def test_what_a_kill_left_behind_is_removed_by_the_next_network() -> None:
    with _holder() as (process, namespace, inside), _holder() as (_, living, _):
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        assert namespace in _namespaces()
        with emulated_network(1):
            assert namespace not in _namespaces()
            assert living in _namespaces(), "the network of a living process must stay"
        deadline = time.monotonic() + 5
        while _alive(inside) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _alive(inside)


@needs_namespaces
def test_signal_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with emulated_network(1):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetworkUnavailable, match="needs ip and tc, which this machine lacks: install iproute2"):
        emulated_network(2).__enter__()


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkUnavailable, match="needs root"):
        emulated_network(2).__enter__()


@needs_namespaces
def test_a_kernel_without_htb_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = network._run

    def unknown_kind(*argv: str) -> str:
        return run(*("nosuchqdisc" if word == "htb" else word for word in argv))

    monkeypatch.setattr(network, "_run", unknown_kind)
    with pytest.raises(NetworkUnavailable, match=r"cannot limit a rate with HTB .*leave out the rate"):
        emulated_network(2, rate=RATE).__enter__()


def test_the_number_of_ranks_is_checked() -> None:
    with pytest.raises(ValueError, match="1 to 64 ranks, got 0"):
        emulated_network(0).__enter__()


def test_the_probe_answers_in_one_line() -> None:
    reason = why_unavailable()
    assert reason is None or "\n" not in reason
