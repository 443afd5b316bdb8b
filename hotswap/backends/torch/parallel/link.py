"""`StageLink`: one end of the link between an engine and the host of a stage on another node.

Messages are those of `hotswap.backends.remote`: JSON with payloads, in numbered frames. They are not trusted:
none is unpickled or names a class to be made. An end that says nothing for a time counts as lost, so each end
tells how long it waits, and the other sends beats.
"""

from __future__ import annotations

import anyio

from hotswap.backends.remote.messages import VERSION, Message, Said, check_version, said, taking
from hotswap.backends.remote.outbox import Inbox, Outbox
from hotswap.backends.transports.link_errors import link_broken
from hotswap.backends.transports.silence import silence_fields, silence_in
from hotswap.backends.transports.stream import StreamChannel
from hotswap.transport import Channel

__all__ = ["StageLink"]

_HELLO = "hello"


class StageLink:
    """Sends and receives messages in order while `run` runs.

    Args:
        channel: The link.
        silence_s: How long the other end may say nothing.
    """

    def __init__(self, channel: Channel, silence_s: float) -> None:
        self._channel = channel
        self._outbox, self._inbox = Outbox(channel, silence_s), Inbox(channel, silence_s)
        self._is_greeted = False
        self.say(said(_HELLO, 0, {"version": VERSION, **silence_fields(silence_s)}))

    @property
    def own_address(self) -> str:
        """The address of this end; that of this machine alone where the link has none."""
        channel = self._channel
        return (channel.own_address if isinstance(channel, StreamChannel) else "") or "127.0.0.1"

    def say(self, *messages: Said) -> None:
        """Have messages sent, in this order."""
        for message in messages:
            self._outbox.put(message)

    async def receive(self) -> list[Message]:
        """Return the messages of the next frame, of which a beat has none; payloads are valid until the next.

        Raises:
            MigrationAborted: the link is broken, or what was received is not valid.
        """
        messages = await self._inbox.receive()
        if not self._is_greeted:
            if not messages or messages[0].verb != _HELLO:
                raise link_broken(f"the other end did not begin with {_HELLO!r}")
            check_version(messages[0])
            with taking(messages[0]):
                self._outbox.heard_within_s = silence_in(messages[0].fields)
            self._is_greeted = True
            return messages[1:]
        return messages

    async def run(self) -> None:
        """Send until this is cancelled.

        Raises:
            MigrationAborted: the link is broken, or the other end was silent.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._inbox.watch)
            await self._outbox.run()
