"""KV blocks of requests that have ended, which a core's prefix cache still has: listed, and read."""

from __future__ import annotations

from collections.abc import Mapping

from hotswap.backends.vllm.migration.context import PIECE_BYTES, MigrationContext, SharedPages, aborted
from hotswap.migration import CachedKV, KVLayout, KVPages
from hotswap.request import AdapterId, ModelId

__all__ = ["VllmCachedKV", "list_cached"]


class VllmCachedKV(CachedKV):
    """The cached blocks of one request that has ended; they are looked up anew for each piece that is copied.

    Args:
        context: The engine's.
        layout: The layout of the blocks.
        ended: The number of the request in the core.
        tokens: The tokens of its cached blocks.
    """

    def __init__(
        self, context: MigrationContext, layout: KVLayout, ended: int, tokens: tuple[int, ...]
    ) -> None:
        self.layout, self.tokens = layout, tokens
        self._context, self._ended = context, ended

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        block_bytes, block_tokens = self.layout.block_bytes, self.layout.block_tokens
        if first_block * block_tokens + num_tokens > len(self.tokens):
            raise aborted("copy", "the prefix has fewer tokens than that")
        num_blocks = -(-num_tokens // block_tokens)
        most = max(1, PIECE_BYTES // block_bytes)
        data = bytearray(num_blocks * block_bytes)
        memory = SharedPages()
        try:
            for at in range(0, num_blocks, most):
                num_now = min(most, num_blocks - at)
                with memory.room(num_now * block_bytes) as room:
                    await self._save(first_block + at, num_now, memory.path)
                    data[at * block_bytes : (at + num_now) * block_bytes] = room
        finally:
            # Not before the core has answered calls that were cancelled: it opens the memory by its path.
            self._context.tell("counts", then=memory.close)
        return KVPages(first_block, num_tokens, memoryview(data))

    async def _save(self, first_block: int, num_blocks: int, path: str) -> None:
        offsets = self._context.shape.offsets
        if not await self._context.ask(
            "save_ended", self._ended, first_block, num_blocks, path, self.layout.block_bytes, offsets
        ):
            raise aborted("copy", "the prefix is no longer cached")


async def list_cached(
    context: MigrationContext, model: ModelId, adapters: Mapping[str, AdapterId]
) -> list[VllmCachedKV]:
    """Return what the prefix cache has of requests that have ended, the latest first.

    Args:
        context: The engine's migration context.
        model: The model that serves.
        adapters: Those that are loaded, by vLLM's names of them.
    """
    names: Mapping[str, AdapterId | None] = {"": None, **adapters}
    return [
        VllmCachedKV(context, context.layout(model, names[adapter]), ended, tuple(tokens))
        for ended, adapter, tokens in await context.ask("list_ended", context.core.weights)
        if adapter in names
    ]
