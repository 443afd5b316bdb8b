"""`LinkedEngine`: what the verbs and the abilities of a remote engine share, its link."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from hotswap.backends.remote.control import Answer, ControlLink
from hotswap.backends.remote.status import RemoteStatus
from hotswap.engine import Engine
from hotswap.errors import InstanceError
from hotswap.metered_store import MeteredStore
from hotswap.store import WeightStore
from hotswap.transport import Channel

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["LinkedEngine", "count_read"]


class LinkedEngine(Engine):
    """An engine that has its verbs done at the other end of a link."""

    _status: RemoteStatus
    _link: ControlLink | None
    _tasks: TaskGroup | None

    @abstractmethod
    async def open_channel(self) -> Channel:
        """Open another link to the host, for blocks.

        Raises:
            MigrationAborted: it cannot be reached.
        """

    def _give(self, store: WeightStore) -> None:
        """Called with the store of a load or a preload, before the host is asked; a host has its own."""

    def _linked(self) -> ControlLink:
        """Return the link.

        Raises:
            InstanceLost: it has ended.
            InstanceError: there was none yet.
        """
        if self._link is None:
            raise InstanceError(f"Engine {self.id!r} cannot be used before `async with` has started it.")
        if self._link.lost:
            raise self._link.error()
        return self._link

    async def _call(self, verb: str, payload: memoryview | None = None, /, **fields: object) -> Answer:
        return await self._linked().call(verb, payload, **fields)


def count_read(link: ControlLink, store: WeightStore, answer: Answer) -> None:
    """Have a store that counts what is read count what the host has read in its place."""
    with link.reading():
        read = answer.fields
        num_bytes, tier, buffered = read.size("num_bytes"), read.text("tier"), read.flag("buffered")
    if isinstance(store, MeteredStore):
        store.count(num_bytes, tier, buffered=buffered)
