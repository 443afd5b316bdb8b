"""`StageNode`: where the ranks of one stage run, if not on the engine's machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from anyio.lowlevel import checkpoint

from hotswap.backends.transports.serving import LinkOpener
from hotswap.backends.transports.silence import check_silence
from hotswap.checks import check_callables, check_strings
from hotswap.errors import ConfigError
from hotswap.transport import Channel

__all__ = ["LinkedNode", "StageNode"]


@runtime_checkable
class StageNode(Protocol):
    """A node for the ranks of one stage, which a `StageHost` starts there.

    All methods are called on an event loop of a thread of the engine, one after the other.
    """

    @property
    def name(self) -> str:
        """What the node is called in messages."""
        ...

    @property
    def silence_s(self) -> float:
        """How long the link may be silent before the node counts as lost; the host is told."""
        ...

    async def open(self) -> Channel:
        """Open a link to the host, over TCP, and have it started before if there is none.

        Called at each start of the engine, also after a loss. A call that fails or is cancelled is followed
        by `close`.

        Raises:
            HotswapError: there is no such host within a time that the node sets.
        """
        ...

    async def reason_of_loss(self, reason: str) -> str:
        """Return why the host is lost, for the end of a sentence: `reason`, or what is known beside the link.

        Bounded by a few seconds.
        """
        ...

    async def close(self) -> None:
        """End what `open` has started, after the link has ended. Bounded by seconds; not cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class LinkedNode:
    """A node whose `StageHost` runs already, and goes on after the engine.

    Args:
        name: What the node is called in messages, such as its address.
        open_link: Opens a link to its host: `partial(connect_tcp, "10.0.0.7", 7000, secret=secret)`.
        silence_s: How long the link may be silent before the node counts as lost; the host is told.

    Raises:
        ConfigError: an argument cannot be used.
    """

    name: str
    open_link: LinkOpener
    silence_s: float = 8.0

    def __post_init__(self) -> None:
        check_strings(ConfigError, name=self.name)
        check_callables(ConfigError, open_link=self.open_link)
        check_silence(self.silence_s)

    async def open(self) -> Channel:
        return await self.open_link()

    async def reason_of_loss(self, reason: str) -> str:
        await checkpoint()
        return reason

    async def close(self) -> None:
        await checkpoint()
