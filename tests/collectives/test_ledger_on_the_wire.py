"""The ledger against the kernel: bytes that left a real network interface, counted by the interface itself.

Two ranks, each in its own network namespace, joined by veth pairs. An interface also counts what TCP adds and the
ledger leaves out on purpose. Headers are 66 bytes per packet, 0.1 to 4.6 %: the kernel chooses packets of 1448 to
64k bytes. So packets are counted too and their headers subtracted, and with them bare acknowledgements and the
segments that TCP sent again. What is left are gloo's handshakes, the barrier and options of selective
acknowledgements. Tolerance: not below the ledger, at most 1 % and 64 kB above it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.namespaces import needs_namespaces
from thinwire.bench.network import emulated_network
from thinwire.bench.processes import run_processes

FRAMING = 1.01
SMALL_MESSAGES = 64_000

RANK = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import thinwire as tw
from thinwire.collectives import Slot, Wire

torch.set_num_threads(1)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=world)

HEADERS = 14 + 20 + 32  # bytes of Ethernet, IPv4 and TCP with its timestamps, per packet
SEGMENT = 1448  # bytes TCP sends at once through an MTU of 1500

def counters():
    # payload bytes this interface sent, and how many of them TCP sent again
    statistics = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics")
    sent, packets = (int((statistics / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line)
    again = int(dict(zip(names, values))["RetransSegs"])
    return sent - HEADERS * packets, SEGMENT * again

REDUCTIONS = 3
shapes = {"matrix": (1024, 1537), "vector": (4097,), "scalar": ()}
found = {}
slots = [Slot(name, shape) for name, shape in shapes.items()]
quantized = [tw.Quantized("fp32"), tw.Quantized("bf16"), tw.Quantized("fp8_e5m2", feedback="error")]
for reducer in (tw.Dense(), *quantized):
    wire = Wire()
    bound = reducer.bind(slots, wire)
    dist.barrier()
    sent, again = counters()
    for _ in range(REDUCTIONS):
        bound.begin()
        tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
        bound.all_reduce(tensors).wait()
    dist.barrier()
    sent, again = counters()[0] - sent, counters()[1] - again
    found[repr(reducer)] = {
        "interface": sent,
        "again": again,
        "ledger": wire.ledger.sent_bytes(),
        "formula": REDUCTIONS * reducer.sent_bytes(slots, world),
    }
    wire.close()
print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


@needs_namespaces
def test_the_ledger_agrees_with_the_interface_counters() -> None:
    with tempfile.TemporaryDirectory() as folder, emulated_network(2) as hosts:
        outputs = run_processes(
            [host.command([sys.executable, "-c", RANK, str(Path(folder, "store"))]) for host in hosts],
            [{**host.environment(), "RANK": str(host.rank), "WORLD_SIZE": "2"} for host in hosts],
            timeout=120,
        )
    for output in outputs:
        found = json.loads(output)
        assert len(found) == 4
        for reducer, counted in found.items():
            assert counted["ledger"] == counted["formula"], reducer
            assert counted["ledger"] <= counted["interface"], reducer
            once = counted["interface"] - counted["again"]
            assert once <= FRAMING * counted["ledger"] + SMALL_MESSAGES, reducer
        dense, exact, half, quarter = (counted["interface"] - counted["again"] for counted in found.values())
        assert exact == pytest.approx(dense, rel=0.02)
        assert half == pytest.approx(dense / 2, rel=0.02)
        assert quarter == pytest.approx(dense * (1 + 4 / 128) / 4, rel=0.02)  # FP8 and a float32 scale per 128
