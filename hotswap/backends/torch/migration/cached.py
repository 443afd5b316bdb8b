"""What the prefix cache keeps of requests that have ended: listed, and read while it is there."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from functools import partial

import torch
from torch import Tensor

from hotswap.backends.torch.blocks import BlockPool, Content
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.migration.context import PIECE_BYTES, MigrationContext, aborted
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sequence import Sequence
from hotswap.backends.torch.worker import Pieces
from hotswap.migration import CachedKV, KVLayout, KVPages
from hotswap.request import AdapterId, ModelId

__all__ = ["list_cached"]


class TorchCachedKV(CachedKV):
    """One chain of cached blocks, which is looked up anew for each piece that is copied.

    Of a model with recurrent states it ends where a snapshot of them is.

    Args:
        context: The engine's migration context.
        layout: The layout of the blocks.
        contents: What the blocks had when they were listed.
    """

    def __init__(self, context: MigrationContext, layout: KVLayout, contents: Items[Content]) -> None:
        self.layout = layout
        self.tokens = tuple(token for content in contents for token in content.tokens)
        self._context, self._keys = context, [content.key for content in contents]
        self._buffer = torch.empty(0, dtype=torch.uint8)

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        num_blocks = blocks_for(num_tokens, self.layout.block_tokens)
        keys = self._keys[first_block : first_block + num_blocks]
        if len(keys) < num_blocks:
            raise aborted("copy", "the prefix has fewer tokens than that")
        size_bytes = num_blocks * self.layout.block_bytes
        if first_block + num_blocks == len(self._keys):
            size_bytes += self.layout.state_bytes
        if len(self._buffer) < size_bytes:
            self._buffer = self._context.host_memory(size_bytes)
        out = self._buffer[:size_bytes]
        await self._context.between_steps(partial(self._copy, keys, out))
        return KVPages(first_block, num_tokens, out.numpy().data)

    def _copy(
        self, keys: Items[bytes], out: Tensor, runner: Runner, sequences: Mapping[int, Sequence]
    ) -> Pieces:
        size = self.layout.block_bytes
        most = max(1, PIECE_BYTES // max(1, size))
        for at in range(0, len(keys), most):
            found = [runner.batcher.blocks.find(key) for key in keys[at : at + most]]
            blocks = [block for block in found if block is not None]
            if len(blocks) < len(found):
                raise aborted("copy", "the prefix is no longer cached")
            self._context.cache.save(blocks, out[at * size : (at + len(blocks)) * size])
            yield
        if len(out) > len(keys) * size:
            self._copy_states(keys[-1], out[len(keys) * size :], runner)

    def _copy_states(self, key: bytes, out: Tensor, runner: Runner) -> None:
        states, snapshots = self._context.states, runner.batcher.snapshots
        slot = None if snapshots is None else snapshots.find(key)
        if states is None or slot is None:
            raise aborted("copy", "the states after the prefix are no longer there")
        states.save(slot, out)


async def list_cached(
    context: MigrationContext, model: ModelId, roots: Mapping[bytes, AdapterId | None]
) -> list[CachedKV]:
    """Return the longest prefixes that are cached and that no request uses to their ends.

    Those of requests that ended last come first; those of a model with recurrent states up to a snapshot.

    Args:
        context: The engine's migration context.
        model: The model that serves.
        roots: The root keys of it, alone and with each loaded adapter.
    """
    chains: list[tuple[bytes, list[Content]]] = []
    await context.between_steps(partial(_collect, chains))
    return [
        TorchCachedKV(context, context.layout(model, roots[root]), contents)
        for root, contents in chains
        if root in roots
    ]


def _collect(
    chains: list[tuple[bytes, list[Content]]], runner: Runner, sequences: Mapping[int, Sequence]
) -> Pieces:
    pool, snapshots, seen = runner.batcher.blocks, runner.batcher.snapshots, set[bytes]()
    for content in pool.cached_ends():
        root, contents = _chain(pool, content)
        if snapshots is not None:
            contents = contents[: snapshots.longest([one.key for one in contents])]
        if contents and contents[-1].key not in seen:
            seen.add(contents[-1].key)
            chains.append((root, contents))
        yield


def _chain(pool: BlockPool, end: Content) -> tuple[bytes, list[Content]]:
    """Return the root key of a content, and all contents from there to it, as far as they are there."""
    contents = [end]
    while (block := pool.find(contents[-1].parent)) is not None and (content := pool.content(block)):
        contents.append(content)
    return contents[-1].parent, contents[::-1]
