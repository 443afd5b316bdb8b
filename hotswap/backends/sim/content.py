"""Weights of any size without the memory: a byte is a pure function of the model's name and its offset."""

from __future__ import annotations

import hashlib
from functools import lru_cache

from hotswap.errors import ShardCorrupt
from hotswap.model import HostChunk, Shard
from hotswap.request import ModelId

__all__ = ["SimContent", "check_chunk", "sim_bytes"]

_PERIOD = 4093  # prime, so that no two aligned offsets look alike
_SAMPLE_BYTES = 64


def _pattern() -> bytes:
    digests = (hashlib.blake2b(number.to_bytes(4, "little")).digest() for number in range(_PERIOD // 64 + 1))
    return b"".join(digests)[:_PERIOD]


_PATTERN = _pattern()


def sim_bytes(model: ModelId, offset_bytes: int, size_bytes: int) -> bytes:
    """Return what a simulated model's flat buffer holds at an offset."""
    start = _phase(model, offset_bytes)
    repeats = (start + size_bytes) // _PERIOD + 1
    return (_PATTERN * repeats)[start : start + size_bytes]


class SimContent:
    """Lends `sim_bytes` of at most `max_bytes` at a time as views of one buffer, without copying."""

    def __init__(self, max_bytes: int) -> None:
        self._buffer = memoryview(_repeated(max_bytes // _PERIOD + 2))

    def view(self, model: ModelId, offset_bytes: int, size_bytes: int) -> memoryview:
        """Return a read-only view of the bytes at an offset."""
        start = _phase(model, offset_bytes)
        return self._buffer[start : start + size_bytes]


@lru_cache(maxsize=1)
def _repeated(times: int) -> bytes:
    # Cached: tests and simulations make hundreds of stores, and a buffer is a quarter of a gigabyte.
    return _PATTERN * times


def check_chunk(shard: Shard, chunk: HostChunk) -> None:
    """Compare the first bytes of a chunk of a simulated shard with those of the model.

    Raises:
        ShardCorrupt: they differ.
    """
    if not shard.checksum.startswith("sim:"):
        return
    sample = bytes(chunk.data[:_SAMPLE_BYTES])
    if sample != sim_bytes(shard.model, chunk.offset_bytes, len(sample)):
        raise ShardCorrupt(
            f"Shard {shard.file!r} of {shard.model!r} holds foreign bytes at {chunk.offset_bytes}; "
            "find out which store lent them."
        )


def _phase(model: ModelId, offset_bytes: int) -> int:
    return (_first_phase(model) + offset_bytes) % _PERIOD


@lru_cache(maxsize=4096)
def _first_phase(model: ModelId) -> int:
    return int.from_bytes(hashlib.blake2b(model.encode(), digest_size=4).digest(), "little")
