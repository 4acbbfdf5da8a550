"""``python -m tests.cluster.ray_node FOLDER PORT [HEAD]``: a node of Ray on the loopback.

It lives as long as this process. Without HEAD it is the head of a cluster of its own, at PORT unless that is 0.
``ray start`` does the same, but takes no second node on a machine's loopback.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import psutil

from tests.e2e import sessions
from tests.e2e.process import environment

RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    # A lost node is noticed within two seconds, and replicas outlive the head by ten minutes.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


def main(folder: str, port: str, head: str | None = None) -> None:
    """Be the node: says its address when it is up."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    params = RayParams(
        gcs_address=head,
        gcs_server_port=int(port) or None,
        temp_dir=folder,
        node_ip_address="127.0.0.1",
        num_cpus=1,
        num_gpus=0,
        object_store_memory=80 * 2**20,
        include_dashboard=False,
        min_worker_port=0,
        max_worker_port=0,
        include_log_monitor=head is None,
        dashboard_agent_listen_port=None,
    )
    node = Node(params, head=head is None, shutdown_at_exit=True, spawn_reaper=False)
    print(node.gcs_address, flush=True)
    signal.pause()


def ray_folders(pid: int) -> list[str]:
    """Where a process of a Ray of manylora's own has its files, as long as it runs."""
    try:
        found = psutil.Process(pid).environ().get("RAY_TMPDIR")
    except psutil.Error:
        return []
    return [found] if found else []


class RayNode:
    """A node as a group of processes."""

    def __init__(self, folder: Path, head: RayNode | None = None, port: int = 0, **env: str) -> None:
        args = [
            sys.executable,
            "-m",
            "tests.cluster.ray_node",
            str(folder),
            str(port),
            *([head.address] if head else []),
        ]
        repository = Path(__file__).resolve().parents[2]
        found = environment(**RAY, **env)
        found["PYTHONPATH"] += f":{repository}"
        self.process = sessions.started(
            args, env=found, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        self.address: str = self.process.stdout.readline().strip()
        assert self.address, self.process.wait()

    def pids(self) -> list[int]:
        """All processes of its session."""
        return sessions.pids_of({self.process.pid})

    def kill(self) -> list[int]:
        """End all of it at once, as a machine ends."""
        pids = self.pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait()  # a dead node that nobody waits for lives on for its workers
        return pids

    def __enter__(self) -> RayNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sessions.end(self.process)


if __name__ == "__main__":
    main(*sys.argv[1:])
