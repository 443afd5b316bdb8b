"""`SharedKVStore`: KV blocks in memory that the processes of a machine share, and that outlives them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Self

import anyio
from anyio import CancelScope

from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores.pages import whole_pages
from hotswap.backends.kv_stores.shared_directory import BlockFile
from hotswap.backends.kv_stores.shared_index import SharedIndex
from hotswap.backends.kv_stores.staging import Staging
from hotswap.backends.stores.locks import pauses
from hotswap.checks import to_path
from hotswap.errors import ConfigError
from hotswap.kv_store import KVLease, KVPrefix, KVPut
from hotswap.store_view import KVStoreView
from hotswap.tasks_beside import tasks_beside
from hotswap.worker_threads import in_thread, run_in_thread

__all__ = ["SharedKVStore"]

log = logging.getLogger("hotswap.stores")

# How long a write waits, without the event loop, for another process that has the directory locked.
_WAIT_S: Final = 2.0
_MOST_PAUSE_S: Final = 0.01


class SharedKVStore(IndexedKVStore[BlockFile]):
    """Keeps KV blocks in a directory in memory, which processes of a machine share under one budget.

    A block that one process has put is found by the others, and by those that start later: blocks stay when a
    process ends, and when all have. What makes room is decided as in other stores, among the blocks of all
    processes; a block that any of them saves or restores is not evicted. A process that is killed, at
    whatever moment, leaves whole blocks, and leases and reserves nothing.

    Processes find the blocks of engines with the same `KVLayout.computed_by`. Those of an engine that says
    nothing there, and those of adapters, of which each fleet has its own versions, are found by the one that
    has put them alone.

    It holds what users wrote, in a form that can be read back, in files that this user alone can read, until
    they are evicted, `unlink` deletes them, or the machine restarts.

    Another process has the directory locked for a moment when it changes something. The event loop waits
    10 ms for it; if it is stopped meanwhile, nothing is found or saved until it goes on. A forked child of a
    process that has this open shares its leases; start processes with `spawn` instead. Linux only.

    Args:
        directory: The directory, in memory, such as one in `/dev/shm`; made if there is none. It has nothing
            else in it.
        capacity: The budget, as a number of bytes or as text such as `"64 GiB"`; all processes give the same.
            Beside it a log takes up to 8 MiB and some 2 KiB for each block. Reads take as much memory of the
            process as they ask for at once, of which up to 16 MiB are kept for the next ones.

    Raises:
        ConfigError: the capacity is no size; on entering, the others have given another one, the directory is
            not this user's alone, or it has other files.
        TierFull: on entering or writing, the memory behind the directory is full.
        StoreError: on entering or later, the directory cannot be used, was removed, or its log is damaged.
    """

    outlives_fleets = True

    def __init__(self, directory: str | Path, capacity: int | str) -> None:
        super().__init__(capacity, tier="shared")
        self._directory = to_path(ConfigError, "directory", directory)
        self._own = f"of process {uuid.uuid4().hex}"
        self._shared = SharedIndex(self._directory, self._capacity_bytes)
        self._staging = Staging()
        self._wanted = anyio.Event()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        index = SharedIndex(self._directory, self._capacity_bytes)
        self._wanted = anyio.Event()
        try:
            await in_thread(index.open)
            self._index = self._shared = index
            async with super().__asynccontextmanager__(), tasks_beside() as tasks:
                tasks.start_soon(self._tidy, index, name="deleting KV blocks")
                yield self
        finally:
            self._shared = SharedIndex(self._directory, self._capacity_bytes)
            self._staging.close()
            with CancelScope(shield=True):
                await run_in_thread(index.close)

    def unlink(self) -> None:
        """Delete the blocks of all processes, with the directory. Blocking.

        Raises:
            StoreBusy: a process has the store open, this one included.
        """
        SharedIndex(self._directory, self._capacity_bytes).unlink()

    # ------------------------------------------------------------------ verbs

    def lookup(self, prefix: KVPrefix) -> int:
        with self._shared.locked(0.0):
            return super().lookup(self._named(prefix))

    def lease(self, prefix: KVPrefix) -> KVLease:
        with self._shared.locked() as is_locked:
            return super().lease(self._named(prefix) if is_locked else KVPrefix(prefix.layout, ()))

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        with self._shared.locked():
            return super().put(self._named(prefix), prefill_s=prefill_s, copy_s=copy_s)

    def view(self) -> KVStoreView:
        """Return the store as all processes have it; leases are those of this one."""
        with self._shared.locked(0.0):
            return super().view()

    def clear(self) -> None:
        with self._shared.locked() as is_locked:
            if not is_locked:
                raise self._shared.busy(0.01)
            super().clear()

    def _named(self, prefix: KVPrefix) -> KVPrefix:
        return prefix.under(prefix.layout.computed_by or self._own)

    def opened(self, number: int) -> None:
        super().opened(number)
        self._shared.tell_others()

    @asynccontextmanager
    async def changing(self) -> AsyncGenerator[None]:
        end_s = anyio.current_time() + _WAIT_S
        for pause_s in pauses(most_s=_MOST_PAUSE_S):
            with self._shared.locked(0.0) as is_locked:
                if is_locked:
                    yield
                    break
            if anyio.current_time() > end_s:
                raise self._shared.busy(_WAIT_S)
            await anyio.sleep(pause_s)
        if self._shared.is_long:
            self._wanted.set()

    # ------------------------------------------------------------------ where the content is

    def takes(self, block_bytes: int) -> bool:
        return self._shared.is_locked

    def size_of(self, block_bytes: int) -> int:
        return whole_pages(block_bytes)

    def is_broken(self, place: BlockFile) -> bool:
        return place.is_broken

    def allocate(self, block_bytes: int) -> BlockFile:
        return self._shared.new_file()

    def free(self, place: BlockFile) -> None:
        self._shared.free(place)
        self._wanted.set()

    async def fill(self, places: Sequence[BlockFile], data: memoryview) -> None:
        await in_thread(partial(self._shared.directory.fill, places, data))

    async def content(self, places: Sequence[BlockFile], block_bytes: int) -> memoryview:
        out = await self._staging.take(len(places) * block_bytes)
        try:
            await in_thread(partial(self._shared.directory.read, places, out))
        except BaseException:
            self._staging.give_back(out)
            raise
        return out

    def done(self, data: memoryview) -> None:
        self._staging.give_back(data)

    async def _tidy(self, index: SharedIndex) -> None:
        """Delete the files of blocks that were evicted, and make the log shorter when it is long."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            try:
                await in_thread(index.directory.delete_freed)
                if index.is_long and (ops := index.begin_shortening()) is not None:
                    await in_thread(partial(index.shorten, ops))
            except Exception as exc:
                log.warning("%r could not be tidied: %s", self, exc)
