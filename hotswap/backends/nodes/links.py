"""Links to the stores of other nodes, each opened for one call or for one shard."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from hotswap.backends.nodes.messages import failure_of
from hotswap.backends.transports import LinkOpener, StreamChannel, wire
from hotswap.backends.transports.link_errors import ProtocolError, reason_for, reason_in
from hotswap.backends.transports.wire import Message
from hotswap.errors import MigrationAborted, StoreError
from hotswap.transport import Channel, Frame

__all__ = ["Call", "LinkToNode", "NodeLost"]

_MAX_ANSWER_BYTES = 1 << 20


class NodeLost(StoreError):
    """The store of a node cannot be reached, or its link broke; raised as a `StoreError`."""


class Call:
    """Asks the store of a node over a link of its own.

    Raises:
        NodeLost: the link broke, or nothing came for `answer_s` seconds; from all methods.
    """

    def __init__(self, node: str, channel: Channel, answer_s: float) -> None:
        self.node, self._channel, self._answer_s = node, channel, answer_s
        self.payload = memoryview(b"")

    async def ask(self, verb: str, **fields: object) -> Message:
        """Send a message and return the first answer; its payload is `payload` until the next one."""
        await self.send(verb, **fields)
        return await self.answer()

    async def send(self, verb: str, **fields: object) -> None:
        """Send a message."""
        async with self._link_errors():
            with anyio.fail_after(self._answer_s):
                await self._channel.send(wire.pack(verb, 0, **fields))

    async def answer(self, *, limit_s: float | None = None, target: memoryview | None = None) -> Message:
        """Return the next answer within `limit_s`, raising the error that it may have.

        Its payload is received straight into `target` where the link can, into memory of the link otherwise.

        Raises:
            StoreError: the error of the store there.
        """
        async with self._link_errors():
            with anyio.fail_after(self._answer_s if limit_s is None else limit_s):
                frame = await self._received(target)
            answer = wire.unpack(frame.message)
            error = failure_of(answer)
        if error is not None:
            raise error
        self.payload = frame.payload
        return answer

    async def _received(self, target: memoryview | None) -> Frame:
        if target and isinstance(self._channel, StreamChannel):
            return await self._channel.receive_into(target, max_message_bytes=_MAX_ANSWER_BYTES)
        return await self._channel.receive(max_message_bytes=_MAX_ANSWER_BYTES)

    @asynccontextmanager
    async def _link_errors(self) -> AsyncGenerator[None]:
        try:
            yield
        except TimeoutError:
            raise NodeLost(f"Node {self.node!r} sent nothing for {self._answer_s:g} s.") from None
        except (MigrationAborted, ProtocolError) as exc:
            raise NodeLost(f"The link to node {self.node!r} ended: {_reason(exc)}.") from exc


class LinkToNode:
    """Opens links to the store of one node.

    Args:
        node: The name of the node.
        open_link: Opens a link: `partial(connect_tcp, "10.0.0.2", 7000, secret=secret)`.
        answer_s: The time limit for a link, and for an answer.
    """

    def __init__(self, node: str, open_link: LinkOpener, *, answer_s: float) -> None:
        self.node = node
        self._open_link, self._answer_s = open_link, answer_s

    @asynccontextmanager
    async def call(self) -> AsyncGenerator[Call]:
        """Have a link while the block runs.

        Raises:
            NodeLost: the node cannot be reached.
        """
        async with await self._opened() as channel:
            yield Call(self.node, channel, self._answer_s)

    async def _opened(self) -> Channel:
        try:
            with anyio.fail_after(self._answer_s):
                return await self._open_link()
        except TimeoutError:
            raise NodeLost(f"Node {self.node!r} gave no link within {self._answer_s:g} s.") from None
        except (MigrationAborted, OSError) as exc:
            raise NodeLost(f"Node {self.node!r} cannot be reached: {_reason(exc)}.") from exc


def _reason(error: Exception) -> str:
    """What broke a link, without what the errors of links say of moves."""
    if isinstance(error, MigrationAborted):
        return reason_in(error)
    return reason_for(error) or str(error)
