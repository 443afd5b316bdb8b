"""`RemoteStore`: the tier in an object store or on an HTTP server, in the layout of `layout`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

from hotswap.backends.stores.bandwidth import Residents
from hotswap.backends.stores.index import dump_index, parse_index
from hotswap.backends.stores.layout import (
    ALIGNMENT_BYTES,
    INDEX_NAME,
    STORED_FILES,
    check_file_name,
    model_in,
    model_name,
)
from hotswap.backends.stores.pieces import BufferPool
from hotswap.backends.stores.reading import background
from hotswap.backends.stores.remote.objects import Location, Objects, RetryPolicy
from hotswap.backends.stores.remote.transfer import Download, DownloadContext, LocalModel, Upload
from hotswap.backends.stores.text_files import parse_text_settings, read_adapter_settings
from hotswap.checks import to_path
from hotswap.errors import ConfigError, ShardCorrupt, ShardMissing, StoreError, UnsafeFile
from hotswap.hardware import parse_bytes
from hotswap.model import Adapter, HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore
from hotswap.text import TextSettings, Tokenizer
from hotswap.view import StoreView, TierView
from hotswap.worker_threads import run_in_thread

__all__ = ["RemoteStore"]

_MOST_SMALL_BYTES = 256 << 20  # longer than any index or tokenizer


@dataclass(frozen=True, slots=True)
class _Known:
    """A manifest, and the entity tag of the index that it was read from."""

    manifest: Manifest
    tag: str | None


class RemoteStore(WeightStore):
    """Models below a URL, one directory each: `RemoteStore("s3://bucket/weights")`.

    `s3://`, `gs://`, `az://`, `https://`, `file://`, any URL that obstore opens. `options` are its options
    for that kind of store (`{"region": ..., "endpoint": ...}`); credentials come from there or from the
    environment. `client_options` are those of its HTTP client: proxies, certificates. An HTTP server must
    support byte ranges. Needs an asyncio event loop.

    Each shard is fetched in parts of `part_bytes`, `concurrency` at a time, and lent part by part, with
    `concurrency + 1` buffers for each open shard. A part whose transfer fails, or brings less than
    `piece_bytes` in `stall_s`, resumes from the last piece received, at most `retries` times, after pauses
    with jitter that start at `backoff_s` and double. Bytes are verified before the last chunk of a shard is
    lent.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "remote",
        part_bytes: int | str = "8 MiB",
        piece_bytes: int | str = "64 KiB",
        concurrency: int = 8,
        retries: int = 5,
        stall_s: float = 20.0,
        backoff_s: float = 0.2,
        random: Random | None = None,
        options: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        size = parse_bytes(part_bytes, "part_bytes")
        if size <= 0 or size % ALIGNMENT_BYTES:
            raise ConfigError(f"part_bytes is {size}; it must be a multiple of {ALIGNMENT_BYTES}, and not 0.")
        if concurrency < 1 or retries < 0 or not stall_s > 0 or backoff_s < 0:
            raise ConfigError(
                f"concurrency is {concurrency}, retries {retries}, stall_s {stall_s}, backoff_s {backoff_s}; "
                "give at least 1, at least 0, over 0, and at least 0."
            )
        self.name = name
        self._location = Location.of(url, options or {}, client_options or {})
        retry_policy = RetryPolicy(
            retries=retries, stall_s=stall_s, backoff_s=backoff_s, random=random or Random()
        )
        self._objects = Objects(
            self._location, retry_policy, piece_bytes=parse_bytes(piece_bytes, "piece_bytes")
        )
        pool = BufferPool(size, keep=concurrency + 1)
        self._context = DownloadContext(tier=name, pool=pool, concurrency=concurrency)
        self._known: dict[ModelId, _Known] = {}
        self._resident = Residents(name)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        """Free the buffers at the end. The store's models are discovered one by one, through `manifest`."""
        try:
            yield self
        finally:
            self._context.pool.clear()

    @property
    def url(self) -> str:
        """The store's URL, without credentials."""
        return self._location.url

    async def manifest(self, model: ModelId) -> Manifest:
        """Return a model's manifest: one small request when its index is unchanged."""
        try:
            known = await self._load_index(model, self._known.get(model))
        except (ShardMissing, ShardCorrupt, UnsafeFile):
            self._known.pop(model, None)
            self._resident.remove(model)
            raise
        self._known[model] = known
        self._resident.put(model, known.manifest.weight_bytes)
        return known.manifest

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        chunks = Download(self._objects, self._path(shard.model, shard.file), shard, self._context)
        try:
            async with background() as tasks:
                tasks.start_soon(chunks.fill)
                yield chunks
        finally:
            chunks.close()

    async def tokenizer(self, model: ModelId) -> Tokenizer | None:
        if (text := await self._side_file(model, "tokenizer.json")) is None:
            return None
        from hotswap.backends.tokenizer import HfTokenizer

        return await run_in_thread(HfTokenizer.parse, text)

    async def text_settings(self, model: ModelId) -> TextSettings | None:
        files = await self.side_files(model)
        where = f"{self.url}/{model}"
        return await run_in_thread(parse_text_settings, files, where) if files else None

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        model = ModelId(adapter.model)
        manifest, files = await self.manifest(model), await self.side_files(model)
        return await run_in_thread(read_adapter_settings, adapter, manifest, files)

    async def side_files(self, model: ModelId) -> dict[str, bytes]:
        """Return the small files beside a model's weights, by name, for a tier that keeps a copy.

        Raises:
            StoreError: one of them could not be read; missing ones are left out.
        """
        found = {name: await self._side_file(model, name) for name in STORED_FILES}
        return {name: text for name, text in found.items() if text is not None}

    async def push(
        self, directory: str | Path, model: ModelId | None = None, *, replace: bool = False
    ) -> Manifest:
        """Upload a model from its directory in a `NvmeStore`, under its directory's name or `model`.

        The index goes last, so that readers see the whole model or none of it. Pushing again resumes a failed
        push, and does nothing when the model is stored already. `replace` replaces a model's weights; readers
        of the old ones get a `ShardCorrupt`. A push that is cancelled or fails may leave data files, and in a
        bucket the parts of an upload: a life-cycle rule for incomplete uploads removes those.

        Raises:
            ShardMissing: there is no model in the directory.
            ShardCorrupt: its files do not match their index; no part of it can be read from this store.
            StoreError: this store has the model with other weights, or writing failed.
        """
        directory = to_path(ConfigError, "directory", directory)
        if (id := model_in(directory.name) if model is None else model) is None:
            raise ShardMissing(f"{str(directory)!r} is no directory of a model; give one in a `NvmeStore`.")
        model_name(id, self.url)
        local = await run_in_thread(LocalModel, directory, id)
        upload = Upload(self._location, local)
        try:
            there = await self.manifest(id)
        except ShardMissing:
            return await upload.run()
        except (ShardCorrupt, UnsafeFile):
            if not replace:
                raise
        else:
            if dump_index(there) == dump_index(local.manifest):
                return there
            if not replace:
                raise StoreError(
                    f"{self.url!r} holds other weights of model {id!r}. Give the new ones another "
                    "id, or push them with `replace=True`."
                )
        await upload.withdraw()
        return await upload.run()

    def view(self) -> StoreView:
        tier = TierView(
            name=self.name,
            used_bytes=self._resident.used_bytes,
            bytes_per_s=self._context.meter.bytes_per_s,
        )
        return StoreView(tiers=(tier,), residency=self._resident.entries)

    @property
    def num_lent(self) -> int:
        """How many buffers open shards use; 0 when none is open."""
        return self._context.pool.num_lent

    def __repr__(self) -> str:
        return f"<RemoteStore {self.url!r} [{len(self._known)} models known]>"

    async def _side_file(self, model: ModelId, name: str) -> bytes | None:
        try:
            found = await self._objects.read_small(self._path(model, name), most_bytes=_MOST_SMALL_BYTES)
        except ShardMissing:
            return None
        return None if found is None else found[0]

    async def _load_index(self, model: ModelId, known: _Known | None) -> _Known:
        path = self._path(model, INDEX_NAME)
        try:
            found = await self._objects.read_small(
                path, most_bytes=_MOST_SMALL_BYTES, unless=known.tag if known else None
            )
        except ShardMissing:
            raise ShardMissing(
                f"The store at {self.url!r} holds no model {model!r}. Push it there with `RemoteStore.push`."
            ) from None
        if found is None:
            assert known is not None, "the request had no condition"
            return known
        text, tag = found
        parse = partial(parse_index, text, path=self._objects.url(path), model=model)
        return _Known(await run_in_thread(parse), tag)

    def _path(self, model: ModelId, file: str) -> str:
        name = model_name(model, self.url)
        check_file_name(file, f"{self.url}/{name}")
        return f"{name}/{file}"
