"""A model on its way from a local store to a remote one: the index last, so it is there whole or not."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from anyio import to_thread
from obstore import exceptions

from hotswap.backends.stores.files import BlockFile, open_regular, read_small
from hotswap.backends.stores.index import parse_index
from hotswap.backends.stores.layout import INDEX_NAME, SIDE_FILES, Checksum
from hotswap.backends.stores.remote.location import Location
from hotswap.backends.stores.remote.objects import reason
from hotswap.errors import ShardCorrupt, ShardMissing, StoreError
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId

__all__ = ["LocalModel", "Upload"]

# 10,000 parts are the most that S3 takes: files of up to 156 GiB.
_PART_BYTES = 16 << 20
_CONCURRENCY = 4
_NOTE = "hotswapcontent"  # letters alone are a name in every cloud


class LocalModel:
    """A model's directory in a store on disk. Blocking: use it in a worker thread."""

    def __init__(self, directory: Path, model: ModelId) -> None:
        self.directory = directory
        self.model = model
        path = directory / INDEX_NAME
        self.index = read_small(path)
        self.manifest = parse_index(self.index, path=path, model=model)

    def data_files(self) -> dict[str, list[Shard]]:
        """The data files, and the shards that lie in each, in order."""
        files: dict[str, list[Shard]] = {}
        for shard in sorted(self.manifest.shards, key=lambda shard: (shard.file, shard.file_offset_bytes)):
            files.setdefault(shard.file, []).append(shard)
        return files

    def side_files(self) -> dict[str, bytes]:
        """The tokenizer and what belongs to it."""
        return {name: read_small(self.directory / name) for name in SIDE_FILES if self._has(name)}

    def pieces(self, file: str, shards: list[Shard]) -> Iterator[bytes]:
        """Read a data file in pieces; raises `ShardCorrupt` at its end if it is not what its index says."""
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


def _note(shards: list[Shard]) -> str:
    """What a data file is known by: short, since clouds allow two kilobytes of notes."""
    places = [(shard.file_offset_bytes, shard.size_bytes, shard.checksum) for shard in shards]
    return hashlib.sha256(repr(places).encode()).hexdigest()


class Upload:
    """Puts the files of one local model into its remote directory; the library tries again what fails."""

    def __init__(self, location: Location, local: LocalModel) -> None:
        self._location = location
        self._local = local
        self._store = location.open(writing=True)

    async def run(self) -> Manifest:
        """Put the data files that are not there yet, then the side files, then the index."""
        for file, shards in self._local.data_files().items():
            await self._put_data(file, shards)
        for name, text in (await to_thread.run_sync(self._local.side_files)).items():
            await self._put_small(name, text)
        await self._put_small(INDEX_NAME, self._local.index)
        return self._local.manifest

    async def withdraw(self) -> None:
        """Delete the index, so that nobody begins to read what is about to be replaced."""
        with self._writing(INDEX_NAME) as path:
            await obstore.delete_async(self._store, path)

    async def _put_data(self, file: str, shards: list[Shard]) -> None:
        note = _note(shards)
        if self._location.keeps_notes and await self._note_of(file) == note:
            return
        pieces = self._local.pieces(file, shards)
        with self._writing(file) as path:
            # Leaving the block by an error aborts the upload, so that what was damaged is never there.
            async with obstore.open_writer_async(
                self._store,
                path,
                attributes={_NOTE: note} if self._location.keeps_notes else None,
                buffer_size=_PART_BYTES,
                max_concurrency=_CONCURRENCY,
            ) as writer:
                while piece := await to_thread.run_sync(next, pieces, b""):
                    await writer.write(piece)

    async def _put_small(self, name: str, text: bytes) -> None:
        with self._writing(name) as path:
            await obstore.put_async(self._store, path, text, use_multipart=False)

    async def _note_of(self, file: str) -> str | None:
        """What was said of the file when it was put, `None` if it is not there or nothing was said."""
        with self._writing(file) as path:
            try:
                answer = await obstore.get_async(self._store, path, options={"head": True})
            except FileNotFoundError:
                return None
            return answer.attributes.get(_NOTE)

    @contextmanager
    def _writing(self, name: str) -> Generator[str]:
        """Give the path of a file, and turn what goes wrong there into a `StoreError`."""
        path = f"{self._local.model}/{name}"
        url = f"{self._location.url}/{path}"
        try:
            yield path
        except (exceptions.BaseError, OSError, NotImplementedError) as exc:
            raise StoreError(
                f"Writing {url!r} failed: {reason(exc)}. Check the server and the credentials, and push "
                "again: what is there already is not sent twice where the store can tell."
            ) from None
