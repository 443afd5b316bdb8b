"""The `Channel` interface: a link that carries the KV blocks of a move, whatever lies between its two ends.

A frame is a short message and, if need be, a payload. What a link is made of stops here: memory, sockets, or
the network cards of a cluster (NIXL, UCX), whoever sends KV blocks says the same to each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.errors import MigrationAborted

__all__ = ["Channel", "Frame"]


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """What one `send` sent.

    Attributes:
        message: All of it.
        payload: All of it, writable, often where the link has put it: valid until the next `receive`.
    """

    message: bytes
    payload: memoryview


class Channel(AsyncContextManagerMixin, ABC):
    """One end of a link between two: frames arrive whole, unchanged, once and in order, or not at all.

    Both directions are independent. One task at a time sends, and one receives; more raise anyio's
    `BusyResourceError`. A link works, or it is broken for good: then every verb raises `MigrationAborted` of
    stage `"link"`, which says what broke it. It breaks when either end is closed or its process ends, and
    when what arrives is not what was sent. Frames sent and not received by then may be lost.

    Attributes:
        max_message_bytes: The longest message.
        max_payload_bytes: The longest payload.
    """

    max_message_bytes: int
    max_payload_bytes: int

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Close the channel on leaving."""
        try:
            yield self
        finally:
            with anyio.CancelScope(shield=True):
                await self.aclose()

    @abstractmethod
    async def send(self, message: bytes, payload: memoryview | None = None) -> None:
        """Send a frame; when this returns, `payload` may be written to again.

        Waits while the other end takes nothing, which holds no more than a bounded number of bytes: two ends
        that only send wait for each other. Cancelled, it has sent nothing, or all of it, or has broken the
        link, so that half a frame is never received.

        Raises:
            MigrationAborted: the link is broken; or the frame is too large, then nothing was sent.
        """

    @abstractmethod
    async def receive(self) -> Frame:
        """Return the next frame; what the one before has lent is the link's again. Cancelled, it loses none.

        Raises:
            MigrationAborted: the link is broken.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Break the link and give back all it holds here, at once and also if cancelled; may be repeated."""

    def fitting(self, message: bytes, payload: memoryview | None) -> memoryview:
        """Return the bytes of a payload; raise `MigrationAborted` for a frame that the link does not take."""
        data = memoryview(b"") if payload is None else payload.cast("B")
        for what, size, most in (
            ("message", len(message), self.max_message_bytes),
            ("payload", len(data), self.max_payload_bytes),
        ):
            if size > most:
                raise MigrationAborted(
                    f"A {what} of {size:,} bytes was not sent: the link takes {most:,}. Open it with room "
                    "for more, at both ends.",
                    stage="link",
                )
        return data
