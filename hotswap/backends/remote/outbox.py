"""`Outbox` and `Inbox`: the two directions of a link between a controller and a host of an engine.

Many tasks say messages, one sends them: all that was said in a turn of the event loop is one frame. An end
that has nothing to say sends a beat from time to time, so that silence means that the other end is gone.
"""

from __future__ import annotations

import asyncio

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from hotswap.backends.remote.messages import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    Message,
    Said,
    frames_of,
    messages_of,
    said,
    tokens_frame,
)
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.silence import LEAST_S, beat_every_s
from hotswap.transport import Channel

__all__ = ["Inbox", "Outbox"]

_LAST_S = 1.0  # for the last frame of a link
_ROW_NUMBERS = 1 << 14  # of one message


class Outbox:
    """Collects what tasks say, and sends it in `run`.

    Args:
        channel: The link.
        silence_s: How long the other end may take no frame.

    Attributes:
        heard_within_s: The silence after which the other end ends the link; beats keep it. Until it has told
            one, it may be the least that there is.
    """

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel, self._silence_s = channel, silence_s
        self.heard_within_s = LEAST_S
        self._said: list[Said] = []
        self._rows: list[int] | None = None  # the last message, if it is of tokens
        self._num_frames = 0
        self._began_s: float | None = None  # to send, if it is not done
        self._is_silent = False  # since the last look
        self._woken = asyncio.Event()  # which can be set again, unlike anyio's
        self._failed = ""

    def say(self, verb: str, number: int = 0, payload: memoryview | None = None, /, **fields: object) -> None:
        """Have a message sent; `payload` must not change any more.

        Raises:
            ValueError: it is too long; nothing is sent.
        """
        self.put(said(verb, number, fields) if payload is None else said(verb, number, fields, payload))

    def put(self, message: Said) -> None:
        """Have a message sent that is encoded already."""
        self._end_rows()
        self._said.append(message)
        self._woken.set()

    def say_row(self, stream: int, value: int) -> None:
        """Have a pair of numbers sent in the message `tokens`, which holds those that are said in a row."""
        if self._rows is None:
            self._rows = []
            self._woken.set()
        self._rows += (stream, value)

    @property
    def has_rows(self) -> bool:
        """Whether the last thing that was said is a pair of numbers."""
        return self._rows is not None

    def wake(self) -> None:
        """Have `prepare` asked soon."""
        self._woken.set()

    def fail(self, because: str) -> None:
        """Have `run` send what was said, if it can do so at once, and end the link."""
        self._failed = self._failed or because
        self._woken.set()

    def prepare(self) -> None:
        """Say what goes with each frame; a subclass may."""

    async def run(self) -> None:
        """Send until cancelled.

        Raises:
            MigrationAborted: the link is broken.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._beat)
            while not self._failed:
                await self._woken.wait()
                self._woken.clear()
                self.prepare()
                if self._said or self._rows is not None or self._is_silent:
                    await self.flush()
            with anyio.move_on_after(_LAST_S):
                await self.flush()
            raise link_broken(self._failed)

    async def flush(self) -> None:
        """Send what was said, or a beat; cancelled before it has begun, it leaves that for the next call."""
        await checkpoint_if_cancelled()
        self._began_s, self._is_silent = asyncio.get_running_loop().time(), False
        if not self._said and self._rows is not None and len(self._rows) <= _ROW_NUMBERS:
            payload, self._rows = wire.pack_tokens(self._rows), None
            message = tokens_frame(self._num_frames, payload)
            self._num_frames += 1
            await self._channel.send(message, payload)
            self._began_s = None
            return
        self._end_rows()
        messages, self._said = self._said, []
        for frame in frames_of(messages, self._num_frames):
            self._num_frames += 1
            await self._channel.send(*frame)
        self._began_s = None

    async def _beat(self) -> None:
        """Have a frame sent if there was none for a while; see that frames are taken."""
        while True:
            self._is_silent = True
            await anyio.sleep(beat_every_s(self._silence_s, self.heard_within_s))
            if self._began_s is not None and anyio.current_time() - self._began_s >= self._silence_s:
                raise link_broken(f"the other end took no frame for {self._silence_s:g} s")
            if self._is_silent:
                self.wake()

    def _end_rows(self) -> None:
        rows, self._rows = self._rows or [], None
        for at in range(0, len(rows), _ROW_NUMBERS):
            self._said.append(said("tokens", 0, {}, wire.pack_tokens(rows[at : at + _ROW_NUMBERS])))


class Inbox:
    """Receives frames in order.

    Args:
        channel: The link.
        silence_s: For so long there may be no frame while `watch` runs. Time in which this end did not
            receive, or its event loop stood still, does not count.
    """

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel, self.silence_s = channel, silence_s
        self._most_bytes = min(MAX_MESSAGE_BYTES, channel.max_message_bytes)
        self._most_payload_bytes = min(MAX_PAYLOAD_BYTES, channel.max_payload_bytes)
        self._num_frames = 0
        self._now_s = asyncio.get_running_loop().time  # that of anyio asks for the loop each time
        self._heard_s = self._now_s()
        self._is_receiving = False

    async def receive(self) -> list[Message]:
        """Return the messages of the next frame; their payloads are valid until the next call.

        Raises:
            MigrationAborted: the link is broken, by this frame perhaps.
        """
        self._heard_s, self._is_receiving = self._now_s(), True
        try:
            frame = await self._channel.receive(
                max_message_bytes=self._most_bytes, max_payload_bytes=self._most_payload_bytes
            )
        finally:
            self._is_receiving = False
        try:
            messages = messages_of(frame, self._num_frames)
        except ProtocolError as exc:
            raise link_broken(str(exc)) from exc
        self._num_frames += 1
        return messages

    async def watch(self) -> None:
        """End the link when no frame comes for too long from now on.

        Raises:
            MigrationAborted: none came.
        """
        self._heard_s = anyio.current_time()
        step_s = beat_every_s(self.silence_s)
        while (left_s := self._heard_s + self.silence_s - anyio.current_time()) > 0:
            begun_s, wanted_s = anyio.current_time(), min(left_s, step_s)
            await anyio.sleep(wanted_s)  # not an event, which each frame would set
            late_s = anyio.current_time() - begun_s - wanted_s
            if not self._is_receiving:
                self._heard_s = anyio.current_time()
            elif late_s > step_s:  # what came meanwhile is received in the turns to come
                self._heard_s += late_s
        raise link_broken(f"the other end was silent for {self.silence_s:g} s")
