"""A Ray cluster of several nodes on this machine, each with an address of the loopback interface."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
from anyio import to_thread

from tests.house.tree import ROOT
from tests.patience import PATIENCE_S

_DIRECTORY = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # a short path, for sockets
(_DIRECTORY / "ray").mkdir()
atexit.register(shutil.rmtree, _DIRECTORY, ignore_errors=True)

# Read when Ray is imported, and by the processes of nodes.
os.environ.update(
    {
        "PYTHONPATH": str(ROOT),  # actors import tests
        "RAY_TMPDIR": str(_DIRECTORY),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_TASK_EVENTS_REPORT_INTERVAL_MS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_health_check_initial_delay_ms": "0",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_timeout_ms": "1000",
        "RAY_health_check_failure_threshold": "5",
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_enable_worker_prestart": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_worker_niceness": "0",  # else a busy machine never runs them
    }
)

import ray  # noqa: E402  # after its environment
from ray.cluster_utils import Cluster  # noqa: E402  # likewise

__all__ = ["LocalCluster", "local_cluster"]

NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")  # the first has the head
_STORE_BYTES = 80 << 20


class LocalCluster:
    """The cluster; its nodes are named by their addresses, and have these as the label "at".

    Args:
        nodes: The addresses of its nodes, of which the first has the head.

    Attributes:
        address: Of the head, for `ray.init`.
        directory: Where the cluster has its files.
    """

    directory = _DIRECTORY

    def __init__(self, nodes: tuple[str, ...] = NODES) -> None:
        self._first = nodes
        self._cluster: Any = Cluster(
            initialize_head=True,
            connect=False,
            head_node_args={**_arguments(nodes[0]), "include_dashboard": False},
        )
        self._processes = set[psutil.Process]()
        self.address = str(self._cluster.address)
        self._nodes: dict[str, Any] = {nodes[0]: self._cluster.head_node}
        for node in nodes[1:]:
            self._start(node)
        self._cluster.wait_for_nodes()

    def _start(self, node: str, **arguments: Any) -> None:
        self._nodes[node] = self._cluster.add_node(wait=False, **_arguments(node, **arguments))

    async def add(self, node: str, **arguments: Any) -> None:
        """Add a node at an address, and return when Ray has it."""
        self._start(node, **arguments)
        await _until(lambda: node in _alive())

    async def lose(self, node: str) -> None:
        """Kill the processes of a node all at once, and return when Ray knows."""
        await self._kill(node)
        await _until(lambda: node not in _alive())

    async def lose_head(self) -> None:
        """Kill the processes of the node that has the head, after which no part of Ray knows anything new."""
        await self._kill(self._first[0])

    async def _kill(self, node: str) -> None:
        lost = self._nodes.pop(node)
        self._note_processes()
        await to_thread.run_sync(lambda: self._cluster.remove_node(lost, allow_graceful=False))

    async def restore(self) -> None:
        """Bring back what a test has lost of the first nodes, and lose what it has added."""
        for node in self._nodes.keys() - set(self._first):
            await self.lose(node)
        for node in set(self._first) - self._nodes.keys():
            await self.add(node)

    async def alive(self) -> set[str]:
        """The addresses of the nodes that Ray has."""
        return await to_thread.run_sync(_alive)

    async def no_actors(self) -> None:
        """Wait until no actor is left; what was killed may take a moment to end."""
        await _until(lambda: not ray.util.list_named_actors(all_namespaces=True), within_s=60)

    def stop(self) -> list[psutil.Process]:
        """Stop all nodes, and return the processes that have not ended."""
        self._note_processes()
        self._cluster.shutdown()
        if self._first[0] not in self._nodes:  # processes of Ray look for a lost head for a minute
            for process in self._processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        left_over: list[psutil.Process] = psutil.wait_procs(self._processes, timeout=60)[1]
        return [process for process in left_over if process.status() != psutil.STATUS_ZOMBIE]

    def _note_processes(self) -> None:
        self._processes.update(psutil.Process().children(recursive=True))


@contextmanager
def local_cluster(nodes: tuple[str, ...] = NODES, *, at: str = NODES[0]) -> Generator[LocalCluster]:
    """Run a cluster, and connect this process to it at a node; raises if anything is left over."""
    shared_before = _shared_memory()
    cluster = LocalCluster(nodes)
    try:
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False, _node_ip_address=at)
        yield cluster
    finally:
        ray.shutdown()
        left_over = cluster.stop()
    assert left_over == [], f"{left_over}"
    assert _shared_memory() - shared_before == set()


def _arguments(node: str, **more: Any) -> dict[str, Any]:
    return {
        "num_cpus": 8,
        "object_store_memory": _STORE_BYTES,
        "node_ip_address": node,
        "labels": {"at": node, **more.pop("labels", {})},
        **more,
    }


def _shared_memory() -> set[str]:
    """The names of Ray's segments."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("ray", "plasma"))}


def _alive() -> set[str]:
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


async def _until(holds: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    with anyio.fail_after(within_s):
        while not await to_thread.run_sync(holds):  # noqa: ASYNC110 - Ray tells no event
            await anyio.sleep(0.05)
