"""The KV source of a vLLM engine: full blocks are read while the request decodes, the rest once it stops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

from anyio.lowlevel import checkpoint

from hotswap.backends.vllm.migration.context import PIECE_BYTES, MigrationContext, SharedPages, aborted
from hotswap.backends.vllm.streams import Stream
from hotswap.migration import KVPages, KVSource, Stopped

__all__ = ["VllmKVSource", "lent_source"]


class VllmKVSource(KVSource):
    """Reads the KV blocks of one request of a core.

    Args:
        context: The engine's.
        stream: The request's.
        give_up: Ends the request's stream, and has the core forget it; false if it had ended before.
    """

    def __init__(self, context: MigrationContext, stream: Stream, give_up: Callable[[], bool]) -> None:
        self.layout = context.layout_for(stream.request)
        self._context, self._stream, self._give_up = context, stream, give_up
        self._memory = SharedPages()
        self._inside = ""  # the id of the request in the core

    async def num_tokens(self) -> int:
        return int(await self._ask("count"))

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        block_bytes, end = self.layout.block_bytes, first_block * self.layout.block_tokens + num_tokens
        num_blocks = -(-num_tokens // self.layout.block_tokens)
        most = max(1, PIECE_BYTES // block_bytes)
        # The shared memory holds one piece; several are collected in memory of their own.
        whole = memoryview(bytearray(num_blocks * block_bytes)) if num_blocks > most else None
        data = self._memory.room(max(1, min(num_blocks, most) * block_bytes))[: num_blocks * block_bytes]
        try:
            for at in range(0, num_blocks, most):
                count = min(most, num_blocks - at)
                await self._ask(
                    "save",
                    first_block + at,
                    count,
                    min((first_block + at + count) * self.layout.block_tokens, end),
                    self._memory.path,
                    block_bytes,
                    self._context.shape.offsets,
                )
                if whole is not None:
                    whole[at * block_bytes : (at + count) * block_bytes] = data[: count * block_bytes]
        except BaseException:
            data.release()  # or the error keeps the memory
            raise
        if not num_blocks:
            await self._ask("count")
        return KVPages(first_block, num_tokens, data if whole is None else whole)

    async def stop(self) -> Stopped:
        while not (parked := await self._ask("park")):
            await checkpoint()  # a step with it is under way
        num_computed, tokens = parked
        # Tokens of earlier steps may still be on the way through vLLM's client.
        await self._context.life.unless_lost(self._stream.has(len(tokens)))
        self._refuse_if_left()
        return Stopped(tuple(tokens), num_computed)

    async def release(self) -> None:
        self._context.refuse_if_gone()
        await checkpoint()
        if not self._give_up():
            raise aborted("release", "the request has ended or was taken away")

    def close(self) -> None:
        """Resume the request if it was stopped. No read may follow."""
        self._context.tell("unpark", self._inside, then=self._memory.close)

    async def _ask(self, verb: str, *arguments: Any) -> Any:
        """Ask the core about the request."""
        self._context.refuse_if_gone()
        inside = self._refuse_if_left()
        self._inside = inside
        answer = await self._context.ask(verb, inside, *arguments)
        self._refuse_if_left()
        if answer is None:
            raise aborted("copy", "the request waits for KV blocks, which others took, or has just ended")
        return answer

    def _refuse_if_left(self) -> str:
        inside = self._stream.inside_id
        if inside is None or not self._stream.is_open:
            raise aborted("copy", "the request has ended or was taken away")
        return inside


@asynccontextmanager
async def lent_source(source: VllmKVSource) -> AsyncGenerator[VllmKVSource]:
    """Yield a source; a request that was stopped and not released is resumed afterwards."""
    try:
        await source.num_tokens()
        yield source
    finally:
        source.close()
