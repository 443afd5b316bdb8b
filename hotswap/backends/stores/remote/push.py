"""Uploading a model from a local store to a remote one; the index goes last, so it appears whole."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore import exceptions

from hotswap.backends.stores.files import BlockFile, open_regular, read_small
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.layout import INDEX_NAME, STORED_FILES, Checksum, model_name
from hotswap.backends.stores.remote.objects import Location, reason
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId
from hotswap.worker_threads import run_in_thread

__all__ = ["LocalModel", "Upload"]

# S3 allows 10,000 parts: files of up to 156 GiB.
_PART_BYTES = 16 << 20
_CONCURRENCY = 4
_DIGEST = "hotswapcontent"  # an attribute; names of letters only are valid in every cloud


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
