"""Links for KV blocks: recurrent states that follow the blocks cross whole, however small payloads are."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap.abc import Channel, KVPages, KVSink, KVSource, Stopped
from hotswap.backends.remote.pages import PageLink, serve_pages
from hotswap.backends.transports import memory_channels, wire
from hotswap.errors import MigrationAborted
from tests.backends.transports.recording import LAYOUT, RecordingEngine, RecordingSink

BLOCK = LAYOUT.block_bytes
WITH_STATES = replace(LAYOUT, states=((0, (2, 1000), "float32"),), state_bytes=8000)
SIZES = [BLOCK // 2, BLOCK, 3 * BLOCK, 1 << 20]


def content(num_blocks: int, *, with_states: bool) -> bytes:
    size = num_blocks * BLOCK + (WITH_STATES.state_bytes if with_states else 0)
    return bytes(at * at % 251 for at in range(size))


class Source(KVSource):
    """A stopped request of seven blocks, with its states after the last."""

    layout = WITH_STATES

    async def num_tokens(self) -> int:
        raise NotImplementedError

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        await checkpoint()
        count, whole = -(-num_tokens // LAYOUT.block_tokens), content(7, with_states=True)
        end = len(whole) if first_block + count == 7 else (first_block + count) * BLOCK
        return KVPages(first_block, num_tokens, memoryview(bytearray(whole[first_block * BLOCK : end])))

    async def stop(self) -> Stopped:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError


@asynccontextmanager
async def linked(end: KVSource | KVSink, payload_bytes: int) -> AsyncGenerator[tuple[PageLink, Channel]]:
    near, far = memory_channels(max_payload_bytes=payload_bytes)

    async def serve() -> None:
        with suppress(MigrationAborted):
            await serve_pages(end, far)

    async with near, far, anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
        yield PageLink(near, WITH_STATES), near
        await near.aclose()


@pytest.mark.parametrize("payload_bytes", SIZES)
async def test_blocks_and_states_are_read_whole(payload_bytes: int) -> None:
    async with linked(Source(), payload_bytes) as (link, _):
        for _ in range(2):
            assert bytes((await link.read(0, 27)).data) == content(7, with_states=True)
            assert bytes((await link.read(0, 12)).data) == content(3, with_states=False)


@pytest.mark.parametrize("payload_bytes", SIZES)
async def test_blocks_and_states_are_written_whole(payload_bytes: int) -> None:
    engine = RecordingEngine()
    sink = RecordingSink(engine)
    sink.layout = WITH_STATES
    async with linked(sink, payload_bytes) as (link, _):
        for _ in range(2):
            await link.write(KVPages(0, 27, memoryview(bytearray(content(7, with_states=True)))))
            await link.write(KVPages(0, 12, memoryview(bytearray(content(3, with_states=False)))))
    written = [heard[3] for heard in engine.heard]
    assert all(isinstance(data, bytes) for data in written)
    expected = 2 * (content(7, with_states=True) + content(3, with_states=False))
    assert b"".join(data for data in written if isinstance(data, bytes)) == expected


async def test_endless_parts_of_a_write_end_the_link() -> None:
    sink = RecordingSink(RecordingEngine())
    sink.layout = WITH_STATES

    async def send_parts(channel: Channel) -> None:
        for number in range(1, 40):
            payload = memoryview(bytearray(BLOCK))
            await channel.send(wire.pack("part", number, first_block=0, num_tokens=0), payload)
            await channel.receive()

    async with linked(sink, BLOCK) as (_, channel):
        with pytest.raises(MigrationAborted):
            await send_parts(channel)
