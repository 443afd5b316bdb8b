"""An engine that only imports KV blocks, and records the calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from anyio.lowlevel import checkpoint

from hotswap import ModelId, Request, RequestId
from hotswap.abc import KVLayout, KVPages, KVSink, KVSource

LAYOUT = KVLayout(
    model=ModelId("m"),
    weights="crc32:1 True",
    adapter=None,
    block_tokens=4,
    layers=((2, 8, 8, "float32"), (1, 4, 4, "bfloat16")),
    block_bytes=600,
)


@dataclass
class RecordingEngine:
    """`fail` maps a method to the error that it raises."""

    fail: dict[str, Exception] = field(default_factory=dict[str, Exception])
    num_present_blocks: int = 0
    num_open: int = 0
    requests: list[Request] = field(default_factory=list[Request])
    heard: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])

    def export_kv(self, request: RequestId) -> AbstractAsyncContextManager[KVSource]:
        raise NotImplementedError

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        await self.did("open")
        self.requests.append(request)
        self.num_open += 1
        try:
            yield RecordingSink(self)
        finally:
            self.num_open -= 1

    async def did(self, verb: str, *what: object) -> None:
        await checkpoint()
        if verb in self.fail:
            raise self.fail[verb]
        self.heard.append((verb, *what))


class RecordingSink(KVSink):
    def __init__(self, engine: RecordingEngine) -> None:
        self.layout, self.num_present_blocks = LAYOUT, engine.num_present_blocks
        self._engine = engine

    async def reserve(self, num_tokens: int) -> None:
        await self._engine.did("reserve", num_tokens)

    async def write(self, pages: KVPages) -> None:
        data = bytes(pages.data)
        await self._engine.did("write", pages.first_block, pages.num_tokens, data)
        assert pages.data == data, "the pages changed while they were written"

    async def commit(self, tokens: Sequence[int]) -> None:
        await self._engine.did("commit", tuple(tokens))
