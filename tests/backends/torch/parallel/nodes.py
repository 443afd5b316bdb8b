"""Hosts of stages in processes of their own, on another address of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import psutil
from anyio import to_thread

from hotswap.abc import Channel
from hotswap.backends.torch import LinkedNode
from hotswap.backends.transports import LinkSecret, connect_tcp
from tests.house.tree import ROOT
from tests.patience import PATIENCE_S

ADDRESS = "127.0.0.2"
KEY = "a secret of the tests alone"


@dataclass
class HostProcess:
    """A host that runs; `node` is what an engine is given."""

    process: subprocess.Popen[str]
    port: int
    silence_s: float

    @property
    def node(self) -> LinkedNode:
        return LinkedNode(ADDRESS, self.connect, self.silence_s)

    async def connect(self, key: str = KEY) -> Channel:
        return await connect_tcp(ADDRESS, self.port, secret=LinkSecret(key.encode()))

    def ranks(self) -> list[psutil.Process]:
        """The rank processes that it has started and that run."""
        return children(self.process.pid)

    async def no_ranks(self) -> None:
        """Wait until all ranks have ended."""
        with anyio.fail_after(PATIENCE_S):
            while self.ranks():  # noqa: ASYNC110 - processes of another process end
                await anyio.sleep(0.02)

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


def children(pid: int) -> list[psutil.Process]:
    """The processes that a process has started and that run."""
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return [child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@asynccontextmanager
async def host_process(
    root: Path, *, port: int = 0, silence_s: float = PATIENCE_S
) -> AsyncGenerator[HostProcess]:
    """A host that reads the models in a directory; it is killed at the end."""
    module = "tests.backends.torch.parallel.stage_process"
    process = subprocess.Popen(  # noqa: ASYNC220 - to start one takes a moment only
        [sys.executable, "-m", module, ADDRESS, str(port), str(root), KEY, str(silence_s)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        yield HostProcess(process, int(await to_thread.run_sync(process.stdout.readline)), silence_s)
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(process.communicate)
