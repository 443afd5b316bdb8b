"""The tier that keeps models on a local disk, in the layout of `layout`, and reads them directly."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import anyio
from anyio import CapacityLimiter, to_thread

from hotswap.backends.stores.convert import convert
from hotswap.backends.stores.files import BlockFile, read_small
from hotswap.backends.stores.layout import ALIGNMENT_BYTES, align, check_file_name
from hotswap.backends.stores.reading import BufferPool, Lane, ReadAhead, background
from hotswap.backends.stores.verify import load_index, models_in
from hotswap.backends.stores.writer import AlreadyThere, Progress, sweep
from hotswap.errors import BackendMissing, ConfigError, ShardMissing, StoreError, TierFull
from hotswap.hardware import parse_bytes
from hotswap.model import HostChunk, Manifest, Model, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.text import Tokenizer
from hotswap.view import Residency, StoreView, TierView

__all__ = ["NvmeStore"]

_log = logging.getLogger("hotswap.stores")


class _Abandoned(Exception):
    """Ends a conversion that nobody waits for any more."""


class NvmeStore(WeightStore):
    """Models in a directory of a local disk, one sub-directory each.

    Reads go past the page cache (`direct`) where the file system allows it, and through it where not, which
    the log says once. Two buffers of `chunk_bytes` are lent per open shard. `budget` limits the bytes of
    all models together; a model that would exceed it is refused, none is removed for it.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        name: str = "nvme",
        budget: int | str | None = None,
        chunk_bytes: int | str = "16 MiB",
        direct: bool = True,
    ) -> None:
        self.root = Path(root)
        self.name = name
        self._budget = None if budget is None else parse_bytes(budget)
        self._direct = direct
        size = parse_bytes(chunk_bytes)
        if size <= 0 or size % ALIGNMENT_BYTES:
            raise ConfigError(
                f"chunk_bytes is {size}; it must be a multiple of {ALIGNMENT_BYTES}, and not 0."
            )
        self._lane = Lane(tier=name, pool=BufferPool(size, keep=8))
        self._resident: dict[ModelId, int] = {}
        self._importing: dict[ModelId, anyio.Lock] = {}
        self._converters = CapacityLimiter(1)  # one checkpoint in memory at a time

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Sweep what dead writers have left and see which models are there."""
        for directory in await to_thread.run_sync(sweep, self.root):
            _log.warning("Removed %r, which a conversion that died had left.", str(directory))
        for model in await to_thread.run_sync(models_in, self.root):
            try:
                await self.manifest(model)
            except StoreError as exc:
                _log.warning("Model %r is not used: %s", model, exc)
        try:
            yield self
        finally:
            self._lane.pool.clear()

    async def manifest(self, model: ModelId) -> Manifest:
        try:
            manifest = await to_thread.run_sync(load_index, self.root, model, limiter=self._lane.limiter)
        except StoreError:
            self._resident.pop(model, None)
            raise
        self._resident[model] = manifest.weight_bytes
        return manifest

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        file = BlockFile(self._path(shard), direct=self._direct)
        try:
            await to_thread.run_sync(self._open_file, file, shard, limiter=self._lane.limiter)
            chunks = ReadAhead(file, shard, self._lane)
            try:
                async with background() as tasks:
                    tasks.start_soon(chunks.fill)
                    yield chunks
            finally:
                chunks.close()
        finally:
            file.close()
            self._note_refusal(file)

    async def import_model(self, model: Model) -> None:
        id = ModelId(model.id)
        lock = self._importing.setdefault(id, anyio.Lock())
        async with lock:
            try:
                await self.manifest(id)
            except ShardMissing:
                if model.source is None:
                    raise
                await self._convert(id, Path(model.source))
                await self.manifest(id)

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        return await to_thread.run_sync(self._load_tokenizer, model, limiter=self._lane.limiter)

    def view(self) -> StoreView:
        tier = TierView(
            name=self.name,
            used_bytes=sum(self._resident.values()),
            capacity_bytes=self._budget,
            bytes_per_s=self._lane.bandwidth.bytes_per_s,
        )
        residency = (
            Residency(model=model, tier=self.name, size_bytes=size) for model, size in self._resident.items()
        )
        return StoreView(tiers=(tier,), residency=tuple(residency))

    @property
    def num_lent(self) -> int:
        """How many buffers open shards have; 0 when nothing is open."""
        return self._lane.pool.num_lent

    def __repr__(self) -> str:
        used_bytes = sum(self._resident.values())
        return f"<NvmeStore {str(self.root)!r} [{len(self._resident)} models, {used_bytes} bytes]>"

    async def _convert(self, model: ModelId, source: Path) -> None:
        """Convert in a worker thread; a cancellation ends it at the next piece, and waits until it did."""
        cancelled = threading.Event()

        def go_on(progress: Progress) -> None:
            if cancelled.is_set():
                raise _Abandoned

        def run() -> None:
            # Another process may have converted it in the meantime.
            with suppress(_Abandoned, AlreadyThere):
                manifest = convert(source, self.root, model_id=model, admit=self._admit, progress=go_on)
                self._resident[model] = manifest.weight_bytes  # before the next may be admitted

        async def watch() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                cancelled.set()

        async with background() as tasks:
            tasks.start_soon(watch)
            await to_thread.run_sync(run, limiter=self._converters)

    # ------------------------------------------------------------------------------------- worker threads

    def _admit(self, size_bytes: int) -> None:
        used = sum(self._resident.values())
        if self._budget is not None and used + align(size_bytes) > self._budget:
            raise TierFull(
                f"The budget of {self._budget} bytes for {str(self.root)!r} has no room for "
                f"{size_bytes} more beside the {used} used. Raise it, or remove a model."
            )

    def _load_tokenizer(self, model: ModelId) -> Tokenizer | None:
        check_file_name(model, self.root)
        try:
            text = read_small(self.root / model / "tokenizer.json")
        except ShardMissing:
            return None
        try:
            from hotswap.backends.tokenizer import HfTokenizer
        except BackendMissing as exc:  # token ids work without it
            _log.warning("Model %r is served without text: %s", model, exc)
            return None
        return HfTokenizer.parse(text, name=str(self.root / model / "tokenizer.json"))

    def _open_file(self, file: BlockFile, shard: Shard) -> None:
        file.open()
        file.check_size(shard.file_offset_bytes + shard.size_bytes)

    def _note_refusal(self, file: BlockFile) -> None:
        if file.refused and self._direct:
            self._direct = False
            _log.warning("%r refuses direct reads; going on through the page cache.", str(self.root))

    def _path(self, shard: Shard) -> Path:
        check_file_name(shard.model, self.root)
        check_file_name(shard.file, self.root / shard.model)
        return self.root / shard.model / shard.file
