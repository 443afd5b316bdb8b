"""`NvmeStore`: the tier on a local disk, read past the page cache, in the layout of `layout`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Self
from weakref import WeakValueDictionary

import anyio
from anyio import CancelScope, CapacityLimiter

from hotswap.backends.hub import resolve
from hotswap.backends.stores.bandwidth import Residents
from hotswap.backends.stores.convert import convert, layout_of
from hotswap.backends.stores.disk_directory import Admission, DiskDirectory, ReadLock
from hotswap.backends.stores.files import FileCalls, read_small, warn_of_other_users
from hotswap.backends.stores.fingerprint import ConversionOptions, ImportedModel
from hotswap.backends.stores.index import Indexes, models_in
from hotswap.backends.stores.layout import ALIGNMENT_BYTES, STORED_FILES, check_file_name, model_directory
from hotswap.backends.stores.locks import LOCK_LIMIT_S, LockWait
from hotswap.backends.stores.pieces import BufferPool, Verify
from hotswap.backends.stores.reading import DiskReader, ReadContext
from hotswap.backends.stores.text_files import parse_text_settings, read_adapter_settings
from hotswap.backends.stores.writer import AlreadyThere, Progress, sweep
from hotswap.checks import to_path
from hotswap.errors import BackendMissing, ConfigError, ShardMissing, StoreError
from hotswap.hardware import parse_bytes
from hotswap.model import Adapter, HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import StoreView, TierView
from hotswap.worker_threads import in_thread, run_in_thread

__all__ = ["NvmeStore"]

_log = logging.getLogger("hotswap.stores")


class _Abandoned(Exception):
    """Ends a conversion whose caller was cancelled."""


class NvmeStore(WeightStore):
    """Models in a directory of a local disk, one sub-directory each.

    Reads go past the page cache (`direct`) where the file system allows it, and through it otherwise;
    the fallback is logged once, and told by `HostChunk.buffered` each time.

    `budget` limits the data files of all models together, those being written included, for all processes
    that use the root. To make room for a model, whole models are removed, least recently read first, by this
    run or an earlier one; none that any process reads or pins. Without a budget none is removed.

    Args:
        root: The directory.
        name: The tier's name.
        budget: Bytes of all models together; `None` is unbounded.
        chunk_bytes: Bytes of one chunk, a multiple of 4096. Large ones cost less, small ones start sooner.
        depth: How many chunks may be read ahead; an open shard takes `depth * chunk_bytes` of host memory.
        threads: Concurrent reads of one shard.
        direct: Whether to read past the page cache.
        verify: `"load"` compares checksums while loading; `"never"` trusts the disk and `store verify`.
        lock_limit_s: How long to wait for a lock of another process, as of one that removes the model, until
            `StoreBusy`.
        calls: How files are read; for tests.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        name: str = "nvme",
        budget: int | str | None = None,
        chunk_bytes: int | str = "4 MiB",
        depth: int = 8,
        threads: int = 8,
        direct: bool = True,
        verify: Verify = "load",
        lock_limit_s: float = LOCK_LIMIT_S,
        calls: FileCalls | None = None,
    ) -> None:
        self.root = to_path(ConfigError, "root", root)
        self.name = name
        self._budget = None if budget is None else parse_bytes(budget, "budget")
        self._models = DiskDirectory(self.root, self._budget)
        self._indexes = Indexes(self.root)
        size = parse_bytes(chunk_bytes, "chunk_bytes")
        if size <= 0 or size % ALIGNMENT_BYTES:
            raise ConfigError(
                f"chunk_bytes is {size}; it must be a multiple of {ALIGNMENT_BYTES}, and not 0."
            )
        if depth < 1 or threads < 1:
            raise ConfigError(f"depth is {depth} and threads is {threads}; give 1 or more of each.")
        self._context = ReadContext(
            tier=name,
            pool=BufferPool(size, keep=depth, pin=True),
            depth=depth,
            threads=threads,
            verify=verify,
            calls=calls or FileCalls(),
        )
        self._reader = DiskReader(self.root, self._context, direct=direct)
        self._resident = Residents(name)
        self._lock_limit_s = lock_limit_s
        self._lock_waits = CapacityLimiter(40)  # their own: they may last
        self._incoming: dict[Admission, int] = {}
        self._pins: dict[ModelId, ReadLock] = {}
        self._importing: dict[ModelId, anyio.Lock] = {}
        self._converters = CapacityLimiter(1)  # one checkpoint in memory at a time
        # By the digest of their text, as long as they are used: to parse a large one stops all threads.
        self._tokenizers: WeakValueDictionary[bytes, Tokenizer] = WeakValueDictionary()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Remove the leftovers of dead writers, and look for models; nothing here waits for a lock."""
        for directory in await run_in_thread(sweep, self.root):
            _log.warning("Removed %r, which a dead process had left.", str(directory))
        await run_in_thread(warn_of_other_users, self.root)
        for model, size_bytes in (await run_in_thread(models_in, self.root)).items():
            self._resident.put(model, size_bytes)
        try:
            yield self
        finally:
            for model in tuple(self._pins):
                self.unpin(model)
            self._context.pool.clear()

    async def manifest(self, model: ModelId) -> Manifest:
        try:
            manifest = await run_in_thread(self._indexes.load, model, limiter=self._context.limiter)
        except StoreError:
            self._resident.remove(model)
            raise
        self._resident.put(model, manifest.weight_bytes)
        return manifest

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        path = self._path(shard)
        async with self._read_locked(shard.model), self._reader.open(path, shard) as chunks:
            yield chunks

    async def read_into(self, shard: Shard, destination: memoryview) -> HostChunk:
        path = self._path(shard)
        async with self._read_locked(shard.model):
            return await self._reader.read_into(path, shard, destination)

    @asynccontextmanager
    async def lend_files(self, manifest: Manifest) -> AsyncGenerator[tuple[Path, ...]]:
        """Lend files of this disk, once their checksums are compared; see `SupportsLendFiles`."""
        model = manifest.model
        async with self._read_locked(model):
            if await self.manifest(model) != manifest:
                raise ShardMissing(f"Another conversion of {model!r} is in {str(self.root)!r} now.")
            paths = tuple(map(self._path, manifest.shards))
            if self._context.verify == "load":
                for shard, path in zip(manifest.shards, paths, strict=True):
                    async with self._reader.open(path, shard) as chunks:
                        async for _ in chunks:
                            pass
            yield paths

    async def import_model(self, model: Model) -> None:
        id = ModelId(model.id)
        lock = self._importing.setdefault(id, anyio.Lock())
        async with lock:
            try:
                manifest = await self.manifest(id)
            except ShardMissing:
                if model.source is None:
                    raise
                source = await run_in_thread(resolve, model.source, abandon_on_cancel=True)
                layout = await run_in_thread(layout_of, source) if model.layout is None else model.layout
                await self._convert(id, source, ConversionOptions(layout=layout), replace_existing=False)
            else:
                if model.source is None:
                    return
                imported = ImportedModel(model_directory(self.root, id), manifest)
                options = await run_in_thread(imported.options_to_convert_again, model)
                if options is None:
                    return
                source = await run_in_thread(resolve, model.source, abandon_on_cancel=True)
                await self._convert(id, source, options, replace_existing=True)
            manifest = await self.manifest(id)
            _log.info("Model %r was imported from %r: %d bytes.", id, model.source, manifest.weight_bytes)

    @asynccontextmanager
    async def admit(self, manifest: Manifest) -> AsyncGenerator[Admission]:
        """Write a model from another tier: its shards, then `commit`; all of it, or nothing.

        Room is made first. Leaving the block without a commit, by an error, or by a cancellation leaves the
        tier as it was, except for the models that were removed to make room.

        Raises:
            TierFull: it does not fit even when everything not in use is removed; nothing was.
            StoreError: another process is writing the model, or the disk cannot be written.
        """
        wait = LockWait(self._lock_limit_s)
        admission = Admission(self._models, manifest, wait)
        try:
            await in_thread(admission.begin, limiter=self._lock_waits, cancelled=wait.cancelled)
            self._resident.remove(*admission.evicted)
            self._incoming[admission] = manifest.weight_bytes
            yield admission
        finally:
            with CancelScope(shield=True):
                await run_in_thread(admission.close)
            self._incoming.pop(admission, None)
            if admission.committed:
                self._resident.put(manifest.model, manifest.weight_bytes)

    async def remove(self, model: ModelId) -> int:
        """Remove a model from the disk and return the bytes freed; a crash leaves all of it or nothing.

        Raises:
            ShardMissing: there is no such model.
            StoreError: it is being read or pinned, by this process or another; nothing was changed.
        """
        freed_bytes = await run_in_thread(self._models.remove, model)
        self._resident.remove(model)
        return freed_bytes

    async def pin(self, model: ModelId) -> None:
        """Keep a model from removal, by any process, until `unpin` or the end of this store.

        Raises:
            ShardMissing: there is no such model.
        """
        lock = self._models.read_lock(model)
        try:
            await self._acquire(lock, model)
            self._pins.setdefault(model, lock)
        finally:
            if self._pins.get(model) is not lock:
                lock.release()

    def unpin(self, model: ModelId) -> None:
        """End a `pin`; nothing happens if there is none."""
        if (lock := self._pins.pop(model, None)) is not None:
            lock.release()

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the small files beside a model's weights, by name, for a tier that keeps a copy.

        Raises:
            StoreError: one of them could not be read; missing ones are left out.
        """
        return await run_in_thread(self._read_side_files, model)

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return await run_in_thread(self._load_tokenizer, model, limiter=self._context.limiter)

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        return await run_in_thread(self._load_settings, model, limiter=self._context.limiter)

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        model = ModelId(adapter.model)
        manifest, files = await self.manifest(model), await self.side_files(model)
        read = partial(read_adapter_settings, adapter, manifest, files)
        return await run_in_thread(read, limiter=self._context.limiter)

    def view(self) -> StoreView:
        tier = TierView(
            name=self.name,
            used_bytes=self._resident.used_bytes + sum(self._incoming.values()),
            capacity_bytes=self._budget,
            bytes_per_s=self._context.bandwidth.bytes_per_s,
        )
        return StoreView(tiers=(tier,), residency=self._resident.entries)

    @property
    def num_lent(self) -> int:
        """How many buffers open shards use; 0 when none is open."""
        return self._context.pool.num_lent

    def __repr__(self) -> str:
        models, used_bytes = len(self._resident), self._resident.used_bytes
        return f"<NvmeStore {str(self.root)!r} [{models} models, {used_bytes} bytes]>"

    async def _convert(
        self, model: ModelId, source: Path, options: ConversionOptions, *, replace_existing: bool
    ) -> None:
        """Convert in a worker thread; a cancellation stops it at the next piece, and waits for that."""
        wait = LockWait(self._lock_limit_s)
        evicted: list[ModelId] = []

        def go_on(progress: Progress) -> None:
            if wait.cancelled.is_set():
                raise _Abandoned

        def run() -> None:
            # Another process may have converted it meanwhile.
            with ExitStack() as stack, suppress(_Abandoned, AlreadyThere):

                def admit(size_bytes: int) -> None:
                    reserved = stack.enter_context(self._models.reserve(model, size_bytes, wait=wait))
                    evicted.extend(reserved.evicted)

                convert(
                    source,
                    self.root,
                    model_id=model,
                    layout=options.layout,
                    dtype=options.dtype,
                    world_size=options.world_size,
                    quantize=options.quantize,
                    replace_existing=replace_existing,
                    admit=admit,
                    progress=go_on,
                    wait=wait,
                )

        try:
            await in_thread(run, limiter=self._converters, cancelled=wait.cancelled)
        finally:
            self._resident.remove(*evicted)

    @asynccontextmanager
    async def _read_locked(self, model: ModelId) -> AsyncGenerator[None]:
        """Keep a model from removal while it is read."""
        lock = self._models.read_lock(model)
        try:
            await self._acquire(lock, model)
            yield
        finally:
            lock.release()

    async def _acquire(self, lock: ReadLock, model: ModelId) -> None:
        """Lock a model against removal; a cancellation ends the wait."""
        wait = LockWait(self._lock_limit_s)
        try:
            await in_thread(partial(lock.acquire, wait), limiter=self._lock_waits, cancelled=wait.cancelled)
        except ShardMissing:  # another process has removed it
            self._resident.remove(model)
            raise

    # ------------------------------------------------------------------------------------- worker threads

    def _read_side_files(self, model: ModelId) -> dict[str, bytes]:
        directory = model_directory(self.root, model)
        files: dict[str, bytes] = {}
        for name in STORED_FILES:
            with suppress(ShardMissing):
                files[name] = read_small(directory / name)
        return files

    def _load_tokenizer(self, model: ModelId) -> Tokenizer | None:
        path = model_directory(self.root, model) / "tokenizer.json"
        try:
            text = read_small(path)
        except ShardMissing:
            return None
        try:
            from hotswap.backends.tokenizer import HfTokenizer
        except BackendMissing as exc:  # token ids work without it
            _log.warning("Model %r is served without text: %s", model, exc)
            return None
        digest = sha256(text).digest()
        found = self._tokenizers.get(digest) or HfTokenizer.parse(text, name=str(path))
        self._tokenizers[digest] = found
        return found

    def _load_settings(self, model: ModelId) -> TextSettings | None:
        files = self._read_side_files(model)
        return parse_text_settings(files, model_directory(self.root, model)) if files else None

    def _path(self, shard: Shard) -> Path:
        directory = model_directory(self.root, shard.model)
        check_file_name(shard.file, directory)
        return directory / shard.file
