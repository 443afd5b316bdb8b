"""The KV sink of a vLLM engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

from anyio.lowlevel import checkpoint

from hotswap.backends.notifier import Observed
from hotswap.backends.vllm.migration.context import PIECE_BYTES, MigrationContext, SharedPages, aborted
from hotswap.migration import KVPages, KVSink
from hotswap.request import Request

__all__ = ["LAPSE_S", "VllmKVSink", "lent_sink"]

# A sink that gets no call for so long frees its blocks (Llumnix's engine: 10 s).
LAPSE_S = 10.0


class VllmKVSink(KVSink):
    """Reserves and fills KV blocks of a core for a request that arrives.

    Args:
        context: The engine's.
        request: The request as it was when the move began.
        ended: Called once with the sink, when it holds no blocks any more.
        lapse_s: The longest time between two calls.

    Attributes:
        id: Its id in the core.
        request: As given.
        num_blocks: How many blocks it holds.
        committed: Whether a stream of the request takes the blocks.
    """

    num_blocks = Observed[int](lambda sink: sink._context.life.notifier.load_changed())

    def __init__(
        self,
        context: MigrationContext,
        request: Request,
        ended: Callable[[VllmKVSink], None],
        lapse_s: float = LAPSE_S,
    ) -> None:
        self.id, self.request, self.layout = uuid4().hex, request, context.layout_for(request)
        self._context, self._ended, self._lapse_s = context, ended, lapse_s
        self.num_blocks, self.committed = 0, False
        self._num_tokens = 0  # written so far
        self._memory = SharedPages()
        self._closed = self._writing = False
        self._timer = self._start_timer()

    async def reserve(self, num_tokens: int) -> None:
        self._renew()
        wanted = -(-num_tokens // self.layout.block_tokens)
        if wanted <= self.num_blocks:
            return await checkpoint()
        if missing := await self._context.ask("hold", self.id, wanted):
            raise aborted("reserve", f"{missing} KV blocks are missing")
        self._renew()
        self.num_blocks = wanted
        return None

    async def write(self, pages: KVPages) -> None:
        self._renew()
        block_bytes, block_tokens = self.layout.block_bytes, self.layout.block_tokens
        num_blocks, first = -(-pages.num_tokens // block_tokens), pages.first_block * block_tokens
        room = self.num_blocks * block_tokens
        if (
            len(pages.data) != num_blocks * block_bytes
            or first > self._num_tokens
            or first + pages.num_tokens > room
        ):
            raise aborted("copy", f"pages of tokens {first} to {first + pages.num_tokens} do not fit")
        most = max(1, PIECE_BYTES // block_bytes)
        self._writing = True
        try:
            for at in range(0, num_blocks, most):
                count = min(most, num_blocks - at)
                self._memory.put(pages.data[at * block_bytes : (at + count) * block_bytes])
                await self._restore(pages.first_block + at, count)
        finally:
            self._writing = False
        if not num_blocks:
            await checkpoint()
        self._renew()
        self._num_tokens = max(self._num_tokens, first + pages.num_tokens)

    async def _restore(self, first_block: int, num_blocks: int) -> None:
        done = await self._context.ask(
            "restore",
            self.id,
            first_block,
            num_blocks,
            self._memory.path,
            self.layout.block_bytes,
            self._context.shape.offsets,
        )
        if not done:
            raise aborted("copy", "its blocks were freed")

    async def commit(self, tokens: Sequence[int]) -> None:
        self._renew()
        if tuple(tokens[: self.request.num_tokens]) != self.request.tokens:
            raise aborted("commit", "the request is not the one that was announced")
        if not await self._context.ask("commit", self.id, list(tokens), min(self._num_tokens, len(tokens))):
            raise aborted("commit", "its blocks were freed")
        self._renew()
        self.committed = True

    def close(self) -> None:
        """Release all blocks; published ones stay in the prefix cache until their memory is needed."""
        self._timer.cancel()
        if not self._closed:
            self._closed = True
            self._context.tell("drop", self.id, then=self._memory.close)
            self.num_blocks = 0
            self._ended(self)

    def _renew(self) -> None:
        self._context.refuse_if_gone()
        if self._closed:
            raise aborted("copy", f"its destination got no call for {self._lapse_s:g} s")
        self._timer.cancel()
        self._timer = self._start_timer()

    def _start_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self._lapse_s, self._lapse)

    def _lapse(self) -> None:
        if self._writing:
            self._timer = self._start_timer()
        else:
            self.close()


@asynccontextmanager
async def lent_sink(sink: VllmKVSink) -> AsyncGenerator[VllmKVSink]:
    """Yield a sink, and release its blocks afterwards."""
    try:
        await checkpoint()
        yield sink
    finally:
        sink.close()
