"""Ranks on one machine, by torch's elastic launcher: rendezvous on a local port, loopback, no restarts."""

from __future__ import annotations

import logging
import os
import socket

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.launcher.api import LaunchConfig

STOP_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
"""What ends a launch, unless told otherwise."""


def local_launch(
    ranks: int,
    *,
    run_id: str,
    start_method: str,
    logs: DefaultLogsSpecs,
    port: int = 0,
    signals: str = STOP_SIGNALS,
) -> LaunchConfig:
    """What `elastic_launch` takes to start `ranks` processes here. `port` is that of their rendezvous (0: any)."""
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=f"127.0.0.1:{port}",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        start_method=start_method,
        signals_to_handle=signals,
        logs_specs=logs,
    )


def use_loopback() -> None:
    """Ranks started from now on talk over loopback, unless the environment names another interface."""
    names = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def quiet_launcher(level: int = logging.CRITICAL) -> None:
    """Keep the launcher's log from repeating, over many lines, what its caller says in one."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing", "torch.distributed.launcher"):
        logging.getLogger(name).setLevel(level)
