"""A host of stages in its own process: `python -m ... ADDRESS PORT ROOT KEY SILENCE_S`."""

from __future__ import annotations

import sys
from functools import partial

import anyio

from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import StageHost
from hotswap.backends.transports import LinkSecret, serve_tcp


async def main(address: str, port: str, root: str, key: str, silence_s: str) -> None:
    secret = LinkSecret(key.encode())
    async with NvmeStore(root) as store, anyio.create_task_group() as tasks:
        host = StageHost(store, silence_s=float(silence_s))
        serve = partial(serve_tcp, secret=secret)
        sys.stdout.write(f"{await tasks.start(serve, host.serve, address, int(port))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(partial(main, *sys.argv[1:]))
