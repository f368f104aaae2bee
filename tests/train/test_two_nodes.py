"""One job on two nodes: torchrun in two network namespaces, a slow wire between them, a shared directory.

Slow because two launchers and two workers import torch and transformers (about 12 s).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.namespaces import needs_namespaces
from tests.support.ranks import run_ranks
from tests.train.jobs import job, run_job
from thinwire.bench.network import Host, emulated_network
from thinwire.train.arguments import to_toml
from thinwire.train.config import TrainConfig

RATE = 200_000_000
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
JOB = ["--master-port", "29500", "-m", "thinwire", "train", "--config"]

pytestmark = [needs_namespaces, pytest.mark.slow]


@contextmanager
def _nodes(hosts: tuple[Host, ...], config: TrainConfig, directory: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The job, started on every host as its user would start it there."""
    file = directory / "job.toml"
    file.write_text(to_toml(config))
    nodes = [
        subprocess.Popen(
            host.command(
                [*TORCHRUN, "--node-rank", str(host.rank), "--master-addr", host.master, *JOB, str(file)]
            ),
            env=host.environment({**os.environ, "HF_HUB_OFFLINE": "1"}),
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.wait()


def test_a_job_on_two_nodes_finishes_with_the_bits_of_a_job_on_one(tmp_path: Path) -> None:
    config = job(tmp_path, recipe="fp8-ef", threads=1, timeout=60.0)
    (alone := tmp_path / "alone").mkdir()
    expected = run_ranks(run_job, 2, config, alone)[0]
    (shared := tmp_path / "shared").mkdir()
    with emulated_network(2, rate=RATE) as hosts, _nodes(hosts, config, shared) as nodes:
        outputs = [node.communicate(timeout=150) for node in nodes]
        sent = [host.counters().sent_bytes for host in hosts]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    (file,) = shared.rglob("summary.json")
    summary = json.loads(file.read_text())
    assert (summary["world_size"], summary["steps"]) == (2, 6)
    assert summary["param_hash"] == expected["param_hash"]
    assert summary["sent_bytes_per_rank"] == expected["sent_bytes_per_rank"]
    assert all(bytes_sent > summary["sent_bytes_per_rank"] for bytes_sent in sent), "it went over the wire"
    assert len((file.parent / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_wire_that_is_cut_ends_both_nodes_with_a_line_that_names_rank_and_op(tmp_path: Path) -> None:
    config = job(tmp_path, recipe="fp8-ef", steps=10_000, threads=1, timeout=6.0)
    with emulated_network(2, rate=RATE) as hosts, _nodes(hosts, config, tmp_path) as nodes:
        deadline = time.monotonic() + 100
        while not any(path.read_text() for path in tmp_path.rglob("metrics.jsonl")):
            assert time.monotonic() < deadline
            assert all(node.poll() is None for node in nodes)
            time.sleep(0.1)
        subprocess.run(["ip", "-n", hosts[1].namespace, "link", "set", "wire", "down"], check=True)
        errors = [node.communicate(timeout=90)[1] for node in nodes]
    assert all(node.returncode != 0 for node in nodes)
    for rank, error in enumerate(errors):
        line = rf"^thinwire train: rank {rank}: all_\w+ of .* failed.*(Timed out|timeout)"  # gloo has two wordings
        assert re.search(line, error, re.M), error
    assert not list(tmp_path.rglob("summary.json"))
