"""A node of the benchmark of moves, in a process of its own: an engine, its store, and the port of both."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import anyio

from benchmarks.migrate import make_engine, make_store
from hotswap.backends.remote import EngineHost, TcpPeers
from hotswap.backends.transports import LinkSecret, serve_tcp

__all__ = ["SECRET", "main"]

SECRET = LinkSecret(b"of a benchmark on one machine")


def main(text: str) -> None:
    """Serve until the process is ended."""
    anyio.run(_serve, json.loads(text))


async def _serve(settings: dict[str, Any]) -> None:
    engine = make_engine(settings["id"], settings["context"])
    async with make_store(settings["root"]) as store, engine, anyio.create_task_group() as tasks:
        host = EngineHost(engine, store)
        port = await tasks.start(partial(serve_tcp, secret=SECRET), host.serve, settings["address"])
        host.peers = TcpPeers(settings["address"], port, secret=SECRET)
        sys.stdout.write(json.dumps({"port": port}) + "\n")
        sys.stdout.flush()
        await anyio.sleep_forever()


if __name__ == "__main__":
    main(sys.argv[1])
