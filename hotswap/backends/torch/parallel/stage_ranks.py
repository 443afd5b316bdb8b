"""`StageRanks`: the ranks of one stage as the engine's process has them, on this machine or on another."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TypeAlias

from hotswap.backends.torch.parallel.grid import RankPosition
from hotswap.backends.torch.parallel.messages import Failed, NumberedCommand, Reply
from hotswap.errors import InstanceLost

__all__ = ["RankState", "RemoteTraceback", "Source", "StageRanks", "lost"]


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text; the `__cause__` of the error raised here."""


Source: TypeAlias = "Connection[object, Reply] | socket.socket"
"""What becomes readable when ranks have replied."""


@dataclass(slots=True, eq=False)
class RankState:
    """What is known of one rank.

    Attributes:
        position: The position of the rank.
        inbox: Replies that were not collected yet, by the number of the command.
        final_error: The error with which it ended, if it could report one.
        ended: Whether it has ended, or cannot be reached any more.
    """

    position: RankPosition
    inbox: dict[int, Reply] = field(default_factory=dict[int, Reply])
    final_error: Failed | None = None
    ended: bool = False

    def take(self, reply: Reply) -> None:
        """Keep a reply; the report of an error with which the rank ends is its last."""
        if isinstance(reply, Failed) and reply.ends:
            self.final_error, self.ended = reply, True
        else:
            self.inbox[reply.number] = reply


class StageRanks(ABC):
    """The ranks of one stage. One thread at a time calls the methods, but for those that are thread-safe."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[RankState]:
        """The ranks of the stage, in order."""

    @abstractmethod
    def launch(self, address: str) -> None:
        """Start the ranks' processes, or have them started at the first command. Blocking.

        Args:
            address: The address of this machine at which ranks of other nodes reach it; "" if there are none.

        Raises:
            InstanceLost: they cannot be started.
        """

    @abstractmethod
    def send(self, messages: Sequence[NumberedCommand], files: Sequence[Sequence[int]]) -> None:
        """Send each rank its command, and open files where it is on this machine.

        Ranks that cannot be reached are marked as ended.

        Args:
            messages: One command per rank, of one kind and with one number.
            files: The file descriptors to send with each.
        """

    @abstractmethod
    def sources(self) -> Sequence[Source]:
        """Return what becomes readable when there are replies; of ranks that have not ended."""

    @abstractmethod
    def receive(self, ready: Collection[object]) -> None:
        """Receive replies from what is readable of `sources`, and note the ranks that have ended."""

    @abstractmethod
    def loss(self, rank: RankState, engine: str) -> InstanceLost:
        """Return the error for a rank that ended without a report."""

    @abstractmethod
    def alarms(self) -> Sequence[socket.socket]:
        """Return sockets that become readable when a rank has ended by itself; `cause` tells which."""

    @abstractmethod
    def cause(self, alarm: socket.socket) -> str:
        """Say what has ended, for the end of a sentence."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the ranks; calls that wait for them fail. Thread-safe, and returns at once."""

    @abstractmethod
    def join(self) -> None:
        """Wait until killed ranks have ended, and release all resources. Blocking, and bounded."""


def lost(position: RankPosition, engine: str, code: int | None, where: str, output: str) -> InstanceLost:
    """Return the error of a rank whose process ended without a report; its standard error is the cause."""
    error = InstanceLost(
        f"The {position} of engine {engine!r} ended{where} (exit code {code}); unload the engine to restart "
        "its ranks."
    )
    if output:
        error.__cause__ = RemoteTraceback(f"\n{output}")
    return error
