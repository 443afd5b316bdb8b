"""The connections of a server: how many there may be, and which is closed for a new one."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from hotswap.backends.transports.sockets import SocketBytes
from hotswap.checks import check_counts, check_positive_seconds
from hotswap.errors import ConfigError

__all__ = ["Connection", "Connections", "LinkLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """How many connections a server keeps, and for how long.

    A connection is idle until its handshake is complete and it is a link, and again after `idle_s` of
    silence. Where a new connection is over a limit, the one that is idle for longest is closed for it;
    without an idle one the new connection is refused. The log says which, at most ten times in 10 s.

    Args:
        connections: The most connections at a time.
        per_peer: The most from one address. Unix sockets have no addresses and are not held to it.
        handshake_s: The time limit for TLS and the handshake.
        idle_s: How long a link is silent before it counts as idle. Longer than `silence_s` of `serve_sink`,
            so that no link is closed in the middle of a move.

    Raises:
        ConfigError: an argument is out of range.
    """

    connections: int = 256
    per_peer: int = 64
    handshake_s: float = 10.0
    idle_s: float = 120.0

    def __post_init__(self) -> None:
        check_counts(ConfigError, 1, connections=self.connections, per_peer=self.per_peer)
        check_positive_seconds(ConfigError, handshake_s=self.handshake_s, idle_s=self.idle_s)


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted connection.

    Attributes:
        stream: Its socket.
        peer: The address of the other end, "" for a Unix socket.
        is_open: Whether the handshake is complete.
        closed_for: Why it was closed for another connection, "" if it was not.
        scope: Of the task that serves it.
    """

    stream: SocketBytes
    peer: str
    is_open: bool = False
    closed_for: str = ""
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def __str__(self) -> str:
        return self.peer or "a Unix socket"


class Connections:
    """The connections of a server, oldest first."""

    def __init__(self, limits: LinkLimits) -> None:
        self.limits = limits
        self._all: dict[Connection, None] = {}

    def admit(self, new: Connection) -> str:
        """Add a connection, closing an idle one where there are too many; return why it is refused, or ""."""
        of_peer = [each for each in self._all if new.peer and each.peer == new.peer]
        refused = self._make_room(of_peer, self.limits.per_peer, f" from {new}")
        refused = refused or self._make_room(list(self._all), self.limits.connections, "")
        if not refused:
            self._all[new] = None
        return refused

    def remove(self, connection: Connection) -> None:
        """Forget a connection that has ended; it may be forgotten already."""
        self._all.pop(connection, None)

    def _make_room(self, held: list[Connection], most: int, whose: str) -> str:
        """Close an idle connection if `most` are held; return why there is still no room, or ""."""
        if len(held) < most:
            return ""
        reason = f"there are {len(held):,} connections{whose}, the most that there may be"
        if (idle := self._longest_idle(held)) is None:
            return f"{reason}, and none is idle"
        idle.closed_for = f"{reason}, and it was idle for longest"
        idle.scope.cancel()
        self.remove(idle)
        return ""

    def _longest_idle(self, held: list[Connection]) -> Connection | None:
        """Return the oldest connection that is no link yet, else the link that is silent for longest."""
        for connection in held:
            if not connection.is_open:
                return connection
        silent = min(held, key=lambda each: each.stream.last_used_s)
        is_idle = anyio.current_time() - silent.stream.last_used_s >= self.limits.idle_s
        return silent if is_idle else None
