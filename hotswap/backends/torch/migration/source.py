"""The KV source of a migration: blocks are read while their request decodes, the rest once it is parked.

Recurrent states are read last, after the last blocks of a parked request: no step changes them then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from functools import partial

import torch
from anyio.lowlevel import checkpoint
from torch import Tensor

from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.migration.context import PIECE_BYTES, MigrationContext, aborted
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sequence import Sequence
from hotswap.backends.torch.worker import Pieces
from hotswap.migration import KVLayout, KVPages, KVSource, Stopped

__all__ = ["TorchKVSource", "lent_source"]

# Blocks that are usually left when a request with states has stopped: two by default, and one that was begun.
_SPARE_BLOCKS = 3


class TorchKVSource(KVSource):
    """Reads the KV blocks of one request of an engine.

    Args:
        context: The engine's migration context.
        ticket: The request's ticket in the engine.
        layout: The layout of the blocks.
        end_stream: Ends the request's stream and removes it from the engine; false if it had ended before.
    """

    def __init__(
        self, context: MigrationContext, ticket: int, layout: KVLayout, end_stream: Callable[[], bool]
    ) -> None:
        self.layout = layout
        self._context, self._ticket, self._end_stream = context, ticket, end_stream
        self._tokens: tuple[int, ...] = ()
        self._num_tokens = 0
        self._num_read = 0  # of the request's blocks, so far
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._rest: KVPages | None = None  # what was left when it stopped
        self._parked: Sequence | None = None
        self._was_asked_to_stop = False

    async def open(self) -> None:
        """Look for the request, and allocate memory for its states, for which no client waits yet."""
        await self.num_tokens()
        if size_bytes := self.layout.state_bytes:
            self._buffer = self._context.host_memory(size_bytes + _SPARE_BLOCKS * self.layout.block_bytes)
            fill = partial(self._buffer.numpy().fill, 0)  # the first write allocates it
            await self._context.beside(fill, size_bytes)

    async def num_tokens(self) -> int:
        await self._context.between_steps(self._count)
        return self._num_tokens

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        rest, self._rest = self._rest, None  # its buffer is reused by the next read
        if rest is not None and (rest.first_block, rest.num_tokens) == (first_block, num_tokens):
            await checkpoint()
            self._require_parked()
            return rest
        if self._parked is None:
            out = self._room_for(num_tokens)
            await self._context.between_steps(partial(self._copy, first_block, num_tokens, out))
        else:
            end = first_block * self.layout.block_tokens + num_tokens
            out = self._room_for(num_tokens, with_states=end == self._num_tokens)
            await self._copy_parked(self._parked, first_block, num_tokens, out)
        self._num_read = first_block + num_tokens // self.layout.block_tokens
        return KVPages(first_block, num_tokens, out.numpy().data)

    async def stop(self) -> Stopped:
        self._was_asked_to_stop = True  # the thread parks it even if this call is cancelled
        await self._context.between_steps(self._park)
        return Stopped(self._tokens, self._num_tokens)

    async def release(self) -> None:
        self._context.refuse_if_gone()
        if not self._end_stream():
            raise aborted("release", "the request has ended or was evicted")
        self._was_asked_to_stop = False

    def resume(self) -> None:
        """Unpark the request if this source has parked it and not released it; nothing can be read then."""
        if self._was_asked_to_stop:
            self._context.queue_job(self._unpark)

    def _room_for(self, num_tokens: int, *, with_states: bool = False) -> Tensor:
        size_bytes = blocks_for(num_tokens, self.layout.block_tokens) * self.layout.block_bytes
        size_bytes += self.layout.state_bytes if with_states else 0
        if len(self._buffer) < size_bytes:
            self._buffer = self._context.host_memory(size_bytes)
        return self._buffer[:size_bytes]

    async def _copy_parked(self, sequence: Sequence, first_block: int, num_tokens: int, out: Tensor) -> None:
        """Copy during a step: a client waits for it, and no step writes to a parked request's blocks."""
        num_blocks = blocks_for(num_tokens, self.layout.block_tokens)
        blocks = sequence.blocks[first_block : first_block + num_blocks]
        if self._num_tokens < first_block * self.layout.block_tokens + num_tokens:
            raise aborted("copy", "the request has fewer tokens than that")
        if len(blocks) < num_blocks:
            raise aborted("copy", "the request has ended or was evicted")
        await self._context.beside(partial(self._save, blocks, out, sequence.slot), len(out))
        self._require_parked()  # its blocks are reused only after it has left `parked`

    def _require_parked(self) -> None:
        self._context.refuse_if_gone()
        if self._parked is not None and self._parked not in self._context.runner.batcher.parked:
            raise aborted("copy", "the request has ended or was evicted")

    def _save(self, blocks: Items[int], out: Tensor, slot: int) -> None:
        """Copy blocks, then the states in a slot if there is room for them."""
        size_bytes = len(blocks) * self.layout.block_bytes
        self._context.cache.save(blocks, out[:size_bytes])
        if len(out) > size_bytes and (states := self._context.states) is not None:
            states.save(slot, out[size_bytes:])

    # ------------------------------------------------------------------ on the engine's thread

    def _count(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        num_computed = self._sequence(runner, sequences).num_computed
        is_moving = self.layout.state_bytes and self._parked is None
        self._num_tokens = max(0, num_computed - 1) if is_moving else num_computed
        yield from ()

    def _copy(
        self,
        first_block: int,
        num_tokens: int,
        out: Tensor,
        runner: Runner,
        sequences: Mapping[int, Sequence],
    ) -> Pieces:
        block_bytes, block_tokens = self.layout.block_bytes, self.layout.block_tokens
        end = first_block + blocks_for(num_tokens, block_tokens)
        most = max(1, PIECE_BYTES // max(1, block_bytes))
        for first in range(first_block, end, most):
            sequence = self._sequence(runner, sequences)
            if sequence.num_computed < first_block * block_tokens + num_tokens:
                raise aborted("copy", "the request was preempted")
            blocks = sequence.blocks[first : min(first + most, end)]
            at = (first - first_block) * block_bytes
            self._save(blocks, out[at : at + len(blocks) * block_bytes], sequence.slot)
            yield

    def _park(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        runner.batcher.park(sequence := self._sequence(runner, sequences))
        while runner.is_in_flight(sequence):  # a token is still to come
            yield
        if sequence not in runner.batcher.parked:
            raise aborted("copy", "the request has ended or was evicted")
        self._tokens, self._num_tokens = tuple(sequence.tokens), sequence.num_computed
        self._parked = sequence
        self._read_rest(sequence)
        yield from ()

    def _read_rest(self, sequence: Sequence) -> None:
        """Copy the remaining blocks if they are few, so that no other job is needed after the next step."""
        first, num_tokens = self._num_read, self._num_tokens - self._num_read * self.layout.block_tokens
        num_blocks = blocks_for(num_tokens, self.layout.block_tokens)
        if 0 < num_blocks * self.layout.block_bytes + self.layout.state_bytes <= PIECE_BYTES:
            out = self._room_for(num_tokens, with_states=True)
            self._save(sequence.blocks[first : first + num_blocks], out, sequence.slot)
            self._rest = KVPages(first, num_tokens, out.numpy().data)

    def _unpark(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        parked, self._parked = self._parked, None
        if parked is not None:  # else another source may have, which reads it
            runner.batcher.unpark(parked)
        yield from ()

    def _sequence(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Sequence:
        sequence = sequences.get(self._ticket)
        if sequence is None:
            raise aborted("copy", "the request has ended or was evicted")
        if sequence not in (runner.batcher.running if self._parked is None else runner.batcher.parked):
            raise aborted("copy", "the request was preempted and waits for KV blocks")
        return sequence


@asynccontextmanager
async def lent_source(source: TorchKVSource) -> AsyncGenerator[TorchKVSource]:
    """Open a source; at the end a request that was stopped and not released continues."""
    try:
        await source.open()
        yield source
    finally:
        source.resume()
