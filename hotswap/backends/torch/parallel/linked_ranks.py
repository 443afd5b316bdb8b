"""`LinkedRanks`: the ranks of a stage on another node, over a link to the host that starts them there."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from typing import TypeAlias

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from hotswap.backends.remote.messages import Said, taking
from hotswap.backends.torch.parallel import link_messages
from hotswap.backends.torch.parallel.grid import RankPosition
from hotswap.backends.torch.parallel.link import StageLink
from hotswap.backends.torch.parallel.link_messages import Ended, event_of, said_commands
from hotswap.backends.torch.parallel.messages import NumberedCommand, Reply
from hotswap.backends.torch.parallel.nodes import StageNode
from hotswap.backends.torch.parallel.stage_ranks import RankState, Source, StageRanks, lost
from hotswap.backends.transports.link_errors import first_reason_in, reason_in
from hotswap.errors import HotswapError, InstanceLost, MigrationAborted

__all__ = ["LinkedRanks"]

log = logging.getLogger("hotswap")

# The time that a host has to end its ranks, before the link is closed.
_END_S = 10.0


class _Lost:
    """The link has ended."""


_Event: TypeAlias = Ended | tuple[int, Reply] | _Lost


class LinkedRanks(StageRanks):
    """The ranks of one stage on another node. The link is served by a thread with an event loop of its own.

    What the thread receives waits in a queue, with a byte in a socket, until `receive` takes it.

    Args:
        node: The node.
        positions: The positions of the ranks.
        engine: The engine's name, for messages.
    """

    def __init__(self, node: StageNode, positions: Sequence[RankPosition], engine: str) -> None:
        self._ranks = [RankState(position) for position in positions]
        self._node, self._engine, self._stage = node, engine, positions[0].stage
        self._events = deque[_Event]()
        self._endings = dict[int, Ended]()
        self._wakeup, self._its_wakeup = socket.socketpair()
        self._alarm, self._its_alarm = socket.socketpair()
        for end in (self._wakeup, self._its_wakeup):
            end.setblocking(False)
        self._cause = self._reason = ""  # what has ended first, and why the link has
        self._thread = ExitStack()
        self._portal: BlockingPortal | None = None
        self._lock = threading.Lock()
        self._is_killed = False
        # Of the thread alone.
        self._scope: anyio.CancelScope | None = None
        self._link: StageLink | None = None
        self._has_ended = anyio.Event()

    @property
    def ranks(self) -> Sequence[RankState]:
        return self._ranks

    def open(self) -> str:
        """Open the link, and return the address of this machine by which the node reaches it. Blocking.

        Raises:
            InstanceLost: the node gives no link.
        """
        with self._lock:
            if not self._is_killed:
                self._portal = self._thread.enter_context(start_blocking_portal("asyncio"))
        if self._portal is not None:
            with suppress(RuntimeError):  # the task ended without a link
                _, address = self._portal.start_task(self._serve)
                return str(address)
        reason = self._reason or "it was ended"
        raise InstanceLost(f"The {self._name} of engine {self._engine!r} gives no ranks: {reason}.")

    def launch(self, address: str) -> None:
        """Do nothing: the host starts the ranks at their first command."""

    def send(self, messages: Sequence[NumberedCommand], files: Sequence[Sequence[int]]) -> None:
        said = said_commands(messages[0].number, [message.command for message in messages])
        assert self._portal is not None, "it was opened"
        self._portal.call(self._say, said)

    @property
    def wakeup(self) -> socket.socket:
        """A socket that is readable while `receive` has something to take."""
        return self._wakeup

    def sources(self) -> Sequence[Source]:
        return () if all(rank.ended for rank in self.ranks) else (self._wakeup,)

    def receive(self, ready: Collection[object]) -> None:
        if self._wakeup not in ready:
            return
        with suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass
        while self._events:
            match self._events.popleft():
                case Ended() as ended:
                    self._endings[ended.part] = ended
                    self.ranks[ended.part].ended = True
                case _Lost():
                    for rank in self.ranks:
                        rank.ended = True
                case (part, reply):
                    self.ranks[part].take(reply)

    def loss(self, rank: RankState, engine: str) -> InstanceLost:
        ended = self._endings.get(rank.position.part)
        if ended is not None:
            where = f" on node {self._node.name!r}"
            return lost(rank.position, engine, ended.code, where, ended.output)
        what = f"The {self._name} of engine {engine!r}"
        reason = self._reason or "its link is broken"
        return InstanceLost(f"{what} is lost: {reason}; unload the engine to restart its ranks.")

    def alarms(self) -> Sequence[socket.socket]:
        return (self._alarm,)

    def cause(self, alarm: socket.socket) -> str:
        return self._cause

    def kill(self) -> None:
        with self._lock:
            if self._is_killed:
                return
            self._is_killed = True
            if self._portal is not None:
                self._portal.start_task_soon(self._end)

    def join(self) -> None:
        self._thread.close()
        for end in (self._wakeup, self._its_wakeup, self._alarm, self._its_alarm):
            end.close()

    @property
    def _name(self) -> str:
        return f"node {self._node.name!r} of stage {self._stage}"

    # ------------------------------------------------------------------ of the thread

    async def _serve(self, *, task_status: TaskStatus[str]) -> None:
        """Serve the link until it is lost or ended."""
        reason = "it was ended"
        try:
            with anyio.CancelScope() as self._scope:
                if not self._is_killed:
                    reason = await self._served(task_status)
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    if not self._is_killed:
                        reason = await self._node.reason_of_loss(reason)
                finally:
                    self._reason = reason
                    self._note(_Lost(), f"the {self._name} is lost: {reason}")
                    try:
                        await self._node.close()
                    finally:
                        self._has_ended.set()

    async def _served(self, task_status: TaskStatus[str]) -> str:
        """Serve the link, and return why it has ended."""
        try:
            async with await self._node.open() as channel:
                self._link = StageLink(channel, self._node.silence_s)
                task_status.started(self._link.own_address)
                return await self._received(self._link)
        except MigrationAborted as exc:
            return reason_in(exc)
        except HotswapError as exc:
            return str(exc).rstrip(".")
        except Exception as exc:
            log.exception("The %s of engine %r failed.", self._name, self._engine)
            return repr(exc)

    async def _received(self, link: StageLink) -> str:
        """Take what the host says; return why the link has ended."""
        reason = ""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(link.run)
                while True:
                    for message in await link.receive():
                        with taking(message):
                            self._take(event_of(message, len(self.ranks)))
        except* MigrationAborted as errors:
            reason = first_reason_in(errors)
        return reason

    def _take(self, event: Ended | tuple[int, Reply]) -> None:
        match event:
            case Ended():
                position, code = self.ranks[event.part].position, event.code
                where = f"on node {self._node.name!r} (exit code {code})"
                self._note(event, f"the process of its {position} ended {where}")
            case _:
                self._events.append(event)
                self._wake()

    def _note(self, event: _Event, cause: str) -> None:
        """Queue an end; the first one is the cause."""
        self._cause = self._cause or cause
        self._events.append(event)
        self._wake()
        with suppress(OSError):
            self._its_alarm.send(b"!")

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is full of bytes, and so readable
            self._its_wakeup.send(b"!")

    def _say(self, said: Said) -> None:
        assert self._link is not None, "it was opened"
        self._link.say(said)

    async def _end(self) -> None:
        """Have the host end its ranks and the link, and end the link if it does not."""
        if self._link is not None:
            self._link.say(link_messages.end())
            with anyio.move_on_after(_END_S):
                await self._has_ended.wait()
        if self._scope is not None:
            self._scope.cancel()
