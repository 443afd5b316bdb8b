"""`StageLink`: one end of the link between an engine and the host of a stage on another node.

Messages are those of `hotswap.backends.remote`: JSON with payloads, in numbered frames. They are not trusted:
none is unpickled or names a class to be made. An end that says nothing for a time counts as lost, so each end
sends beats.
"""

from __future__ import annotations

import anyio

from hotswap.backends.remote.messages import Message, Said, frames_of, messages_of
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.stream import StreamChannel
from hotswap.transport import Channel

__all__ = ["StageLink"]

_BEATS = 4  # within the time of silence


class StageLink:
    """Sends and receives messages in order.

    Args:
        channel: The link.
        silence_s: How long the other end may say nothing.
    """

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel, self._silence_s = channel, silence_s
        self._num_sent = self._num_received = 0
        self._sending = anyio.Lock()

    @property
    def own_address(self) -> str:
        """The address of this end; that of this machine alone where the link has none."""
        channel = self._channel
        return (channel.own_address if isinstance(channel, StreamChannel) else "") or "127.0.0.1"

    async def send(self, *messages: Said) -> None:
        """Send messages together.

        Raises:
            MigrationAborted: the link is broken.
        """
        async with self._sending:
            for message, payload in frames_of(list(messages), self._num_sent):
                self._num_sent += 1
                await self._channel.send(message, payload)

    async def receive(self) -> list[Message]:
        """Return the messages of the next frame, of which a beat has none; payloads are valid until the next.

        Raises:
            MigrationAborted: the link is broken, was silent, or what was received is not valid.
        """
        try:
            with anyio.fail_after(self._silence_s):
                frame = await self._channel.receive()
        except TimeoutError as exc:
            raise link_broken(f"the other end was silent for {self._silence_s:g} s") from exc
        try:
            messages = messages_of(frame, self._num_received)
        except ProtocolError as exc:
            raise link_broken(str(exc)) from exc
        self._num_received += 1
        return messages

    async def beat(self) -> None:
        """Send beats until this is cancelled.

        Raises:
            MigrationAborted: the link is broken.
        """
        while True:
            await self.send()
            await anyio.sleep(self._silence_s / _BEATS)
