"""Verifying a model on a disk: every byte against the checksums of its index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hotswap.backends.memory import aligned_buffer
from hotswap.backends.stores.fields import CONVERT_AGAIN
from hotswap.backends.stores.files import BlockFile
from hotswap.backends.stores.indexes import load_index
from hotswap.backends.stores.layout import ALIGNMENT_BYTES, Checksum, align, model_directory
from hotswap.errors import ShardCorrupt
from hotswap.model import Manifest, Shard, TensorSpec
from hotswap.request import ModelId

__all__ = ["verify"]

_PIECE_BYTES = 16 << 20


def verify(root: Path, model: ModelId, *, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Read all bytes of a model, compare their checksums, and return its manifest. Blocking.

    `progress` is called with the bytes done and the total.

    Raises:
        StoreError: the model is damaged or missing; see `load_index`.
    """
    manifest = load_index(root, model)
    buffer = aligned_buffer(_PIECE_BYTES)
    done = 0
    for shard in manifest.shards:
        checksum = Checksum()
        for piece in _pieces(model_directory(root, model), shard, buffer, 0, shard.size_bytes):
            checksum.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, manifest.weight_bytes)
        if str(checksum) != shard.checksum:
            raise _damaged(model_directory(root, model), manifest, shard, buffer)
    return manifest


def _damaged(directory: Path, manifest: Manifest, shard: Shard, buffer: memoryview) -> ShardCorrupt:
    """Return the error that names the damaged tensors of a shard."""
    begin, end = shard.buffer_offset_bytes, shard.buffer_offset_bytes + shard.size_bytes
    inside = [
        tensor
        for tensor in manifest.tensors_of(shard.rank)
        if tensor.offset_bytes < end and begin < tensor.offset_bytes + tensor.size_bytes
    ]
    names = [
        tensor.name for tensor in inside if _checksum(directory, manifest, tensor, buffer) != tensor.checksum
    ]
    what = f"the tensor {names[0]!r}" if names else "the padding between tensors"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return ShardCorrupt(
        f"The bytes of {shard.file!r} of model {shard.model!r} have changed: {what}{more} is damaged. "
        f"{CONVERT_AGAIN}"
    )


def _checksum(directory: Path, manifest: Manifest, tensor: TensorSpec, buffer: memoryview) -> str:
    """The checksum of a tensor's bytes, which may span files."""
    checksum = Checksum()
    for shard in manifest.shards_of(tensor.rank):
        start = max(0, tensor.offset_bytes - shard.buffer_offset_bytes)
        stop = min(shard.size_bytes, tensor.offset_bytes + tensor.size_bytes - shard.buffer_offset_bytes)
        for piece in _pieces(directory, shard, buffer, start, stop):
            checksum.update(piece)
    return str(checksum)


def _pieces(directory: Path, shard: Shard, buffer: memoryview, start: int, stop: int) -> Iterator[memoryview]:
    """The bytes of a shard from `start` to `stop`; each piece is valid until the next."""
    if start >= stop:
        return
    # Direct reads start and end at block boundaries.
    first, last = start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, min(align(stop), shard.size_bytes)
    file = BlockFile(directory / shard.file)
    try:
        file.open()
        for at in range(first, stop, len(buffer)):
            size = min(len(buffer), last - at)
            file.read(buffer[:size], shard.file_offset_bytes + at)
            yield buffer[max(0, start - at) : min(size, stop - at)]
    finally:
        file.close()
