"""A process that serves an engine over links: `python -m ... KIND FOLDER`."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import anyio

from hotswap import Request, Sampling
from hotswap.abc import Channel
from hotswap.backends.torch import TorchEngine
from hotswap.backends.transports import serve_shared, serve_sink
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model


def request_from(message: bytes) -> Request:
    fields: dict[str, Any] = json.loads(message)
    sampling: dict[str, Any] = fields.pop("sampling")
    for name in ("prompt", "generated"):
        fields[name] = tuple(fields[name])
    return Request(**fields, sampling=Sampling(**sampling))


async def serve_stream(engine: TorchEngine, channel: Channel) -> None:
    """Stream one request's tokens back."""
    request = request_from((await channel.receive()).message)
    async with engine.stream(request) as tokens:
        async for token in tokens:
            said = [token.id, token.index, token.finish_reason, tokens.num_reused_tokens]
            await channel.send(json.dumps(said).encode())


async def main(kind: str, folder: str) -> None:
    store = DictStore()
    store.add(kind, make_model(kind))
    async with (
        TorchEngine("far", kv_tokens=2048, memory_bytes="64 MiB", threads=1, max_requests=8) as engine,
        anyio.create_task_group() as tasks,
    ):
        await engine.load(store.card(kind), store)
        await tasks.start(serve_shared, partial(serve_sink, engine), f"{folder}/kv")
        await tasks.start(serve_shared, partial(serve_stream, engine), f"{folder}/streams")
        sys.stdout.write("ready\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
