"""Models read from a slow tier are written to a disk tier on the way: the next load finds them there."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Protocol, Self, runtime_checkable

import anyio
from anyio import CancelScope, move_on_after
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap.backends.stores.admission import Admission, ShardFile
from hotswap.backends.stores.doubt import Doubting
from hotswap.backends.stores.nvme import NvmeStore
from hotswap.backends.stores.reading import background
from hotswap.errors import StoreError
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore, WrapperStore

__all__ = ["Descending", "SupportsSideFiles", "descending"]

_log = logging.getLogger("hotswap.stores")


@runtime_checkable
class SupportsSideFiles(Protocol):
    """A store that gives the small files beside a model's weights, so that a copy has them too."""

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return them by name, the tokenizer among them; those that are not there are left out."""
        ...


def descending(tiers: Sequence[WeightStore]) -> tuple[WeightStore, ...]:
    """Return the tiers so that those below a `NvmeStore` leave copies there and replace what is damaged."""
    disk = next((tier for tier in tiers if isinstance(tier, NvmeStore)), None)
    if disk is None or disk is tiers[-1]:
        return tuple(tiers)
    at = tiers.index(disk)
    return (*tiers[:at], Doubting(disk), *(Descending(tier, disk) for tier in tiers[at + 1 :]))


class Descending(WrapperStore):
    """Reads from `store`, and writes what passes to `disk`; entering it does not enter the two.

    One copy of a model is made at a time, however many read it, and none while another process makes it.
    What a load leaves out, other ranks for instance, is read after it, once nobody has read from the model
    for `patience_s`. A copy that fails is given up, the log says why, and the next is tried after `rest_s` at
    the earliest; whoever loads does not notice. A load that is cancelled or fails takes its copy with it,
    unless others are loading the model too.
    """

    def __init__(
        self, store: WeightStore, disk: NvmeStore, *, patience_s: float = 1.0, rest_s: float = 60.0
    ) -> None:
        super().__init__(store)
        self._disk = disk
        self._patience_s = patience_s
        self._rest_s = rest_s
        self._copies: dict[ModelId, _Copy] = {}
        self._resting: dict[ModelId, float] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Make copies while the block runs; one that has all its bytes is still finished at its end."""
        async with background() as self._tasks:
            try:
                yield self
            finally:
                self._tasks = None

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        copy = await self._copy_of(shard)
        async with AsyncExitStack() as stack:
            use = stack.enter_context(copy.used()) if copy is not None else _Use()
            chunks = await stack.enter_async_context(self.wrapped.open(shard))
            file = await copy.begin(shard, stack) if copy is not None else None
            if copy is not None and file is not None:
                tasks = await stack.enter_async_context(background())
                chunks = _Tee(chunks, file, copy, use, tasks)
            else:
                use.done = True
            yield chunks

    async def fetch(self, model: ModelId) -> None:
        """Return once the whole model is on the disk. Cancelling leaves the disk as it was.

        Raises:
            TierFull: there is no room.
            StoreError: it could not be read or written, or another process is writing it.
        """
        manifest = await self.wrapped.manifest(model)
        while (copy := self._copies.get(model)) is not None and copy.closing:
            await copy.ended.wait()
        copy = copy or self._begin(manifest)
        with copy.used() as use:
            use.eager = True
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
        """The copy that the shard belongs to, begun if need be; `None` if there is none to be had now."""
        if shard.model not in self._copies:
            if self._tasks is None or self._resting.get(shard.model, 0.0) > anyio.current_time():
                return None
            try:
                manifest = await self.wrapped.manifest(shard.model)
            except StoreError:  # reading the shard will say what is wrong
                return None
            if shard.model not in self._copies and shard in manifest.shards:
                return self._begin(manifest)
        copy = self._copies.get(shard.model)
        return None if copy is None or copy.closing else copy

    def _begin(self, manifest: Manifest) -> _Copy:
        if self._tasks is None:
            raise StoreError(f"{self!r} is not open; use it inside `async with`.")
        copy = self._copies[manifest.model] = _Copy(manifest, self.wrapped, self._disk, self._patience_s)
        self._tasks.start_soon(self._run, copy)
        return copy

    async def _run(self, copy: _Copy) -> None:
        model = copy.manifest.model
        try:
            await copy.run()
        finally:
            del self._copies[model]
        if copy.error is not None and not copy.given_up:
            self._resting[model] = anyio.current_time() + self._rest_s
            _log.warning("No copy of model %r is kept on %r: %s", model, self._disk.name, copy.error)


@dataclass(slots=True, eq=False)
class _Use:
    """One who reads from a model while it is copied, or who waits for all of it (`eager`)."""

    done: bool = False
    eager: bool = False


class _Copy:
    """One model on its way to the disk."""

    def __init__(self, manifest: Manifest, source: WeightStore, disk: NvmeStore, patience_s: float) -> None:
        self.manifest = manifest
        self.error: StoreError | None = None
        self.given_up = False
        self.closing = False
        self.ended = anyio.Event()
        self._source = source
        self._disk = disk
        self._patience_s = patience_s
        self._admission: Admission | None = None
        self._taken: set[Shard] = set()
        self._uses: set[_Use] = set()
        self._scope = CancelScope()
        self._begun = anyio.Event()
        self._changed = anyio.Event()

    async def run(self) -> None:
        """Make room, take what passes, read the rest, and finish; `error` says why it failed."""
        committed = False
        try:
            with self._scope:
                async with self._disk.admit(self.manifest) as admission:
                    self._admission = admission
                    self._begun.set()
                    try:
                        await self._make(admission)
                    finally:
                        committed = admission.committed
        except StoreError as exc:
            self.error = exc
        finally:
            if not committed and self.error is None:
                self.error = StoreError(f"The copy of model {self.manifest.model!r} was given up.")
            self.closing, self._admission = True, None
            self._begun.set()
            self.ended.set()

    @contextmanager
    def used(self) -> Generator[_Use]:
        """Keep the copy going; if the last who does leaves without having come to an end, it is given up."""
        use = _Use()
        self._uses.add(use)
        failed = True
        try:
            yield use
            failed = not (use.done or use.eager)
        finally:
            self._uses.remove(use)
            if failed and not self._uses:
                self.given_up = self.closing = True
                self._scope.cancel()
            self.notify()

    async def begin(self, shard: Shard, stack: AsyncExitStack) -> ShardFile | None:
        """Return where to write the shard until `stack` ends; `None` if that is done, by whomever."""
        await self._begun.wait()
        admission = self._admission
        if admission is None or self.closing or shard in self._taken or shard not in admission.missing:
            return None
        self._taken.add(shard)
        stack.callback(self._taken.discard, shard)
        try:
            return await stack.enter_async_context(admission.shard(shard))
        except StoreError as exc:
            self.fail(exc)
            return None

    def fail(self, error: StoreError) -> None:
        """End the copy for a reason of its own."""
        self.error = self.error or error
        self.closing = True
        self._scope.cancel()

    def notify(self) -> None:
        """Say that somebody came, left, or wants it all."""
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _make(self, admission: Admission) -> None:
        side_files: dict[str, bytes] = {}
        if isinstance(self._source, SupportsSideFiles):
            side_files = await self._source.side_files(self.manifest.model)
        try:
            while admission.missing:
                await self._go_on(admission)
        finally:
            if not admission.missing and self.error is None:  # also when the store is being closed
                with CancelScope(shield=True):
                    await admission.commit(side_files)

    async def _go_on(self, admission: Admission) -> None:
        """Wait for those who read, and read what they leave out."""
        if not any(use.eager for use in self._uses):
            with move_on_after(inf if self._uses else self._patience_s):
                await self._changed.wait()
                return
        left_out = next((shard for shard in admission.missing if shard not in self._taken), None)
        if left_out is None:
            await self._changed.wait()
        else:
            await self._read(left_out)

    async def _read(self, shard: Shard) -> None:
        async with AsyncExitStack() as stack:
            chunks = await stack.enter_async_context(self._source.open(shard))
            if (file := await self.begin(shard, stack)) is not None:
                async for chunk in chunks:
                    await file.write(chunk.data)
                file.finish()


class _Tee:
    """The chunks of a shard, each written to a file while it is lent; the next is asked for after both."""

    def __init__(
        self, chunks: AsyncIterator[HostChunk], file: ShardFile, copy: _Copy, use: _Use, tasks: TaskGroup
    ) -> None:
        self._chunks = chunks
        self._file: ShardFile | None = file
        self._copy = copy
        self._use = use
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
        self._use.done = True
        if self._file is not None:
            try:
                self._file.finish()
            except StoreError as exc:
                self._copy.fail(exc)
            self._file = None
