"""Checking a store on a disk: every byte of a model against its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hotswap.backends.stores.files import BlockFile, aligned_buffer, read_small
from hotswap.backends.stores.layout import INDEX_NAME, Checksum, check_file_name, parse_index
from hotswap.backends.stores.reading import check_shard
from hotswap.errors import ShardMissing
from hotswap.model import Manifest, Shard
from hotswap.request import ModelId

__all__ = ["load_index", "models_in", "verify"]

_PIECE_BYTES = 16 << 20


def models_in(root: Path) -> list[ModelId]:
    """Return the ids of the models under `root`, in order; nothing is read of them."""
    return [ModelId(path.parent.name) for path in sorted(root.glob(f"[!.]*/{INDEX_NAME}"))]


def load_index(root: Path, model: ModelId) -> Manifest:
    """Read a model's index, and see that its files are there and long enough. Blocking.

    Raises:
        ShardMissing: there is no such model, or a file of it is missing.
        ShardCorrupt: the index cannot be used, or a file is truncated.
        UnsafeFile: a name leads elsewhere, or a file is a link.
    """
    check_file_name(model, root)
    directory = root / model
    if not directory.is_dir():
        raise ShardMissing(
            f"The store at {str(root)!r} holds no model {model!r}. "
            "Convert it with `hotswap convert`, or register it with its source."
        )
    path = directory / INDEX_NAME
    manifest = parse_index(read_small(path), path=path, model=model)
    for shard in manifest.shards:
        file = BlockFile(directory / shard.file, direct=False)
        try:
            file.open()
            file.check_size(shard.file_offset_bytes + shard.size_bytes)
        finally:
            file.close()
    return manifest


def verify(root: Path, model: ModelId, *, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Read all bytes of a model, compare their checksums, and return its manifest. Blocking.

    `progress` is told the bytes done and those in all.

    Raises:
        StoreError: whatever is wrong; see `load_index`.
    """
    manifest = load_index(root, model)
    buffer = aligned_buffer(_PIECE_BYTES)
    done = 0
    for shard in manifest.shards:
        for size in _verify_shard(root / model, shard, buffer):
            done += size
            if progress is not None:
                progress(done, manifest.weight_bytes)
    return manifest


def _verify_shard(directory: Path, shard: Shard, buffer: memoryview) -> Iterator[int]:
    file = BlockFile(directory / shard.file)
    checksum = Checksum()
    try:
        file.open()
        for start in range(0, shard.size_bytes, len(buffer)):
            piece = buffer[: shard.size_bytes - start]
            file.read(piece, shard.file_offset_bytes + start)
            checksum.update(piece)
            yield len(piece)
    finally:
        file.close()
    check_shard(shard, checksum)
