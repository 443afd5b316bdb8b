"""Embed a fleet in a service of your own: tokens over HTTP as they are generated, errors as HTTP statuses.

    python -m examples.embed_in_a_service

It uses anyio and the standard library; any web framework will do instead. The fleet is open as long as the
service is. A client that disconnects ends its request, because leaving `fleet.stream` does.
"""

import contextlib
import http.client
import json
import math
from functools import partial

import anyio
from anyio import TASK_STATUS_IGNORED, to_thread
from anyio.abc import SocketAttribute, SocketStream, TaskStatus
from anyio.streams.buffered import BufferedByteReceiveStream

from hotswap import Fleet, Model, Sampling
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.errors import HotswapError, QueueFull

SIZES = {"smollm-135m": "270 MB", "qwen-0.5b": "1 GB"}
GONE = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound)


async def serve(fleet: Fleet, *, task_status: TaskStatus[int] = TASK_STATUS_IGNORED) -> None:
    """Listen on a free port of this machine, which `task_status` reports, until cancelled."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        task_status.started(listener.extra(SocketAttribute.local_port))
        await listener.serve(partial(answer, fleet))


async def answer(fleet: Fleet, client: SocketStream) -> None:
    """Answer `POST {"model": "...", "prompt": [1, 2], "max_tokens": 8}` by one line per token."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    async with client:
        with contextlib.suppress(*GONE):
            try:
                asked = json.loads(await read_body(client))
                model, prompt = asked["model"], asked["prompt"]
                sampling = Sampling(max_tokens=asked.get("max_tokens", 16))
                async with fleet.stream(model, prompt, sampling) as tokens:
                    async for token in tokens:
                        line = {"token": token.id, "text": token.text, "finish": token.finish_reason}
                        await client.send(head + json.dumps(line).encode() + b"\n")
                        head = b""  # sent with the first token; an error before it has a status of its own
            except (HotswapError, LookupError, TypeError, ValueError) as exc:
                await client.send(refusal(exc) if head else b"")


async def read_body(client: SocketStream) -> bytes:
    received = BufferedByteReceiveStream(client)
    head = await received.receive_until(b"\r\n\r\n", 8192)
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return await received.receive_exactly(min(int(length), 1 << 20))


def refusal(error: Exception) -> bytes:
    status = "400 Bad Request"
    if isinstance(error, QueueFull):
        status = f"503 Service Unavailable\r\nRetry-After: {math.ceil(error.retry_after_s)}"
    return f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{error}\n".encode()


def ask(port: int, model: str) -> None:
    """Be a client: print tokens as they arrive."""
    asked = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 4})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("POST", "/", asked)
        response = connection.getresponse()
        print(f"{model}: {response.status} {response.reason}")
        for line in response:
            print("  ", line.decode(), end="")


async def main() -> None:
    fleet = Fleet(
        engines=[SimEngine("e0")],  # one engine for two models: the second is swapped in when asked for
        store=SimStore(SIZES),
        models=[Model(name) for name in SIZES],
    )
    async with fleet, anyio.create_task_group() as service:
        port = await service.start(serve, fleet)
        for model in [*SIZES, "llama-405b"]:
            await to_thread.run_sync(ask, port, model)
        service.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
