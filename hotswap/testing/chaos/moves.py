"""Both ends of a move of KV blocks, with injected delays and aborts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from hotswap.migration import KVPages, KVSink, KVSource, Stopped

__all__ = ["ChaosSink", "ChaosSource", "Disturb"]

_T = TypeVar("_T")


class Disturb(Protocol):
    """Runs the work of a stage, or injects a fault."""

    async def __call__(self, stage: str, work: Callable[[], Awaitable[_T]]) -> _T: ...


class ChaosSource(KVSource):
    """A source with injected faults."""

    def __init__(self, source: KVSource, disturb: Disturb) -> None:
        self.layout = source.layout
        self._source, self._disturb = source, disturb

    async def num_tokens(self) -> int:
        return await self._disturb("copy", self._source.num_tokens)

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        return await self._disturb("copy", partial(self._source.read, first_block, num_tokens))

    async def stop(self) -> Stopped:
        return await self._disturb("stop", self._source.stop)

    async def release(self) -> None:
        await self._disturb("release", self._source.release)


class ChaosSink(KVSink):
    """A sink with injected faults."""

    def __init__(self, sink: KVSink, disturb: Disturb) -> None:
        self.layout, self.num_present_blocks = sink.layout, sink.num_present_blocks
        self._sink, self._disturb = sink, disturb

    async def reserve(self, num_tokens: int) -> None:
        await self._disturb("reserve", partial(self._sink.reserve, num_tokens))
        self.num_present_blocks = self._sink.num_present_blocks

    async def write(self, pages: KVPages) -> None:
        await self._disturb("copy", partial(self._sink.write, pages))

    async def commit(self, tokens: Sequence[int]) -> None:
        await self._disturb("commit", partial(self._sink.commit, tokens))
