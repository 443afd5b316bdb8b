"""`LendsMemory`: memory of a remote engine's host for KV blocks, as its controller asks for it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from hotswap.backends.remote.control import ControlLink
from hotswap.backends.remote.linked import LinkedEngine
from hotswap.backends.remote.messages import MAX_PAYLOAD_BYTES
from hotswap.backends.remote.moves import End, RemoteSink, RemoteSource
from hotswap.backends.transports import wire
from hotswap.migration import KVLayout

__all__ = ["LendsMemory", "LentMemory"]


class LentMemory:
    """Pages of a host's memory that it lends, while a block runs.

    Attributes:
        sink: What writes to them; `source` reads them. One of the two is used.
    """

    def __init__(self, end: End) -> None:
        self.sink, self.source, self._end = RemoteSink(end), RemoteSource(end, is_stored=True), end

    @property
    def is_in_use(self) -> bool:
        """Whether the host may still copy to the pages or from them, though it can be reached."""
        return not self._end.is_left and not self._end.link.lost


class LendsMemory(LinkedEngine):
    """An engine whose host keeps KV blocks for its controller, which says where in its memory they are."""

    @property
    def has_ended(self) -> bool:
        """Whether the engine was left; its host has given the memory back."""
        return self._tasks is None

    @property
    def memory_link(self) -> ControlLink | None:
        """The link over which the memory is had now; `None` while there is none."""
        return None if self._link is None or self._link.lost else self._link

    async def open_memory(self, memory: str, capacity_bytes: int) -> bool:
        """Have the host keep memory of a size, and return whether it still has what was in it.

        Raises:
            InstanceLost: the host cannot be reached.
            TierFull: it has no such memory.
        """
        link = self._linked()
        answer = await link.call("open_memory", memory=memory, capacity_bytes=capacity_bytes)
        with link.reading():
            return answer.fields.flag("is_kept")

    @asynccontextmanager
    async def lend_memory(
        self,
        memory: str,
        layout: KVLayout,
        pages: memoryview,
        *,
        is_sink: bool,
        first_block: int,
        num_tokens: int,
        has_states: bool,
    ) -> AsyncGenerator[LentMemory]:
        """Have pages be the sink or the source of a move while the block runs.

        Once it has ended the host copies nothing to them or from them any more, unless they are in use.

        Args:
            memory: Which memory.
            layout: The format of the blocks.
            pages: The numbers of their pages.
            is_sink: Whether they are written, else read.
            first_block: The first block.
            num_tokens: Where the tokens of the last one end.
            has_states: Whether the last pages are of recurrent states.

        Raises:
            InstanceLost: the host cannot be reached.
            MigrationAborted: it has no such memory.
        """
        link = self._linked()
        fields: dict[str, object] = {"first_block": first_block, "num_tokens": num_tokens}
        fields |= {"memory": memory, "is_sink": is_sink, "has_states": has_states}
        fields["layout"] = wire.layout_fields(layout)
        first = pages[:MAX_PAYLOAD_BYTES]
        end = End(self, link, await link.call("lend_memory", first, **fields))
        async with end.lent():
            for at in range(len(first), len(pages), MAX_PAYLOAD_BYTES):
                await end.call("name_pages", pages[at : at + MAX_PAYLOAD_BYTES])
            yield LentMemory(end)
