"""Write-through caching: a model read from a slow tier is written to the disk tier as its chunks pass.

A shard of the disk that was found damaged is refused from then on, so that the slow tier is read, and the
copy replaced.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Self

import anyio
from anyio import CancelScope, move_on_after
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.stores.disk_directory import Admission, ShardFile
from hotswap.backends.stores.layout import model_directory
from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.reading import background
from hotswap.errors import ShardCorrupt, StoreError
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import SupportsSideFiles, WeightStore, WrapperStore
from hotswap.worker_threads import run_in_thread

__all__ = ["QuarantineStore", "WriteThroughStore", "with_write_through"]

_log = logging.getLogger("hotswap.stores")


class QuarantineStore(WrapperStore):
    """Refuses a damaged shard before its first byte, until its file changes.

    Damage is detected at the end of a shard, when bytes were lent already and no other tier can take over.
    The next load is refused at the start, so that the next tier serves it. Entering this store does not enter
    the disk tier.
    """

    def __init__(self, disk: NvmeStore) -> None:
        super().__init__(disk)
        self._disk = disk
        self._damaged: dict[Shard, tuple[tuple[int, ...], str]] = {}

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        yield self

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self._checked(shard), self._disk.open(shard) as chunks:
            yield chunks

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk:
        async with self._checked(shard):
            return await self._disk.read_into(shard, destination)

    @asynccontextmanager
    async def _checked(self, shard: Shard) -> AsyncGenerator[None]:
        """Raise if the shard is known to be damaged; remember it if the block finds that it is."""
        path = model_directory(self._disk.root, shard.model) / shard.file
        if (known := self._damaged.get(shard)) is not None:
            if known[0] == await run_in_thread(_identity, path):
                raise ShardCorrupt(known[1])
            self._damaged.pop(shard, None)
        try:
            yield
        except ShardCorrupt as exc:
            if shard.file in str(exc):  # and not an error of the reader about another file
                self._damaged[shard] = await run_in_thread(_identity, path), str(exc)
            raise


def _identity(path: Path) -> tuple[int, ...]:
    """Values that change when a file is replaced or written; empty if it does not exist."""
    with suppress(OSError):
        stat = path.stat()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
    return ()


def with_write_through(tiers: Sequence[WeightStore]) -> tuple[WeightStore, ...]:
    """Wrap tiers so that reads below a `NvmeStore` are copied to it, and damaged copies are replaced."""
    disk = next((tier for tier in tiers if isinstance(tier, NvmeStore)), None)
    if disk is None or disk is tiers[-1]:
        return tuple(tiers)
    at = tiers.index(disk)
    below = (WriteThroughStore(tier, disk) for tier in tiers[at + 1 :])
    return (*tiers[:at], QuarantineStore(disk), *below)


class WriteThroughStore(WrapperStore):
    """Reads from `store` and writes the chunks to `disk`; entering it does not enter either.

    Each model is copied once at a time, however many reads it has, and not while another process copies it.
    Shards that the reads leave out, those of other ranks for instance, are read after them: once the model
    has had no reads for `idle_s`. A copy that fails is abandoned and logged, and the next is tried no sooner
    than `retry_after_s` later; reads go on. A read that is cancelled or fails abandons the copy, unless the
    model has other reads.
    """

    def __init__(
        self, store: WeightStore, disk: NvmeStore, *, idle_s: float = 1.0, retry_after_s: float = 60.0
    ) -> None:
        super().__init__(store)
        self._disk = disk
        self._idle_s = idle_s
        self._retry_after_s = retry_after_s
        self._copies: dict[ModelId, _Copy] = {}
        self._retry_at_s: dict[ModelId, float] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Make copies while the block runs; at its end a copy that has all its bytes is still committed."""
        async with background() as self._tasks:
            try:
                yield self
            finally:
                self._tasks = None

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        copy = await self._copy_of(shard)
        async with AsyncExitStack() as stack:
            reader = stack.enter_context(copy.reader()) if copy is not None else _Reader()
            chunks = await stack.enter_async_context(self.wrapped.open(shard))
            file = await copy.begin(shard, stack) if copy is not None else None
            if copy is not None and file is not None:
                tasks = await stack.enter_async_context(background())
                chunks = _Tee(chunks, file, copy, reader, tasks)
            else:
                reader.done = True
            yield chunks

    async def fetch(self, model: ModelId) -> None:
        """Return once the whole model is on the disk. A cancellation leaves the disk as it was.

        Raises:
            TierFull: there is no room.
            StoreError: it could not be read or written, or another process is writing it.
        """
        manifest = await self.wrapped.manifest(model)
        while (copy := self._copies.get(model)) is not None and copy.closing:
            await copy.ended.wait()
        copy = copy or self._start_copy(manifest)
        with copy.reader() as reader:
            reader.eager = True
            copy.notify()
            await copy.ended.wait()
        if copy.error is not None:
            raise copy.error

    async def settled(self) -> None:
        """Return once no copy is being made."""
        while self._copies:
            await next(iter(self._copies.values())).ended.wait()
            await checkpoint()  # until its task has ended, too

    async def _copy_of(self, shard: Shard) -> _Copy | None:
        """The copy that the shard belongs to, started if need be; `None` if none can be made now."""
        if shard.model not in self._copies:
            if self._tasks is None or self._retry_at_s.get(shard.model, 0.0) > anyio.current_time():
                return None
            try:
                manifest = await self.wrapped.manifest(shard.model)
            except StoreError:  # reading the shard raises it again
                return None
            if shard.model not in self._copies and shard in manifest.shards:
                return self._start_copy(manifest)
        copy = self._copies.get(shard.model)
        return None if copy is None or copy.closing else copy

    def _start_copy(self, manifest: Manifest) -> _Copy:
        if self._tasks is None:
            raise StoreError(f"{self!r} is not open; use it inside `async with`.")
        copy = self._copies[manifest.model] = _Copy(manifest, self.wrapped, self._disk, self._idle_s)
        self._tasks.start_soon(self._run, copy)
        return copy

    async def _run(self, copy: _Copy) -> None:
        model = copy.manifest.model
        try:
            await copy.run()
        finally:
            del self._copies[model]
        if copy.error is not None and not copy.abandoned:
            self._retry_at_s[model] = anyio.current_time() + self._retry_after_s
            _log.warning("No copy of model %r is kept on %r: %s", model, self._disk.name, copy.error)


@dataclass(slots=True, eq=False)
class _Reader:
    """One read of a model that is being copied; an `eager` one waits for the whole copy."""

    done: bool = False
    eager: bool = False


class _Copy:
    """Copies one model to the disk."""

    def __init__(self, manifest: Manifest, source: WeightStore, disk: NvmeStore, idle_s: float) -> None:
        self.manifest = manifest
        self.error: StoreError | None = None
        self.abandoned = False
        self.closing = False
        self.ended = anyio.Event()
        self._source = source
        self._disk = disk
        self._idle_s = idle_s
        self._admission: Admission | None = None
        self._claimed: set[Shard] = set()
        self._readers: set[_Reader] = set()
        self._scope = CancelScope()
        self._begun = anyio.Event()
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Reserve room, write the chunks that pass, read the rest, and commit; `error` says why it failed."""
        committed = False
        try:
            with self._scope:
                async with self._disk.admit(self.manifest) as admission:
                    self._admission = admission
                    self._begun.set()
                    try:
                        await self._complete(admission)
                    finally:
                        committed = admission.committed
        except StoreError as exc:
            self.error = exc
        finally:
            if not committed and self.error is None:
                self.error = StoreError(f"The copy of model {self.manifest.model!r} was abandoned.")
            self.closing, self._admission = True, None
            self._begun.set()
            self.ended.set()

    @contextmanager
    def reader(self) -> Generator[_Reader]:
        """Keep the copy going for a read; the last read to leave without having finished abandons it."""
        reader = _Reader()
        self._readers.add(reader)
        failed = True
        try:
            yield reader
            failed = not (reader.done or reader.eager)
        finally:
            self._readers.remove(reader)
            if failed and not self._readers:
                self.abandoned = self.closing = True
                self._scope.cancel()
            self.notify()

    async def begin(self, shard: Shard, stack: AsyncExitStack) -> ShardFile | None:
        """Return the file to write the shard to until `stack` ends; `None` if it is or was written."""
        await self._begun.wait()
        admission = self._admission
        if admission is None or self.closing or shard in self._claimed or shard not in admission.missing:
            return None
        self._claimed.add(shard)
        stack.callback(self._claimed.discard, shard)
        try:
            return await stack.enter_async_context(admission.shard(shard))
        except StoreError as exc:
            self.fail(exc)
            return None

    def fail(self, error: StoreError) -> None:
        """End the copy with an error of its own."""
        self.error = self.error or error
        self.closing = True
        self._scope.cancel()

    def notify(self) -> None:
        """Wake `run`: a reader came, left, or became eager."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _complete(self, admission: Admission) -> None:
        side_files: dict[str, bytes] = {}
        if isinstance(self._source, SupportsSideFiles):
            side_files = await self._source.side_files(self.manifest.model)
        try:
            while admission.missing:
                await self._wait_or_read(admission)
        finally:
            if not admission.missing and self.error is None:  # also when the store is being closed
                with CancelScope(shield=True):
                    await admission.commit(side_files)

    async def _wait_or_read(self, admission: Admission) -> None:
        """Wait while the model is read; afterwards read a shard that is missing."""
        if not any(reader.eager for reader in self._readers):
            with move_on_after(inf if self._readers else self._idle_s):
                await self._changed.wait()
                return
        missing = next((shard for shard in admission.missing if shard not in self._claimed), None)
        if missing is None:
            await self._changed.wait()
        else:
            await self._read(missing)

    async def _read(self, shard: Shard) -> None:
        async with AsyncExitStack() as stack:
            chunks = await stack.enter_async_context(self._source.open(shard))
            if (file := await self.begin(shard, stack)) is not None:
                async for chunk in chunks:
                    await file.write(chunk.data)
                file.finish()


class _Tee:
    """The chunks of a shard, each written to a file while it is lent; the next is fetched after both."""

    def __init__(
        self,
        chunks: AsyncIterator[HostChunk],
        file: ShardFile,
        copy: _Copy,
        reader: _Reader,
        tasks: TaskGroup,
    ) -> None:
        self._chunks = chunks
        self._file: ShardFile | None = file
        self._copy = copy
        self._reader = reader
        self._tasks = tasks
        self._written = anyio.Event()
        self._written.set()

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        await self._written.wait()
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            self._finish()
            raise
        if self._file is not None:
            self._written = anyio.Event()
            self._tasks.start_soon(self._write, self._file, chunk.data)
        return chunk

    async def _write(self, file: ShardFile, data: memoryview) -> None:
        try:
            await file.write(data)
        except StoreError as exc:
            self._file = None
            self._copy.fail(exc)
        finally:
            self._written.set()

    def _finish(self) -> None:
        self._reader.done = True
        if self._file is not None:
            try:
                self._file.finish()
            except StoreError as exc:
                self._copy.fail(exc)
            self._file = None
