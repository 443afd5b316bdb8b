"""The link between an engine and the host of a stage: which silence ends it, and which does not."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import pytest

from hotswap.backends.remote.messages import VERSION, said
from hotswap.backends.torch.parallel.link import StageLink
from hotswap.backends.transports import memory_channels
from hotswap.errors import MigrationAborted
from hotswap.offline.virtual_time import virtual_time

SHORT_S, LONG_S = 0.5, 60.0
NUM_BEATS = 10_000  # which a link holds that is not received from, as the buffer of a socket does


@asynccontextmanager
async def two_ends(silence_s: float, other_silence_s: float) -> AsyncGenerator[tuple[StageLink, StageLink]]:
    """Both ends of a link that runs."""
    near, far = memory_channels(num_frames=NUM_BEATS)
    async with near, far, anyio.create_task_group() as tasks:
        ends = StageLink(near, silence_s), StageLink(far, other_silence_s)
        for end in ends:
            tasks.start_soon(end.run)
        yield ends
        tasks.cancel_scope.cancel()


async def take(link: StageLink, wanted: int) -> None:
    """Receive until so many messages came."""
    while wanted > 0:
        wanted -= len(await link.receive())


@virtual_time
@pytest.mark.parametrize(("one", "other"), [(SHORT_S, LONG_S), (LONG_S, SHORT_S)])
async def test_ends_of_different_silences_stay_linked_while_they_have_nothing_to_say(
    one: float, other: float
) -> None:
    async with two_ends(one, other) as ends, anyio.create_task_group() as tasks:
        for end in ends:
            tasks.start_soon(take, end, 1)
        await anyio.sleep(3 * LONG_S)
        for end in ends:
            end.say(said("ready", 1, {}))


@virtual_time
async def test_an_end_that_does_not_receive_for_long_does_not_count_the_other_as_silent() -> None:
    async with two_ends(SHORT_S, SHORT_S) as (busy, other), anyio.create_task_group() as tasks:
        tasks.start_soon(take, other, 1)
        other.say(said("ready", 1, {}))
        await take(busy, 1)
        await anyio.sleep(3 * LONG_S)  # as a host does that starts ranks
        busy.say(said("ready", 1, {}))
        other.say(said("ready", 2, {}))
        await take(busy, 1)


@virtual_time
async def test_an_end_that_receives_again_still_notices_that_the_other_is_silent() -> None:
    near, far = memory_channels(num_frames=NUM_BEATS)
    link, other = StageLink(near, SHORT_S), StageLink(far, SHORT_S)

    async def receive() -> None:
        async with near, far, anyio.create_task_group() as tasks:
            tasks.start_soon(link.run)
            async with anyio.create_task_group() as others:
                others.start_soon(other.run)
                other.say(said("ready", 1, {}))
                await take(link, 1)
                await anyio.sleep(LONG_S)
                others.cancel_scope.cancel()
            with anyio.fail_after(LONG_S):
                await take(link, NUM_BEATS)

    with pytest.raises(ExceptionGroup) as caught:
        await receive()
    assert caught.group_contains(MigrationAborted, match="silent for 0.5 s")


@virtual_time
async def test_ends_of_different_versions_give_no_link_and_say_both() -> None:
    near, far = memory_channels()
    async with near, far:
        hello: list[object] = [0, ["hello", 0, {"version": VERSION + 1, "silence_s": LONG_S}, 0]]
        await far.send(json.dumps(hello).encode())
        with pytest.raises(MigrationAborted, match=f"speaks version {VERSION + 1}, this one {VERSION}"):
            await StageLink(near, LONG_S).receive()
