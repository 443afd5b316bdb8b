"""A queue of tokens gives each token once, to readers that share it and over cancelled waits."""

from __future__ import annotations

import anyio
import pytest

from hotswap import Token
from hotswap.errors import InstanceLost
from hotswap.offline.virtual_time import virtual_time
from hotswap.stream import TokenQueue


def token(index: int) -> Token:
    return Token(id=index, index=index)


@virtual_time
async def test_a_cancelled_wait_loses_no_token_and_leaves_nothing() -> None:
    queue = TokenQueue()
    for _ in range(100):
        with anyio.move_on_after(0.1):
            await queue.take()
    with anyio.move_on_after(0.1):
        await anext(queue)
    assert len(queue._waiting) == 1, "what was cancelled before is forgotten"
    queue.put(token(0))
    queue.put(token(1))
    assert await queue.take() == [token(0), token(1)]


@virtual_time
async def test_several_readers_share_the_tokens_and_all_get_the_end() -> None:
    queue, read, ended = TokenQueue(), list[int](), list[int]()

    async def reader(number: int) -> None:
        while tokens := await queue.take():
            read.extend(one.id for one in tokens)
        ended.append(number)

    async with anyio.create_task_group() as tasks:
        for number in range(3):
            tasks.start_soon(reader, number)
        for index in range(20):
            queue.put(token(index))
            if index % 3:
                await anyio.sleep(0.01)
        queue.close()
    assert sorted(read) == list(range(20))
    assert sorted(ended) == [0, 1, 2]


@virtual_time
async def test_an_error_comes_after_the_tokens_and_again() -> None:
    queue = TokenQueue()
    queue.put(token(0))
    queue.close(InstanceLost("It ended."))
    queue.put(token(1))  # ignored
    assert await queue.take() == [token(0)]
    for _ in range(2):
        with pytest.raises(InstanceLost):
            await queue.take()
        with pytest.raises(InstanceLost):
            await anext(queue)


@virtual_time
async def test_a_stream_that_ended_stays_at_its_end() -> None:
    queue = TokenQueue()
    queue.close()
    for _ in range(2):
        assert await queue.take() == []
        with pytest.raises(StopAsyncIteration):
            await anext(queue)
