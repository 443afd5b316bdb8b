"""Downloading one shard in concurrent parts, verified and lent in order, and uploading a model.

The index of an upload goes last, so that the model appears whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import anyio
import obstore
from anyio.lowlevel import checkpoint
from obstore import exceptions

from hotswap.backends.stores.bandwidth import Meter
from hotswap.backends.stores.files import BlockFile, open_regular, read_small
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.layout import INDEX_NAME, STORED_FILES, Checksum, model_name
from hotswap.backends.stores.pieces import BufferPool
from hotswap.backends.stores.reading import background, give_back
from hotswap.backends.stores.remote.objects import PUSH_AGAIN, Location, Objects, Part, Version, reason
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.worker_threads import run_in_thread

__all__ = ["Download", "DownloadContext", "LocalModel", "Upload"]


_PART_BYTES = 16 << 20
_CONCURRENCY = 4
_DIGEST = "hotswapcontent"  # an attribute; names of letters only are valid in every cloud

_Filled: TypeAlias = tuple[memoryview, Part]  # a buffer, and the part that was read into it


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadContext:
    """Shared by the downloads of one store: its name, buffers, and measured bandwidth."""

    tier: str
    pool: BufferPool
    concurrency: int
    meter: Meter = field(default_factory=lambda: Meter(0.5e9, anyio.current_time))


class Download:
    """The chunks of one shard in order, one for each part; `fill` fetches them ahead.

    Run `fill` beside the consumer (`background`), then `close`. It uses one buffer for each concurrent part
    and one that is lent. The checksum is compared before the last chunk is lent.
    """

    def __init__(self, objects: Objects, path: str, shard: Shard, context: DownloadContext) -> None:
        self._objects = objects
        self._path = path
        self._shard = shard
        self._context = context
        self._version = Version(least_bytes=shard.file_offset_bytes + shard.size_bytes)
        self._checksum = Checksum()
        self._error: StoreError | None = None
        self._starts = iter(range(0, shard.size_bytes, context.pool.buffer_bytes))
        self._num_lent_bytes = 0
        self._lent: _Filled | None = None
        num_parts = -(-shard.size_bytes // context.pool.buffer_bytes)
        self._num_workers = min(context.concurrency, num_parts)
        self._buffers = [context.pool.take() for _ in range(min(context.concurrency + 1, num_parts))]
        depth = len(self._buffers)
        self._free_in, self._free_out = anyio.create_memory_object_stream[memoryview](depth)
        self._arrived_in, self._arrived_out = anyio.create_memory_object_stream[_Filled | StoreError](
            2 * depth
        )
        self._full_in, self._full_out = anyio.create_memory_object_stream[_Filled](depth)
        for buffer in self._buffers:
            self._free_in.send_nowait(buffer)

    def close(self) -> None:
        """Return every buffer to the pool; only after `fill` has ended."""
        self._return_lent()
        for sender, receiver in (
            (self._free_in, self._free_out),
            (self._arrived_in, self._arrived_out),
            (self._full_in, self._full_out),
        ):
            sender.close()
            receiver.close()
        for buffer in self._buffers:
            self._context.pool.put(buffer)
        self._buffers.clear()

    def __aiter__(self) -> AsyncIterator[HostChunk]:
        return self

    async def __anext__(self) -> HostChunk:
        self._return_lent()
        try:
            self._lent = await self._full_out.receive()
        except anyio.EndOfStream:
            await self._end()
            raise StopAsyncIteration from None
        part = self._lent[1]
        self._num_lent_bytes += part.done
        offset = self._shard.buffer_offset_bytes + part.start - self._shard.file_offset_bytes
        return HostChunk(offset, part.target, self._context.tier)

    async def fill(self) -> None:
        """Fetch the whole shard; an error reaches the consumer after the chunks before it."""
        try:
            async with background() as tasks:
                for _ in range(self._num_workers):
                    tasks.start_soon(self._fetch_parts)
                await self._verify_in_order()
        except StoreError as exc:
            self._error = exc
        finally:
            self._full_in.close()

    async def _end(self) -> None:
        """Return if the whole shard was lent, else raise: a part must not pass for the whole."""
        if self._error is not None:
            raise self._error
        if self._num_lent_bytes < self._shard.size_bytes:
            await checkpoint()  # a cancellation may have ended `fill` first
            raise StoreError(f"Reading {self._objects.url(self._path)!r} ended early: its block was left.")

    async def _fetch_parts(self) -> None:
        """Fetch parts; the buffer is taken before the part, so that the next part in order always has one."""
        while True:
            buffer = await self._free_out.receive()
            start = next(self._starts, None)
            if start is None:
                return
            target = buffer[: min(len(buffer), self._shard.size_bytes - start)]
            part = Part(self._shard.file_offset_bytes + start, target)
            try:
                await self._fetch(part)
            except StoreError as exc:
                self._arrived_in.send_nowait(exc)
                return
            self._arrived_in.send_nowait((buffer, part))

    async def _fetch(self, part: Part) -> None:
        self._context.meter.begin()
        try:
            await self._objects.read_part(self._path, part, self._version)
        finally:
            self._context.meter.end(part.done)

    async def _verify_in_order(self) -> None:
        """Hand over the parts in order, the last one after the checksum of the whole."""
        early: dict[int, _Filled] = {}
        due, end = self._shard.file_offset_bytes, self._shard.file_offset_bytes + self._shard.size_bytes
        while due < end:
            while due not in early:
                arrived = await self._arrived_out.receive()
                if isinstance(arrived, StoreError):
                    raise arrived
                early[arrived[1].start] = arrived
            filled = early.pop(due)
            part = filled[1]
            await run_in_thread(self._checksum.update, part.target)
            due = part.end
            if due == end:
                self._check()
            await self._full_in.send(filled)

    def _check(self) -> None:
        if str(self._checksum) != self._shard.checksum:
            raise ShardCorrupt(
                f"The bytes of {self._objects.url(self._path)!r} are not those that were pushed: their "
                f"checksum is {self._checksum}, the index says {self._shard.checksum}. {PUSH_AGAIN}"
            )

    def _return_lent(self) -> None:
        if self._lent is not None:
            buffer, part = self._lent
            give_back(part.target)
            self._free_in.send_nowait(buffer)
            self._lent = None


# S3 allows 10,000 parts: files of up to 156 GiB.


class LocalModel:
    """The directory of a model in a store on disk. Blocking: use it in a worker thread."""

    def __init__(self, directory: Path, model: ModelId) -> None:
        self.directory = directory
        self.model = model
        path = directory / INDEX_NAME
        self.index = read_small(path)
        self.manifest = parse_index(self.index, path=path, model=model)

    def data_files(self) -> dict[str, list[Shard]]:
        """The data files, and the shards in each, in order."""
        files: dict[str, list[Shard]] = {}
        for shard in sorted(self.manifest.shards, key=lambda shard: (shard.file, shard.file_offset_bytes)):
            files.setdefault(shard.file, []).append(shard)
        return files

    def side_files(self) -> dict[str, bytes]:
        """The tokenizer and its files, by name."""
        return {name: read_small(self.directory / name) for name in STORED_FILES if self._has(name)}

    def pieces(self, file: str, shards: list[Shard]) -> Iterator[bytes]:
        """Read a data file in pieces; raises `ShardCorrupt` at its end if a checksum is wrong."""
        data = BlockFile(self.directory / file, direct=False)
        data.open()
        try:
            position = 0
            for shard in shards:
                yield from _pieces(data, position, shard.file_offset_bytes, Checksum())
                position, checksum = shard.file_offset_bytes + shard.size_bytes, Checksum()
                yield from _pieces(data, shard.file_offset_bytes, position, checksum)
                if str(checksum) != shard.checksum:
                    raise ShardCorrupt(
                        f"{str(self.directory / file)!r} is damaged: its checksum is {checksum}, the index "
                        f"says {shard.checksum}. Convert the model again; nothing of it can be loaded."
                    )
        finally:
            data.close()

    def _has(self, name: str) -> bool:
        try:
            with open(open_regular(self.directory / name), "rb"):
                return True
        except ShardMissing:
            return False


def _pieces(data: BlockFile, start: int, end: int, checksum: Checksum) -> Iterator[bytes]:
    for at in range(start, end, _PART_BYTES):
        piece = bytearray(min(_PART_BYTES, end - at))
        data.read(memoryview(piece), at)
        checksum.update(piece)
        yield bytes(piece)


def _content_digest(shards: list[Shard]) -> str:
    """A digest that identifies the content of a data file; clouds allow two kilobytes of attributes."""
    places = [(shard.file_offset_bytes, shard.size_bytes, shard.checksum) for shard in shards]
    return hashlib.sha256(repr(places).encode()).hexdigest()


class Upload:
    """Uploads the files of one local model into its remote directory; the library retries."""

    def __init__(self, location: Location, local: LocalModel) -> None:
        self._location = location
        self._local = local
        self._store = location.open(writing=True)

    async def run(self) -> Manifest:
        """Upload the missing data files, then the side files, then the index."""
        for file, shards in self._local.data_files().items():
            await self._put_data(file, shards)
        for name, text in (await run_in_thread(self._local.side_files)).items():
            await self._put_small(name, text)
        await self._put_small(INDEX_NAME, self._local.index)
        return self._local.manifest

    async def withdraw(self) -> None:
        """Delete the index, so that no new reader finds the model while it is replaced."""
        with self._writing(INDEX_NAME) as path:
            await obstore.delete_async(self._store, path)

    async def _put_data(self, file: str, shards: list[Shard]) -> None:
        digest = _content_digest(shards)
        if self._location.has_attributes and await self._digest_of(file) == digest:
            return
        pieces = self._local.pieces(file, shards)
        with self._writing(file) as path:
            # Leaving the block by an error aborts the upload, so that a damaged file never appears.
            async with obstore.open_writer_async(
                self._store,
                path,
                attributes={_DIGEST: digest} if self._location.has_attributes else None,
                buffer_size=_PART_BYTES,
                max_concurrency=_CONCURRENCY,
            ) as writer:
                while piece := await run_in_thread(next, pieces, b""):
                    await writer.write(piece)

    async def _put_small(self, name: str, text: bytes) -> None:
        with self._writing(name) as path:
            await obstore.put_async(self._store, path, text, use_multipart=False)

    async def _digest_of(self, file: str) -> str | None:
        """The content digest of an uploaded file, `None` if it does not exist or has none."""
        with self._writing(file) as path:
            try:
                answer = await obstore.get_async(self._store, path, options={"head": True})
            except FileNotFoundError:
                return None
            return answer.attributes.get(_DIGEST)

    @contextmanager
    def _writing(self, name: str) -> Generator[str]:
        """Yield the path of a file, and turn errors of writing it into a `StoreError`."""
        path = f"{model_name(self._local.model, self._location.url)}/{name}"
        url = f"{self._location.url}/{path}"
        try:
            yield path
        except (exceptions.BaseError, OSError, NotImplementedError) as exc:
            raise StoreError(
                f"Writing {url!r} failed: {reason(exc)}. Check the server and the credentials, and push "
                "again: finished files are not sent twice where the store keeps attributes."
            ) from None
