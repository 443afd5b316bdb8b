"""The other end of a link, in its own process: `python -m ... KIND WORK WHERE`."""

from __future__ import annotations

import sys
from itertools import count

import anyio

from hotswap.abc import Channel
from hotswap.backends.transports import connect_shared, connect_tcp, serve_shared, serve_tcp

PAYLOAD = 300_000


async def send(channel: Channel) -> None:
    for number in count():
        await channel.send(b"%d" % number, memoryview(bytes([number % 256]) * PAYLOAD))


async def receive(channel: Channel) -> None:
    for _ in range(3):
        await channel.receive()
    await anyio.sleep_forever()


WORKS = {"send": send, "receive": receive}


def say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def main(kind: str, work: str, where: str) -> None:
    if where == "serve":
        async with anyio.create_task_group() as tasks:
            say(await tasks.start(serve_tcp, WORKS[work], "127.0.0.1"))
    elif where.startswith("serve:"):
        async with anyio.create_task_group() as tasks:
            await tasks.start(serve_shared, WORKS[work], where.removeprefix("serve:"))
            say("ready")
    elif kind == "tcp":
        async with await connect_tcp("127.0.0.1", int(where)) as channel:
            await WORKS[work](channel)
    else:
        async with await connect_shared(where) as channel:
            await WORKS[work](channel)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], sys.argv[3])
