"""`SimKVStore`: a KV store that keeps an index and no bytes, and takes the time that copies would."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.checks import check_positive
from hotswap.errors import ConfigError

__all__ = ["SimKVStore"]


class SimKVStore(IndexedKVStore[None]):
    """Decides like a store in host memory what it keeps, and keeps no bytes.

    Blocks are copied from it at `bytes_per_s`, and to it in the time that `DeviceProfile.kv_bytes_per_s`
    tells, which a simulated engine takes as it reads them.

    Args:
        capacity: The budget, as a number of bytes or as text such as `"200 GiB"`.
        bytes_per_s: The speed of copies to a device, each of which has a link of its own.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(self, capacity: int | str, *, bytes_per_s: float = 25e9) -> None:
        super().__init__(capacity, tier="host")
        check_positive(ConfigError, bytes_per_s=bytes_per_s)
        self._bytes_per_s = bytes_per_s

    def size_of(self, block_bytes: int) -> int:
        return block_bytes

    def allocate(self, block_bytes: int) -> None:
        return

    def free(self, place: None) -> None:
        return

    async def fill(self, places: Sequence[None], data: memoryview) -> None:
        await checkpoint()

    async def content(self, places: Sequence[None], block_bytes: int) -> memoryview:
        await anyio.sleep(len(places) * block_bytes / self._bytes_per_s)
        return memoryview(b"")

    def done(self, data: memoryview) -> None:
        return
