"""A node in its own process, which serves a directory of models: `python -m ... NODE ROOT BYTES_PER_S`."""

from __future__ import annotations

import sys
from functools import partial

import anyio

from hotswap.backends.nodes import StoreHost
from hotswap.backends.stores import NvmeStore
from hotswap.backends.transports import serve_tcp
from tests.backends.nodes.hosts import SECRET


async def main(node: str, root: str, bytes_per_s: str) -> None:
    async with NvmeStore(root) as store, anyio.create_task_group() as tasks:
        host = StoreHost(node, store, bytes_per_s=float(bytes_per_s), part_bytes="64 KiB")
        port = await tasks.start(partial(serve_tcp, secret=SECRET), host.serve, "127.0.0.1")
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
