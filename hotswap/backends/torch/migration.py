"""Both ends of a move of KV blocks: copies between the steps of an engine's thread.

What arrives is published like the prefix of an ended request, so the stream that follows finds it by its
tokens (`prefix`), under the root of the very weights that serve here. Blocks that a sink holds are nobody's
to take until it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import anyio
import torch
from torch import Tensor

from hotswap.backends.stores.unbroken import in_thread
from hotswap.backends.torch.adapters.plan import RankRange
from hotswap.backends.torch.batcher import Sequence
from hotswap.backends.torch.kv import KVCache, blocks_for
from hotswap.backends.torch.life import Life
from hotswap.backends.torch.prefix import block_content, extend_keys, find_prefix, root_key
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.worker import Pieces, Worker
from hotswap.errors import MigrationAborted
from hotswap.migration import KVLayout, KVPages, KVSink, KVSource, Stopped
from hotswap.request import Request

__all__ = ["Desk", "TorchKVSink", "TorchKVSource", "aborted", "lent_sink", "lent_source"]

# Bytes that are copied in one go, between two steps; a block is the least.
_PIECE_BYTES = 1 << 20
# Pages of so few bytes are written at once, beside the step that runs.
_SMALL_BYTES = 4 << 20
# A sink that hears nothing for so long frees its blocks (Llumnix's engine: 10 s).
LAPSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Desk:
    """What both ends use of an engine, as long as one model serves.

    Attributes:
        life: Ends every wait when the engine is lost.
        worker: Does the work.
        runner: What it steps for now; with another, the blocks are others too.
        post: Has the event loop make a call, from any thread.
        cache: Where the blocks lie.
        weights: Stands for the weights that compute.
        epoch: Which load they came with.
        current: The engine's desk now; with another, or none, the model has gone.
    """

    life: Life
    worker: Worker
    runner: Runner
    post: Callable[..., None]
    cache: KVCache
    weights: str
    epoch: int
    current: Callable[[], Desk | None]

    def layout_for(self, request: Request) -> KVLayout:
        """Return what the KV blocks of a request mean here."""
        layers = tuple(
            (shape.kv_heads, shape.key_dim, shape.value_dim, str(shape.dtype).removeprefix("torch."))
            for _, shape in sorted(self.cache.layers.items())
        )
        return KVLayout(
            model=request.model,
            weights=self.weights,
            adapter=request.adapter,
            block_tokens=self.cache.block_tokens,
            layers=layers,
            block_bytes=self.cache.block_bytes,
        )

    def refuse_if_gone(self) -> None:
        """Raise `InstanceLost` if the engine is lost, `MigrationAborted` if the model has gone."""
        self.life.refuse_if_lost()
        if self.current() is not self:
            raise _gone()

    async def between_steps(self, begin: Callable[[Runner, Mapping[int, Sequence]], Pieces]) -> None:
        """Do something on the thread, between two steps.

        Raises:
            MigrationAborted: the model has gone.
            InstanceLost: the engine is lost.
        """
        self.refuse_if_gone()
        job = _Job(begin, self.runner, self.post)
        self.worker.work(job)
        try:
            await self.life.unless_lost(job.ended.wait())
            if job.error is not None:
                raise job.error
        finally:
            job.cancelled = True
            job.error = None  # or it and the job keep each other, and with them the blocks

    def ask(self, begin: Callable[[Runner, Mapping[int, Sequence]], Pieces]) -> None:
        """Have something done on the thread before whatever is asked later; nobody waits for it."""
        self.worker.work(_Job(begin, self.runner, self.post))


@dataclass(slots=True, eq=False)
class _Job:
    """Something that the event loop waits for."""

    work: Callable[[Runner, Mapping[int, Sequence]], Pieces]
    runner: Runner
    post: Callable[..., None]
    ended: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None
    cancelled: bool = False

    def begin(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        if runner is not self.runner:
            raise _gone()
        for _ in self.work(runner, sequences):
            if self.cancelled:
                return
            yield

    def end(self, error: Exception | None) -> None:
        if not self.cancelled:
            self.error = error
        self.post(self.ended.set)

    def drop(self) -> None:
        self.end(_gone())


class TorchKVSource(KVSource):
    """The blocks of one request of an engine.

    Args:
        desk: The engine's.
        ticket: The request's in the engine.
        layout: What the blocks mean.
        give_up: Ends the request's stream, and has the engine forget it; false if it had ended before.
    """

    def __init__(self, desk: Desk, ticket: int, layout: KVLayout, give_up: Callable[[], bool]) -> None:
        self.layout = layout
        self._desk, self._ticket, self._give_up = desk, ticket, give_up
        self._tokens: tuple[int, ...] = ()
        self._num_tokens = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._stopped = self._was_asked_to_stop = False

    async def num_tokens(self) -> int:
        await self._desk.between_steps(self._count)
        return self._num_tokens

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        num_blocks = blocks_for(num_tokens, self.layout.block_tokens)
        size_bytes = num_blocks * self.layout.block_bytes
        if len(self._buffer) < size_bytes:
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8)
        out = self._buffer[:size_bytes]
        await self._desk.between_steps(partial(self._copy, first_block, num_tokens, out))
        return KVPages(first_block, num_tokens, out.numpy().data)

    async def stop(self) -> Stopped:
        self._was_asked_to_stop = True  # the thread will do it, also if nobody waits for that any more
        await self._desk.between_steps(self._park)
        return Stopped(self._tokens, self._num_tokens)

    async def release(self) -> None:
        self._desk.refuse_if_gone()
        if not self._give_up():
            raise aborted("release", "the request has ended or was taken away")
        self._was_asked_to_stop = False

    def resume(self) -> None:
        """Let the request go on where it stopped, if it did."""
        if self._was_asked_to_stop and not self._desk.life.is_lost:
            self._desk.ask(self._unpark)

    # ------------------------------------------------------------------ on the engine's thread

    def _count(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        self._num_tokens = self._sequence(runner, sequences).num_computed
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
        most = max(1, _PIECE_BYTES // block_bytes)
        for at in range(blocks_for(num_tokens, block_tokens)):
            sequence = self._sequence(runner, sequences)
            if sequence.num_computed < first_block * block_tokens + num_tokens:
                raise aborted("copy", "the request gave its KV blocks back for older ones")
            self._desk.cache.save(
                sequence.blocks[first_block + at], out[at * block_bytes : (at + 1) * block_bytes]
            )
            if (at + 1) % most == 0:
                yield

    def _park(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        sequence = self._sequence(runner, sequences)
        runner.batcher.park(sequence)
        self._tokens, self._num_tokens = tuple(sequence.tokens), sequence.num_computed
        self._stopped = True
        yield from ()

    def _unpark(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        if (sequence := sequences.get(self._ticket)) is not None:
            runner.batcher.unpark(sequence)
        yield from ()

    def _sequence(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Sequence:
        sequence = sequences.get(self._ticket)
        if sequence is None:
            raise aborted("copy", "the request has ended or was taken away")
        if sequence not in (runner.batcher.parked if self._stopped else runner.batcher.running):
            raise aborted("copy", "the request waits for KV blocks, which others took")
        return sequence


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
        ranks: RankRange | None,
        lapse_s: float = LAPSE_S,
    ) -> None:
        self.layout = layout
        self._desk, self._request, self._lapse_s = desk, request, lapse_s
        self._root = root_key(desk.epoch, 0 if ranks is None else ranks.serial)
        self._present: list[int] = []  # found here already, held
        self._blocks: list[int] = []  # taken for what is to come
        self._num_tokens = 0  # there, from the first on
        self._closed = self._writing = False
        self._timer = asyncio.get_running_loop().call_later(lapse_s, self._lapse)

    async def open(self) -> None:
        """Find what the engine has already of the request's tokens."""
        await self._desk.between_steps(self._find)
        self._num_tokens = self.num_present_blocks * self.layout.block_tokens

    async def reserve(self, num_tokens: int) -> None:
        self._hear()
        await self._desk.between_steps(partial(self._take, num_tokens))

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
            if size_bytes <= _SMALL_BYTES:
                await in_thread(partial(self._write_now, pages, data))  # blocks go back when it has ended
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
        tokens, block_tokens = self._request.tokens, self.layout.block_tokens
        keys: list[bytes] = []
        extend_keys(keys, self._root, tokens, block_tokens, num_blocks=len(tokens) // block_tokens)
        pool = runner.batcher.blocks
        found = find_prefix(pool, keys, self._root, tokens, block_tokens).blocks
        pool.hold(found)
        self._present = list(found)
        self.num_present_blocks = len(found)
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
            taken = batcher.blocks.take(more)
            self._desk.cache.runs.forget(taken)
            self._blocks += taken
        yield from ()

    def _write(
        self, pages: KVPages, data: Tensor, runner: Runner, sequences: Mapping[int, Sequence]
    ) -> Pieces:
        most = max(1, _PIECE_BYTES // self.layout.block_bytes)
        for count, (block, part) in enumerate(self._parts(pages, data), start=1):
            if self._closed:
                return
            self._desk.cache.restore(block, part)
            if count % most == 0:
                yield

    def _write_now(self, pages: KVPages, data: Tensor) -> None:
        for block, part in self._parts(pages, data):
            self._desk.cache.restore(block, part)

    def _parts(self, pages: KVPages, data: Tensor) -> list[tuple[int, Tensor]]:
        """The pages' blocks with their bytes, those left out that were here before."""
        blocks = [*self._present, *self._blocks]
        size = self.layout.block_bytes
        return [
            (blocks[pages.first_block + at], data[at * size : (at + 1) * size])
            for at in range(len(data) // size)
            if pages.first_block + at >= self.num_present_blocks
        ]

    def _publish(self, tokens: Items[int], runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        block_tokens, pool = self.layout.block_tokens, runner.batcher.blocks
        keys: list[bytes] = []
        extend_keys(keys, self._root, tokens, block_tokens, num_blocks=len(tokens) // block_tokens)
        for at in range(self.num_present_blocks, blocks_for(len(tokens), block_tokens)):
            content = block_content(
                keys[at - 1] if at else self._root, tokens[at * block_tokens : (at + 1) * block_tokens]
            )
            pool.publish(self._blocks[at - self.num_present_blocks], content)
        yield from ()

    def _give(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        runner.batcher.blocks.give([*self._present, *self._blocks])
        self._present, self._blocks = [], []
        yield from ()


@asynccontextmanager
async def lent_source(source: TorchKVSource) -> AsyncGenerator[TorchKVSource]:
    """Lend a source; a request that was stopped and not released goes on afterwards."""
    try:
        await source.num_tokens()
        yield source
    finally:
        source.resume()


@asynccontextmanager
async def lent_sink(sink: TorchKVSink) -> AsyncGenerator[TorchKVSink]:
    """Lend a sink; its blocks are let go afterwards."""
    try:
        await sink.open()
        yield sink
    finally:
        sink.close()


def aborted(stage: str, because: str) -> MigrationAborted:
    """Return the error that says in which stage a move ended, and why."""
    return MigrationAborted(
        f"The move ended in {stage}: {because}. The request goes on without it.", stage=stage
    )


def _gone() -> MigrationAborted:
    return aborted("copy", "the model whose KV blocks these are was unloaded")
