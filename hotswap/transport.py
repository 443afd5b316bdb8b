"""The `Channel` interface: a bidirectional link that carries the KV blocks of moves.

A frame is a short message and an optional payload. The interface hides what carries it: memory, sockets, or
the network cards of a cluster (NIXL, UCX).
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
    """One message with its payload, as given to `send`.

    Attributes:
        message: The message.
        payload: The payload, writable, often in memory of the link: valid until the next `receive`.
    """

    message: bytes
    payload: memoryview


class Channel(AsyncContextManagerMixin, ABC):
    """One end of a link: frames arrive whole, unchanged, once and in order, or not at all.

    Both directions are independent. One task at a time sends, and one receives; more raise anyio's
    `BusyResourceError`. A link works, or it is broken for good: then each method raises `MigrationAborted` of
    stage `"link"`, with the reason. A link breaks when either end is closed or its process ends, and when
    damaged bytes arrive. Frames that were sent and not received by then may be lost.

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

        Waits while the link is full; it buffers a bounded number of bytes, so two ends that only send
        deadlock. A cancelled call has sent nothing, or the whole frame, or has broken the link: a part of a
        frame is never received.

        Raises:
            MigrationAborted: the link is broken; or the frame is too large, and nothing was sent.
        """

    @abstractmethod
    async def receive(
        self, *, max_message_bytes: int | None = None, max_payload_bytes: int | None = None
    ) -> Frame:
        """Return the next frame, which ends the loan of the last payload. A cancelled call loses no frame.

        Args:
            max_message_bytes: The longest message of this frame; `None` for the link's. A longer one breaks
                the link, before memory is taken for it.
            max_payload_bytes: The longest payload, likewise.

        Raises:
            MigrationAborted: the link is broken, by this frame perhaps.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Break the link and release its resources, at once and even if cancelled; may be called again."""

    def limits(self, max_message_bytes: int | None, max_payload_bytes: int | None) -> tuple[int, int]:
        """Return the limits of a frame to be received, by the arguments of `receive`."""
        return (
            self.max_message_bytes if max_message_bytes is None else max_message_bytes,
            self.max_payload_bytes if max_payload_bytes is None else max_payload_bytes,
        )

    def fitting(self, message: bytes, payload: memoryview | None) -> memoryview:
        """Return the bytes of a payload; raise `MigrationAborted` for a frame that is too large."""
        data = memoryview(b"") if payload is None else payload.cast("B")
        if len(message) <= self.max_message_bytes and len(data) <= self.max_payload_bytes:
            return data
        for what, size, most in (
            ("message", len(message), self.max_message_bytes),
            ("payload", len(data), self.max_payload_bytes),
        ):
            if size > most:
                raise MigrationAborted(
                    f"A {what} of {size:,} bytes was not sent: the limit of the link is {most:,}. Open it "
                    "with a larger limit at both ends.",
                    stage="link",
                )
        return data
