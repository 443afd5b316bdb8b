"""A node of the benchmark of peers, in a process of its own: its store, and a plain socket of its bytes.

Standard input has lines of JSON, each answered by one: `peers` names other nodes, `prefetch` loads the model
and answers with its seconds, `drop` forgets it.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from hotswap.backends.nodes import PeerStore, StoreHost
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.transports import LinkSecret, connect_tcp, serve_tcp
from hotswap.request import ModelId

__all__ = ["MODEL", "SECRET", "main"]

MODEL = ModelId("m")
SECRET = LinkSecret(b"of a benchmark on one machine")


def main(text: str) -> None:
    """Serve until standard input ends."""
    anyio.run(_serve, json.loads(text))


async def _serve(settings: dict[str, Any]) -> None:
    node, address = settings["node"], settings["address"]
    disk = NvmeStore(Path(settings["root"]), name="storage")
    peers = PeerStore(disk, {}, node=node)
    store = TieredStore(PinnedStore(settings["budget"]), disk if settings["has_model"] else peers)
    host = StoreHost(
        node, store, children=settings["children"], bytes_per_s=settings["bytes_per_s"], part_bytes="8 MiB"
    )
    async with store, anyio.create_task_group() as tasks:
        port = await tasks.start(partial(serve_tcp, secret=SECRET), host.serve, address)
        answer: dict[str, Any] = {"port": port}
        if settings["has_model"]:
            await store.prefetch(MODEL)
            manifest = await store.manifest(MODEL)
            async with store.lend(manifest) as buffer:
                assert buffer is not None
                answer["plain_port"] = _serve_plain(address, buffer.data)
                await _answer_all(answer, store, peers)
        else:
            await _answer_all(answer, store, peers)
        tasks.cancel_scope.cancel()


async def _answer_all(first: dict[str, Any], store: TieredStore, peers: PeerStore) -> None:
    _say(first)
    while line := await to_thread.run_sync(sys.stdin.readline):
        _say(await _answer(json.loads(line), store, peers))


async def _answer(request: dict[str, Any], store: TieredStore, peers: PeerStore) -> dict[str, Any]:
    match request["do"]:
        case "peers":
            for name, (address, port) in request["peers"].items():
                peers.add_peer(name, partial(connect_tcp, address, port, secret=SECRET))
        case "prefetch":
            peers.num_bytes_from.clear()
            began_s = time.perf_counter()
            await store.prefetch(MODEL)
            return {"seconds": time.perf_counter() - began_s, "from": dict(peers.num_bytes_from)}
        case "drop":
            await store.drop(MODEL)
        case what:
            return {"error": f"{what!r} is nothing to do"}
    return {}


def _serve_plain(address: str, data: memoryview) -> int:
    """Send the bytes over a plain socket to each client, in a thread; return the port."""
    listener = socket.create_server((address, 0))

    def serve() -> None:
        while True:
            connected, _ = listener.accept()
            with connected:
                connected.sendall(data)

    threading.Thread(target=serve, daemon=True).start()
    port: int = listener.getsockname()[1]
    return port


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
