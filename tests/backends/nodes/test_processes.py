"""Peers in processes of their own that are killed or frozen while a shard is read from them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import to_thread

from hotswap.abc import Shard
from hotswap.backends.nodes import PeerStore
from hotswap.backends.nodes.readings import rank_of
from hotswap.backends.stores import NvmeStore
from hotswap.backends.transports import LinkOpener, connect_tcp
from tests.backends.nodes.hosts import SECRET
from tests.backends.stores.models import put
from tests.house.tree import ROOT

SIZE = 4 << 20


@asynccontextmanager
async def node_process(name: str, root: Path) -> AsyncGenerator[tuple[subprocess.Popen[str], LinkOpener]]:
    """A node that gives 8 MB a second, and an opener of links to it."""
    process = subprocess.Popen(  # noqa: ASYNC220  # to start one takes a moment only
        [sys.executable, "-m", "tests.backends.nodes.node_process", name, str(root), "8e6"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        port = int(await to_thread.run_sync(process.stdout.readline))
        yield process, partial(connect_tcp, "127.0.0.1", port, secret=SECRET)
    finally:
        process.kill()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(process.communicate)


async def read_while(
    peers: PeerStore, shard: Shard, stopped: list[subprocess.Popen[str]], how: signal.Signals
) -> bytes:
    """Read a shard, and signal the processes when a quarter and a half of it have arrived."""
    data = bytearray()
    async with peers.open(shard) as chunks:
        async for chunk in chunks:
            assert chunk.offset_bytes == len(data)
            data += chunk.data
            if stopped and len(data) >= SIZE * (3 - len(stopped)) // 4:
                stopped.pop(0).send_signal(how)
    return bytes(data)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_shard_goes_on_from_another_peer_and_then_from_the_storage(
    tmp_path: Path, how: signal.Signals
) -> None:
    manifest, ranks = put(tmp_path, "a", size=SIZE, file_bytes=SIZE)
    (shard,) = manifest.shards
    async with AsyncExitStack() as stack:
        storage = await stack.enter_async_context(NvmeStore(tmp_path))
        nodes = {n: await stack.enter_async_context(node_process(n, tmp_path)) for n in ("n0", "n1")}
        openers = {name: open_link for name, (_, open_link) in nodes.items()}
        peers = PeerStore(storage, openers, node="n2", stall_s=0.5)
        highest = max(nodes, key=lambda name: rank_of(name, shard))
        in_order = sorted(nodes, key=lambda name: name != highest)
        processes = [nodes[name][0] for name in in_order]
        assert await read_while(peers, shard, processes, how) == ranks[0]
        assert peers.num_bytes_from.total() == SIZE
        assert peers.num_bytes_from.keys() == {"n0", "n1", ""}
        assert peers.num_lent == 0
