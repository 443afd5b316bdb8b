"""`ChannelConformance`: the contract of every `Channel`."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from random import Random
from typing import ClassVar

import anyio
import anyio.lowlevel
import pytest

from hotswap.errors import MigrationAborted
from hotswap.testing.cancel import cancel_at
from hotswap.testing.conformance.suite import Suite, check
from hotswap.transport import Channel

__all__ = ["ChannelConformance"]


class ChannelConformance(Suite):
    """Checks every testable promise of `hotswap.transport.Channel`; inherit from it.

    ```python
    class TestMyLink(ChannelConformance):
        @asynccontextmanager
        async def make_channels(self):
            async with my_link() as (left, right):
                yield left, right
    ```

    Attributes:
        large_bytes: the size of payloads that a link must split; at most `max_payload_bytes`.
        flood_bytes: more bytes than a link may buffer.
    """

    large_bytes: ClassVar[int] = 3 << 20
    flood_bytes: ClassVar[int] = 96 << 20

    def make_channels(self) -> AbstractAsyncContextManager[tuple[Channel, Channel]]:
        """Return a context manager that opens a link, yields its two ends, and closes them."""
        raise NotImplementedError("Write make_channels(): it yields the two ends of a link.")

    # ------------------------------------------------------------------ frames

    @check
    async def test_frames_arrive_whole_and_in_order_both_ways_at_once(self) -> None:
        random = Random(1)
        sizes = [0, 1, 63, 100, 4096, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, self.large_bytes]
        frames = [
            (random.randbytes(random.choice([0, 1, 7, 5000])), random.randbytes(size)) for size in 2 * sizes
        ]
        random.shuffle(frames)
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            for one, other in ((left, right), (right, left)):
                tasks.start_soon(_send_all, one, frames)
                tasks.start_soon(_expect_all, other, frames)

    @check
    async def test_many_small_frames_arrive_in_order(self) -> None:
        frames = [(b"%d" % number, b"x" * (number % 3)) for number in range(1500)]
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, left, frames)
            await _expect_all(right, frames)

    @check
    async def test_a_payload_may_be_written_to_at_both_ends(self) -> None:
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            mine = memoryview(bytearray(b"a" * self.large_bytes))

            async def send_and_overwrite() -> None:
                await left.send(b"", mine)
                mine[:] = b"b" * self.large_bytes

            tasks.start_soon(send_and_overwrite)
            frame = await right.receive()
            assert frame.payload == b"a" * self.large_bytes
            frame.payload[:3] = b"xyz"

    @check
    async def test_a_payload_is_lent_until_the_next_receive(self) -> None:
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            flood = [(b"", b"%07d" % number * 10_000) for number in range(self.flood_bytes // 70_000)]
            tasks.start_soon(_send_until_broken, left, flood)
            for _, payload in flood[:5]:
                frame = await right.receive()
                for _ in range(100):
                    await anyio.lowlevel.checkpoint()
                assert frame.payload == payload
            await right.aclose()

    @check
    async def test_a_frame_that_is_too_large_is_refused_and_harms_nothing(self) -> None:
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            with pytest.raises(MigrationAborted) as refused:
                await left.send(b"x" * (left.max_message_bytes + 1))
            assert refused.value.stage == "link"
            with pytest.raises(MigrationAborted):
                await left.send(b"x", memoryview(bytes(left.max_payload_bytes + 1)))
            with pytest.raises(MigrationAborted):
                await left.send(b"x", memoryview(bytes(2 * left.max_payload_bytes)).cast("H"))
            tasks.start_soon(left.send, b"small")
            assert (await right.receive()).message == b"small"

    @check
    async def test_a_frame_beyond_the_limits_of_its_receiver_breaks_the_link(self) -> None:
        for message, payload in ((b"x" * 101, b""), (b"", b"x" * 101), (b"", b"x" * self.large_bytes)):
            async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
                tasks.start_soon(left.send, b"x" * 100, memoryview(b"x" * 100))
                frame = await right.receive(max_message_bytes=100, max_payload_bytes=100)
                assert (len(frame.message), len(frame.payload)) == (100, 100)
                tasks.start_soon(_send_until_broken, left, [(message, payload)] * 100)
                with pytest.raises(MigrationAborted) as refused:
                    await right.receive(max_message_bytes=100, max_payload_bytes=100)
                assert refused.value.stage == "link"
                await _expect_broken(right)

    @check
    async def test_a_frame_that_has_begun_is_held_to_the_limits_of_the_next_receive(self) -> None:
        number, cancelled = 0, True
        while cancelled:
            number += 1
            async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
                tasks.start_soon(_send_until_broken, left, [(b"", b"x" * self.large_bytes)] * 100)
                if cancelled := await cancel_at(number, right.receive):
                    with pytest.raises(MigrationAborted):
                        await right.receive(max_payload_bytes=self.large_bytes - 1)
                await right.aclose()
            assert number < 1000

    @check
    async def test_one_task_sends_and_one_receives(self) -> None:
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_broken, left)
            tasks.start_soon(_flood_until_broken, left)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(anyio.BusyResourceError):
                await left.receive()
            with pytest.raises(anyio.BusyResourceError):
                await left.send(b"")
            await right.aclose()

    @check
    async def test_a_sender_waits_while_the_other_end_takes_nothing(self) -> None:
        async with self.make_channels() as (left, right):
            await self._expect_a_bound(left, right)

    @check
    async def test_a_sender_waits_at_the_other_end_too(self) -> None:
        async with self.make_channels() as (left, right):
            await self._expect_a_bound(right, left)

    async def _expect_a_bound(self, sender: Channel, receiver: Channel) -> None:
        size, num_sent = 1 << 20, 0
        flood = [(b"%d" % number, b"x" * size) for number in range(self.flood_bytes // size)]

        async def send() -> None:
            nonlocal num_sent
            for message, payload in flood:
                await sender.send(message, memoryview(payload))
                num_sent += 1

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            before = -1
            while num_sent > before:
                before = num_sent
                for _ in range(100):
                    await anyio.wait_all_tasks_blocked()
            assert num_sent < len(flood), "the link buffers without a bound"
            await _expect_all(receiver, flood)

    # ------------------------------------------------------------------ cancellation

    @check
    async def test_a_cancelled_receive_loses_nothing(self) -> None:
        random = Random(2)
        frames = [(b"%d" % n, random.randbytes(random.choice([0, 10, self.large_bytes]))) for n in range(40)]
        received: list[tuple[bytes, bytes]] = []

        async def receive() -> None:
            frame = await right.receive()
            received.append((frame.message, bytes(frame.payload)))

        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, left, frames)
            number = 0
            while len(received) < len(frames):
                number += 1
                await cancel_at(1 + number % 7, receive)
        assert received == frames

    @check
    async def test_a_cancelled_send_sends_nothing_or_all_or_breaks_the_link(self) -> None:
        large = Random(3).randbytes(self.large_bytes)
        number, cancelled = 0, True
        while cancelled:
            number += 1
            received: list[tuple[bytes, bytes]] = []
            async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
                tasks.start_soon(_receive_until_broken, right, received)
                cancelled = await cancel_at(number, lambda: left.send(b"large", memoryview(large)))
                try:
                    await left.send(b"next")
                except MigrationAborted:
                    await _expect_broken(left)
                    assert received in ([], [(b"large", large)])
                else:
                    while not received or received[-1] != (b"next", b""):
                        await anyio.lowlevel.checkpoint()
                    assert received[:-1] in ([], [(b"large", large)])
                    await right.aclose()
            assert number < 1000
        assert number > 1

    # ------------------------------------------------------------------ the end

    @check
    async def test_closing_ends_what_waits_at_the_other_end(self) -> None:
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_broken, left)
            tasks.start_soon(_flood_until_broken, left)
            await anyio.wait_all_tasks_blocked()
            await right.aclose()

    @check
    async def test_closing_ends_what_waits_at_this_end(self) -> None:
        async with self.make_channels() as (left, _), anyio.create_task_group() as tasks:
            tasks.start_soon(_expect_broken, left)
            tasks.start_soon(_flood_until_broken, left)
            await anyio.wait_all_tasks_blocked()
            await left.aclose()

    @check
    async def test_a_closed_channel_says_so_and_may_be_closed_again(self) -> None:
        async with self.make_channels() as (left, right):
            await left.aclose()
            await left.aclose()
            await _expect_broken(left)
            with pytest.raises(MigrationAborted, match="link"):
                await left.send(b"late")
            await _expect_broken(right)

    @check
    async def test_leaving_the_block_closes_also_when_cancelled(self) -> None:
        ends: list[Channel] = []
        with anyio.CancelScope() as scope:
            async with self.make_channels() as opened:
                ends.extend(opened)
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        for end in ends:
            await _expect_broken(end)

    @check
    async def test_a_payload_outlives_the_link_that_lent_it(self) -> None:
        async with self.make_channels() as (left, right), anyio.create_task_group() as tasks:
            tasks.start_soon(left.send, b"", memoryview(b"payload"))
            frame = await right.receive()
            await right.aclose()
            assert bytes(frame.payload) == b"payload"


async def _send_all(channel: Channel, frames: list[tuple[bytes, bytes]]) -> None:
    for message, payload in frames:
        await channel.send(message, memoryview(payload) if payload else None)


async def _expect_all(channel: Channel, frames: list[tuple[bytes, bytes]]) -> None:
    for message, payload in frames:
        frame = await channel.receive()
        assert frame.message == message
        assert frame.payload == payload, f"the payload of {message!r} is not what was sent"


async def _receive_until_broken(channel: Channel, received: list[tuple[bytes, bytes]]) -> None:
    async def receive() -> None:
        while True:
            frame = await channel.receive()
            received.append((frame.message, bytes(frame.payload)))

    with pytest.raises(MigrationAborted):
        await receive()


async def _expect_broken(channel: Channel) -> None:
    with pytest.raises(MigrationAborted) as raised:
        await channel.receive()
    assert raised.value.stage == "link"


async def _send_until_broken(channel: Channel, frames: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(MigrationAborted):
        await _send_all(channel, frames)


async def _flood_until_broken(channel: Channel) -> None:
    async def flood() -> None:
        while True:
            await channel.send(b"flood", memoryview(bytes(1 << 20)))

    with pytest.raises(MigrationAborted) as raised:
        await flood()
    assert raised.value.stage == "link"
