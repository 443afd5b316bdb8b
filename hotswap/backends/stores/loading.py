"""Loading into host memory: a shard once for all of its concurrent readers, and prefetches in their order."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import anyio
from anyio import CancelScope
from anyio.lowlevel import checkpoint

from hotswap.backends.memory import copy
from hotswap.backends.stores.host_tier import BufferReservation, HostTier
from hotswap.backends.stores.reading import give_back
from hotswap.errors import ShardMissing, StoreError
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import SupportsReadInto, WeightStore
from hotswap.worker_threads import run_in_thread, shielded

__all__ = ["Fill", "FillReader", "PrefetchQueue", "SupportsOpenInto", "copy_any", "more_specific"]

_COPY_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _Waiter:
    model: ModelId
    priority: int
    admitted: anyio.Event = field(default_factory=anyio.Event)


class PrefetchQueue:
    """Admits prefetches from one tier: `width` models at a time, and none while a load reads from it.

    The highest priority is admitted first, then the longest wait. Loads never wait. A prefetch of a model
    that is being loaded or prefetched already is admitted at once: it adds no reads.
    """

    def __init__(self, width: int = 1) -> None:
        self._width = width
        self._prefetching: Counter[ModelId] = Counter()
        self._loading: Counter[ModelId] = Counter()
        self._waiting: list[_Waiter] = []

    @property
    def waiting(self) -> tuple[ModelId, ...]:
        """The models that wait, in the order of their admission as it stands."""
        return tuple(waiter.model for waiter in self._in_order())

    @asynccontextmanager
    async def turn(self, model: ModelId, priority: int) -> AsyncGenerator[None]:
        """Wait for a prefetch's turn, and keep it while the block runs; a cancellation passes it on."""
        waiter = _Waiter(model, priority)
        self._waiting.append(waiter)
        self._admit()
        try:
            await waiter.admitted.wait()
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                _subtract(self._prefetching, model)
            self._admit()

    @contextmanager
    def load(self, model: ModelId) -> Generator[None]:
        """Count a load while the block runs; prefetches of the same model are admitted, others wait."""
        self._loading[model] += 1
        self._admit()
        try:
            yield
        finally:
            _subtract(self._loading, model)
            self._admit()

    def _admit(self) -> None:
        for waiter in self._in_order():
            if self._is_admissible(waiter.model):
                self._waiting.remove(waiter)
                self._prefetching[waiter.model] += 1
                waiter.admitted.set()

    def _is_admissible(self, model: ModelId) -> bool:
        if model in self._prefetching or model in self._loading:
            return True
        return not self._loading and len(self._prefetching) < self._width

    def _in_order(self) -> list[_Waiter]:
        return sorted(self._waiting, key=lambda waiter: -waiter.priority)


def _subtract(counter: Counter[ModelId], model: ModelId) -> None:
    counter[model] -= 1
    if not counter[model]:
        del counter[model]


def more_specific(one: StoreError | None, other: StoreError) -> StoreError:
    """Of two tiers' errors return the one to report: `ShardMissing` yields to any other."""
    return other if one is None or isinstance(one, ShardMissing) else one


@runtime_checkable
class SupportsOpenInto(Protocol):
    """A store that can lend a shard chunk by chunk in memory of the caller."""

    def open_into(
        self, shard: Shard, destination: memoryview
    ) -> AbstractAsyncContextManager[AsyncIterator[HostChunk]]:
        """Lend a shard as `WeightStore.open` does; each chunk lies at its place in `destination`."""
        ...


class Fill:
    """Reads one shard from the first of `sources` that has it into the host tier, once for all its readers.

    Readers get the buffer as far as it is filled. The shard is committed when the source has verified it to
    its end; a fill that fails, or that has lost all its readers, leaves the tier as it was. With `at_once`
    sources that can read straight into the buffer do so, and readers get nothing before the end. `reading`
    brackets the time in which a source is read.
    """

    def __init__(
        self,
        shard: Shard,
        manifest: Manifest,
        sources: Sequence[WeightStore],
        host: HostTier,
        *,
        at_once: bool = False,
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.shard = shard
        self.num_readers = 0
        self.wanted = False
        self.closing = False
        self.ended = anyio.Event()
        self.admitted = False
        self.done = False
        self.error: Exception | None = None
        self.failure: StoreError | None = None
        self.attempt = 0
        self.filled_bytes = 0
        self.tier = ""
        self.pinned = False
        self.data = memoryview(b"")
        self._manifest = manifest
        self._sources = sources
        self._host = host
        self._at_once = at_once
        self._source_reading = reading
        self._scope = CancelScope()
        self._left = anyio.Event()
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Fill, then keep the buffer until the last reader has left. Errors are raised in the readers."""
        try:
            with self._scope:
                async with self._host.reserve(self._manifest, self.shard.rank) as reservation:
                    try:
                        await self._fill(reservation)
                        await self._left.wait()
                    except Exception as exc:
                        self.error = exc
                    finally:
                        self._close()
        except Exception as exc:
            self.error = exc
        finally:
            self._close()
            self.ended.set()

    @asynccontextmanager
    async def reading(self) -> AsyncGenerator[None]:
        """Count a reader while the block runs; the last one to leave waits until the fill has ended."""
        self.num_readers += 1
        try:
            yield
        finally:
            self._leave()
            if not self.num_readers:
                with CancelScope(shield=True):
                    await shielded(self.ended.wait)

    def _leave(self) -> None:
        """Remove a reader; the last one ends the fill, finished or not."""
        self.num_readers -= 1
        if not self.num_readers:
            self.closing = True
            self._left.set()
            if not self.done:
                self._scope.cancel()

    async def changed(self) -> None:
        """Wait for more bytes, for the end, or for an error."""
        await self._changed.wait()

    async def finished(self) -> None:
        """Wait until the shard is resident; raises the error of the fill."""
        while not self.done:
            if self.error is not None:
                raise self.error
            await self.changed()

    async def _fill(self, reservation: BufferReservation) -> None:
        self.admitted, self.pinned, self.data = True, reservation.pinned, reservation.place(self.shard)
        self._notify()
        if reservation.has(self.shard) or not await self._load(reservation):
            self.tier, self.filled_bytes = self._host.name, self.shard.size_bytes
        if self.wanted:
            reservation.keep()
        self.done = True
        self._notify()

    async def _load(self, reservation: BufferReservation) -> bool:
        """Read the shard; false if another fill, here or in another process, has committed it before."""
        async with reservation.filling():
            if reservation.has(self.shard):
                return False
            with self._source_reading():
                await self._read()
            reservation.commit(self.shard)
        return True

    async def _read(self) -> None:
        """Read from the first tier that succeeds; each attempt starts from the beginning."""
        for tier in self._sources:
            try:
                await self._read_from(tier)
            except StoreError as exc:
                self.failure = more_specific(self.failure, exc)
                self.attempt, self.filled_bytes = self.attempt + 1, 0
            else:
                return
        raise self.failure or ShardMissing(
            f"No tier holds {self.shard.file!r} of model {self.shard.model!r}."
        )

    async def _read_from(self, tier: WeightStore) -> None:
        chunk: HostChunk | None = None
        if self._at_once and isinstance(tier, SupportsReadInto):
            chunk = await tier.read_into(self.shard, self.data)
        if chunk is not None:
            self.tier, self.filled_bytes = chunk.tier, len(chunk.data)
        elif isinstance(tier, SupportsOpenInto):
            await self._place_from(tier)
        else:
            await self._copy_from(tier)
        if self.filled_bytes != self.shard.size_bytes:
            raise StoreError(
                f"{tier!r} gave {self.filled_bytes} of the {self.shard.size_bytes} bytes of "
                f"{self.shard.file!r}. Check its implementation."
            )

    async def _place_from(self, tier: SupportsOpenInto) -> None:
        async with tier.open_into(self.shard, self.data) as chunks:
            async for chunk in chunks:
                end = chunk.offset_bytes - self.shard.buffer_offset_bytes + len(chunk.data)
                self.tier, self.filled_bytes = chunk.tier, end
                self._notify()

    async def _copy_from(self, tier: WeightStore) -> None:
        async with tier.open(self.shard) as chunks:
            async for chunk in chunks:
                start = chunk.offset_bytes - self.shard.buffer_offset_bytes
                with self.data[start : start + len(chunk.data)] as target:
                    await run_in_thread(copy_any, target, chunk.data)
                self.tier, self.filled_bytes = chunk.tier, start + len(chunk.data)
                self._notify()

    def _close(self) -> None:
        """End the lending: remaining readers get an error, and the view of the buffer is released."""
        self.closing = True
        if self.error is None and self.num_readers:
            self.error = StoreError(f"Reading {self.shard.file!r} ended early: its store was closed.")
        self.data.release()
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


class FillReader:
    """The chunks of a shard from `start`, lent from the buffer that a fill is writing, as they arrive."""

    def __init__(self, fill: Fill, chunk_bytes: int, start: int = 0) -> None:
        self._fill = fill
        self._chunk_bytes = chunk_bytes
        self._attempt = fill.attempt
        self._position = start
        self._lent: memoryview | None = None

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        self.close()
        await checkpoint()
        fill = self._fill
        while not self._more():
            if fill.done:
                raise StopAsyncIteration
            await fill.changed()
        start = self._position
        self._position = min(fill.filled_bytes, start + self._chunk_bytes)
        self._lent = fill.data[start : self._position]
        return HostChunk(fill.shard.buffer_offset_bytes + start, self._lent, fill.tier, fill.pinned)

    def close(self) -> None:
        """End the loan of the last chunk."""
        give_back(self._lent)
        self._lent = None

    def _more(self) -> bool:
        """Whether there are bytes to lend; raises if bytes lent before have turned out to be invalid."""
        fill = self._fill
        if fill.error is not None:
            raise fill.error
        if self._attempt != fill.attempt:
            if self._position:
                raise fill.failure or AssertionError("a new attempt without a failure")
            self._attempt = fill.attempt
        return fill.filled_bytes > self._position


def copy_any(target: memoryview, source: memoryview) -> None:
    """Copy without holding the interpreter lock for long; read-only memory is copied in pieces."""
    if source.readonly:
        for start in range(0, len(source), _COPY_BYTES):
            target[start : start + _COPY_BYTES] = source[start : start + _COPY_BYTES]
    else:
        copy(target, source)
