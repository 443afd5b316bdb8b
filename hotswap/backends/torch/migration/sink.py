"""The taking end of a move: blocks set aside for a request, filled, and then found by its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from functools import partial

import torch
from anyio.lowlevel import checkpoint
from torch import Tensor

from hotswap.backends.torch.adapters.places import Place
from hotswap.backends.torch.batcher import Sequence
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.migration.desk import PIECE_BYTES, Announced, Desk, aborted, beside
from hotswap.backends.torch.prefix import block_content, extend_keys, find_prefix, root_key
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.worker import Pieces
from hotswap.migration import KVLayout, KVPages, KVSink
from hotswap.request import Request

__all__ = ["LAPSE_S", "TorchKVSink", "lent_sink"]

# Pages of so few bytes, or of so few blocks, are written at once, beside the step that runs: those of a last
# copy among them, for which a client waits.
_SMALL_BYTES, _SMALL_BLOCKS = 4 << 20, 4
# A sink that hears nothing for so long frees its blocks (Llumnix's engine: 10 s).
LAPSE_S = 10.0


class TorchKVSink(KVSink):
    """Blocks that an engine reserves for a request that arrives.

    Args:
        desk: The engine's.
        request: The request as it was when the move began.
        layout: What the blocks mean.
        ranks: Where its adapter lies.
        lapse_s: How long it may hear nothing.
    """

    def __init__(
        self,
        desk: Desk,
        request: Request,
        layout: KVLayout,
        ranks: Place | None,
        lapse_s: float = LAPSE_S,
    ) -> None:
        self.layout = layout
        self._desk, self._request, self._lapse_s = desk, request, lapse_s
        self._root = root_key(desk.epoch, 0 if ranks is None else ranks.serial)
        self._present: list[int] = []  # found here already, held
        self._blocks: list[int] = []  # taken for what is to come
        self._keys: list[bytes] = []  # of the request's full blocks
        self._num_tokens = 0  # there, from the first on
        self._num_published = 0  # of the request's blocks
        self._closed = self._writing = False
        self._timer = asyncio.get_running_loop().call_later(lapse_s, self._lapse)

    async def open(self) -> None:
        """Find what the engine has already of the request's tokens."""
        await self._desk.between_steps(self._find)
        announced = Announced(self._request.tokens, self._root, tuple(self._keys))
        self._desk.arriving[self._request.id] = announced
        self._num_tokens = self.num_present_blocks * self.layout.block_tokens

    async def reserve(self, num_tokens: int) -> None:
        self._hear()
        if blocks_for(num_tokens, self.layout.block_tokens) > self.num_present_blocks + len(self._blocks):
            await self._desk.between_steps(partial(self._take, num_tokens))
        else:
            await checkpoint()

    async def write(self, pages: KVPages) -> None:
        self._hear()
        size_bytes = blocks_for(pages.num_tokens, self.layout.block_tokens) * self.layout.block_bytes
        first = pages.first_block * self.layout.block_tokens
        room = (self.num_present_blocks + len(self._blocks)) * self.layout.block_tokens
        if len(pages.data) != size_bytes or first > self._num_tokens or first + pages.num_tokens > room:
            raise aborted("copy", f"pages of tokens {first} to {first + pages.num_tokens} do not fit")
        if not size_bytes:
            return
        data = torch.frombuffer(pages.data, dtype=torch.uint8)
        self._writing = True
        try:
            if size_bytes <= max(_SMALL_BYTES, _SMALL_BLOCKS * self.layout.block_bytes):
                await beside(partial(self._write_now, pages, data), size_bytes)
            else:
                await self._desk.between_steps(partial(self._write, pages, data))
        finally:
            self._writing = False
        self._hear()
        self._num_tokens = max(self._num_tokens, first + pages.num_tokens)

    async def commit(self, tokens: Items[int]) -> None:
        self._hear()
        if tuple(tokens[: self._request.num_tokens]) != self._request.tokens:
            raise aborted("commit", "the request is not the one that was announced")
        # The stream that follows is sent to the same thread, and so comes after it.
        self._desk.ask(partial(self._publish, list(tokens[: self._num_tokens])))

    def close(self) -> None:
        """Let go of all blocks; those that were published stay for as long as nobody wants the room."""
        self._timer.cancel()
        self._desk.arriving.pop(self._request.id, None)
        if not self._closed and not self._desk.life.is_lost:
            self._desk.ask(self._give)
        self._closed = True

    def _hear(self) -> None:
        self._desk.refuse_if_gone()
        if self._closed:
            raise aborted("copy", f"its destination heard nothing for {self._lapse_s:g} s")
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._lapse_s, self._lapse)

    def _lapse(self) -> None:
        if self._writing:
            self._hear()
        else:
            self.close()

    # ------------------------------------------------------------------ on the engine's thread

    def _find(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        tokens, pool = self._request.tokens, runner.batcher.blocks
        found = find_prefix(pool, self._keys_of(tokens), self._root, tokens, self.layout.block_tokens).blocks
        pool.hold(found)
        self._present = list(found)
        self.num_present_blocks = self._num_published = len(found)
        yield from ()

    def _take(self, num_tokens: int, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        batcher = runner.batcher
        have = self.num_present_blocks + len(self._blocks)
        more = blocks_for(num_tokens, self.layout.block_tokens) - have
        # Those that run may each want a block with the next step, and the newcomer two, one for a copy.
        room = batcher.blocks.num_free - len(batcher.running) - len(batcher.parked) - 2
        if more > room:
            raise aborted("reserve", f"{more} KV blocks are wanted and {max(0, room)} free")
        if more > 0:
            self._blocks += batcher.blocks.take(more)
        yield from ()

    def _write(
        self, pages: KVPages, data: Tensor, runner: Runner, sequences: Mapping[int, Sequence]
    ) -> Pieces:
        blocks, data = self._missing(pages, data)
        most, size = max(1, PIECE_BYTES // self.layout.block_bytes), self.layout.block_bytes
        for at in range(0, len(blocks), most):
            if self._closed:
                return
            part = blocks[at : at + most]
            self._desk.cache.restore(part, data[at * size : (at + len(part)) * size])
            yield
        num_full = (
            pages.first_block * self.layout.block_tokens + pages.num_tokens
        ) // self.layout.block_tokens
        if self._closed:
            return
        # What was announced and is here needs no commit: it is the prefix of those tokens, whoever has them.
        yield from self._publish(self._request.tokens, runner, sequences, most=num_full)

    def _write_now(self, pages: KVPages, data: Tensor) -> None:
        blocks, data = self._missing(pages, data)
        if blocks:
            self._desk.cache.restore(blocks, data)

    def _missing(self, pages: KVPages, data: Tensor) -> tuple[list[int], Tensor]:
        """The pages' blocks with their bytes, those left out that were here before."""
        size = self.layout.block_bytes
        first = max(pages.first_block, self.num_present_blocks)
        end = pages.first_block + len(data) // size
        blocks = [*self._present, *self._blocks][first:end]
        return blocks, data[(first - pages.first_block) * size :]

    def _publish(
        self,
        tokens: Items[int],
        runner: Runner,
        sequences: Mapping[int, Sequence],
        *,
        most: int | None = None,
    ) -> Pieces:
        """Let requests find the blocks of these tokens that they do not yet: the first `most`, or all."""
        block_tokens, pool, keys = self.layout.block_tokens, runner.batcher.blocks, self._keys_of(tokens)
        end = blocks_for(len(tokens), block_tokens) if most is None else min(most, len(keys))
        for at in range(self._num_published, end):
            content = block_content(
                keys[at - 1] if at else self._root, tokens[at * block_tokens : (at + 1) * block_tokens]
            )
            pool.publish(self._blocks[at - self.num_present_blocks], content)
        self._num_published = max(self._num_published, end)
        yield from ()

    def _keys_of(self, tokens: Items[int]) -> list[bytes]:
        num_blocks = len(tokens) // self.layout.block_tokens
        extend_keys(self._keys, self._root, tokens, self.layout.block_tokens, num_blocks=num_blocks)
        return self._keys

    def _give(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        runner.batcher.blocks.give([*self._present, *self._blocks])
        self._present, self._blocks = [], []
        yield from ()


@asynccontextmanager
async def lent_sink(sink: TorchKVSink) -> AsyncGenerator[TorchKVSink]:
    """Lend a sink; its blocks are let go afterwards."""
    try:
        await sink.open()
        yield sink
    finally:
        sink.close()
