"""The KV sink of a migration: blocks are reserved for a request, filled, and then found by its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from anyio.lowlevel import checkpoint
from torch import Tensor

from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.arrival import Announced, Arrival
from hotswap.backends.torch.blocks import runs_of
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.migration.context import PIECE_BYTES, MigrationContext, aborted
from hotswap.backends.torch.prefix import block_content, extend_keys, find_prefix, root_key
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sequence import Sequence
from hotswap.backends.torch.worker import Pieces
from hotswap.migration import KVLayout, KVPages, KVSink
from hotswap.request import Request
from hotswap.worker_threads import in_thread

__all__ = ["LAPSE_S", "TorchKVSink", "lent_sink"]

# Pages of at most this many bytes or blocks are written at once, during a step: the last copy of a migration,
# for which the client waits, is this small.
_SMALL_BYTES, _SMALL_BLOCKS = 4 << 20, 4
# The time without a call after which a sink frees its blocks (Llumnix's engine: 10 s).
LAPSE_S = 10.0


class TorchKVSink(KVSink):
    """Reserves and fills KV blocks for a request that arrives, and a slot for its recurrent states.

    Args:
        context: The engine's migration context.
        request: The request at the start of the migration.
        layout: The layout of the blocks.
        adapter: The slot of its adapter; `None` without one.
        lapse_s: The longest time between two calls, in seconds.
    """

    def __init__(
        self,
        context: MigrationContext,
        request: Request,
        layout: KVLayout,
        adapter: AdapterSlot | None,
        lapse_s: float = LAPSE_S,
    ) -> None:
        self.layout = layout
        self._context, self._request, self._lapse_s = context, request, lapse_s
        self._root = root_key(context.weights, b"" if adapter is None else adapter.key)
        self._present: list[int] = []  # blocks found in the prefix cache and acquired
        self._blocks: list[int] = []  # blocks reserved for tokens that arrive
        self._keys: list[bytes] = []  # of the request's full blocks
        self._num_tokens = 0  # written so far, or found
        self._num_published = 0  # of the request's blocks
        self._slot: int | None = None  # reserved for states that arrive
        self._num_continued = 0  # tokens after the last of which the states are that were written
        self._arrival: Arrival | None = None  # once it was committed, for a model with states
        self._announced: Announced | None = None  # what the engine has been told of it
        self._closed = self._writing = False
        self._timer = self._start_timer()

    async def open(self) -> None:
        """Acquire the blocks of the request's tokens that are in the prefix cache."""
        await self._context.between_steps(self._find)
        self._announce(Announced(self._request.tokens, self._root, tuple(self._keys)))
        self._num_tokens = self.num_present_blocks * self.layout.block_tokens

    async def reserve(self, num_tokens: int) -> None:
        self._renew()
        lacks_slot = self.layout.state_bytes > 0 and self._slot is None and self._arrival is None
        missing = blocks_for(num_tokens, self.layout.block_tokens) - self.num_present_blocks
        if missing > len(self._blocks) or lacks_slot:
            num_reserved = len(self._blocks)
            with self._copying():  # a lapse would let others have what is then allocated and cleared
                await self._context.between_steps(partial(self._reserve_blocks, num_tokens))
                await in_thread(partial(self._allocate, self._blocks[num_reserved:], clears=lacks_slot))
        else:
            await checkpoint()

    async def write(self, pages: KVPages) -> None:
        self._renew()
        size_bytes = blocks_for(pages.num_tokens, self.layout.block_tokens) * self.layout.block_bytes
        state_bytes = len(pages.data) - size_bytes
        first = pages.first_block * self.layout.block_tokens
        end = first + pages.num_tokens
        room = (self.num_present_blocks + len(self._blocks)) * self.layout.block_tokens
        if state_bytes not in (0, self.layout.state_bytes) or first > self._num_tokens or end > room:
            raise aborted("copy", f"pages of tokens {first} to {end} do not fit")
        if self._arrival is not None or (state_bytes and self._slot is None):
            raise aborted("copy", "there is no room for states, or the request has arrived")
        if pages.data:
            data = torch.frombuffer(pages.data, dtype=torch.uint8)
            await self._write_all(pages, data[:size_bytes], data[size_bytes:])
            self._renew()
        self._num_tokens = max(self._num_tokens, end)
        self._num_continued = end if state_bytes else self._num_continued

    async def commit(self, tokens: Items[int]) -> None:
        self._renew()
        if tuple(tokens[: self._request.num_tokens]) != self._request.tokens:
            raise aborted("commit", "the request is not the one that was announced")
        # The stream that follows is queued on the same thread, after this job.
        if not self.layout.state_bytes:
            self._context.queue_job(partial(self._publish, list(tokens[: self._num_tokens])))
        elif self._arrival is None and 0 < self._num_continued == self._num_tokens <= len(tokens):
            self._arrival = Arrival(tuple(tokens[: self._num_tokens]), self._root)
            assert self._announced is not None, "it was opened"
            self._announce(replace(self._announced, arrival=self._arrival))
            self._context.queue_job(self._hand_over)

    def close(self) -> None:
        """Release all blocks; published ones stay in the prefix cache until their memory is needed."""
        self._timer.cancel()
        arriving = self._context.arriving
        if arriving.get(self._request.id) is self._announced:  # not that of a later sink of the request
            arriving.pop(self._request.id, None)
        if not self._closed:
            self._closed = True  # before the job, after which a write must not go on
            self._context.queue_job(self._release_blocks)

    def _announce(self, announced: Announced) -> None:
        self._announced = self._context.arriving[self._request.id] = announced

    async def _write_all(self, pages: KVPages, data: Tensor, states: Tensor) -> None:
        """Write blocks, and states if there are any; nothing is copied any more when this returns."""
        with self._copying():
            if len(data) <= max(_SMALL_BYTES, _SMALL_BLOCKS * self.layout.block_bytes):
                await self._context.beside(partial(self._write_now, pages, data), len(data))
            else:
                await self._context.between_steps(partial(self._write, pages, data))
            pool, slot = self._context.states, self._slot
            if len(states) and pool is not None and slot is not None:
                await self._context.beside(partial(pool.restore, slot, states), len(states))

    @contextmanager
    def _copying(self) -> Generator[None]:
        """Keep what is reserved while it is written to."""
        self._writing = True
        self._context.writing.add(self)
        try:
            yield
        finally:
            self._writing = False
            self._context.writing.discard(self)

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

    # ------------------------------------------------------------------ on the engine's thread

    def _find(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        tokens, pool = self._request.tokens, runner.batcher.blocks
        keys, found = self._keys_of(tokens), tuple[int, ...]()
        if not self.layout.state_bytes:  # otherwise all blocks arrive, with the states after them
            found = find_prefix(pool, keys, self._root, tokens, self.layout.block_tokens).blocks
        pool.acquire(found)
        self._present = list(found)
        self.num_present_blocks = self._num_published = len(found)
        yield from ()

    def _reserve_blocks(self, num_tokens: int, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        batcher = runner.batcher
        have = self.num_present_blocks + len(self._blocks)
        more = blocks_for(num_tokens, self.layout.block_tokens) - have
        # Each running request may need a block in the next step, and the arriving one two, one for a copy.
        room = batcher.blocks.num_free - len(batcher.running) - len(batcher.parked) - 2
        if more > room and not batcher.blocks.grow(more - room):
            raise aborted("reserve", f"{more} KV blocks are needed and {max(0, room)} are free")
        if self.layout.state_bytes and self._slot is None and self._arrival is None:
            self._slot = batcher.reserve_slot()
            if self._slot is None:
                raise aborted("reserve", f"{batcher.max_requests} requests have recurrent states, the most")
        if more > 0:
            self._blocks += batcher.blocks.allocate(more)
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
            self._context.cache.restore(part, data[at * size : (at + len(part)) * size])
            yield
        num_full = (
            pages.first_block * self.layout.block_tokens + pages.num_tokens
        ) // self.layout.block_tokens
        if self._closed:
            return
        # Announced tokens need no commit: their blocks are a prefix that any request may reuse.
        yield from self._publish(self._request.tokens, runner, sequences, most=num_full)

    def _allocate(self, blocks: Items[int], *, clears: bool) -> None:
        """Allocate the memory of what was reserved, which takes longer than the copies to it.

        A client waits for the last of these, and the requests of this engine for those between steps.
        """
        self._context.cache.allocate(runs_of(sorted(blocks)))
        pool, slot = self._context.states, self._slot
        if clears and pool is not None and slot is not None and pool.uses_kernels:
            pool.clear(slot)

    def _write_now(self, pages: KVPages, data: Tensor) -> None:
        blocks, data = self._missing(pages, data)
        if blocks:
            self._context.cache.restore(blocks, data)

    def _missing(self, pages: KVPages, data: Tensor) -> tuple[list[int], Tensor]:
        """Return the pages' blocks with their bytes, without those that were found in the prefix cache."""
        size = self.layout.block_bytes
        first = max(pages.first_block, self.num_present_blocks)
        end = pages.first_block + len(data) // max(1, size)
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
        """Publish the blocks of these tokens that are not published yet: the first `most`, or all.

        Without states: blocks alone do not continue a request that has some.
        """
        if self.layout.state_bytes:
            return
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

    def _hand_over(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        """Give what was written to the request, which takes it over when it is admitted."""
        assert self._arrival is not None, "it was committed"
        count = blocks_for(len(self._arrival.tokens), self.layout.block_tokens)
        self._arrival.blocks, self._blocks = self._blocks[:count], self._blocks[count:]
        self._arrival.slot, self._slot = self._slot, None
        yield from ()

    def _release_blocks(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        arrived, slot = ([], self._slot) if self._arrival is None else self._arrival.take()
        runner.batcher.blocks.release([*self._present, *self._blocks, *arrived])
        self._present, self._blocks, self._slot = [], [], None
        if slot is not None:
            runner.batcher.free_slot(slot)
        yield from ()


@asynccontextmanager
async def lent_sink(sink: TorchKVSink) -> AsyncGenerator[TorchKVSink]:
    """Open a sink; at the end its blocks are released."""
    try:
        await sink.open()
        yield sink
    finally:
        sink.close()
