"""`NodeKVStore`: KV blocks on the machines of the engines that computed them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import anyio

from hotswap.backends.kv_index import Places
from hotswap.backends.kv_indexed import IndexedKVStore
from hotswap.backends.kv_stores.host import HostKVStore
from hotswap.backends.kv_stores.pages import PAGE_BYTES, PagePool, Pages, packed_pages, whole_pages
from hotswap.backends.remote.host_memory import LendsMemory, LentMemory
from hotswap.checks import check_kind
from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError, MigrationAborted, StoreError, TierFull
from hotswap.hardware import parse_bytes
from hotswap.kv_store import KVLease, KVPrefix, KVPut, KVStore
from hotswap.migration import KVLayout, KVPages, KVSink, KVSource
from hotswap.request import ModelId
from hotswap.store_view import KVStoreView
from hotswap.tasks_beside import tasks_beside

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from hotswap.backends.remote.control import ControlLink

__all__ = ["NodeKVStore"]

log = logging.getLogger("hotswap.stores")


class NodeKVStore(KVStore):
    """Keeps the KV blocks of engines elsewhere in memory of their hosts, so that they stay on their machines.

    What an engine computes is saved in the process that has the engine, under a budget for each. A request
    that goes on at an engine of another host has its blocks sent from host to host, where these reach each
    other (`EngineHost.peers`), else through the fleet's process. Blocks of engines in the fleet's process are
    kept by `local`, also when the fleet ends if that outlives it.

    The fleet's process keeps account of all, and decides what makes room, as in other stores; it looks
    requests up in all of them. What the host of an engine has is lost with its process; a link that breaks
    loses nothing of it. The memory is given back when the fleet ends. If the fleet's process dies, it stays
    until another one takes the engine over, or the host ends.

    Args:
        capacity: The budget of each host, as a number of bytes or as text such as `"64 GiB"`. The host takes
            memory as it is written to, and an eighth of it, but 1 GiB at most, before that.
        local: The store for engines that are in this process or whose host keeps no blocks; without one,
            theirs are not saved. It is entered with this one.

    Raises:
        ConfigError: the capacity is no size, or `local` no store.
    """

    def __init__(self, capacity: int | str, *, local: KVStore | None = None) -> None:
        self._capacity_bytes = parse_bytes(capacity, "capacity")
        self._local: KVStore = HostKVStore(0) if local is None else local
        check_kind(ConfigError, "local", self._local, KVStore)
        self._hosts: dict[LendsMemory, HostMemoryStore] = {}
        self._tasks: TaskGroup | None = None

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        try:
            async with self._local, tasks_beside() as self._tasks:
                yield self
        finally:
            self._tasks = None
            self._hosts.clear()

    def lookup(self, prefix: KVPrefix) -> int:
        return max(store.lookup(prefix) for store in self._stores())

    def lease(self, prefix: KVPrefix) -> KVLease:
        return self.lease_near(prefix, self._local)

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        return self._local.put(prefix, prefill_s=prefill_s, copy_s=copy_s)

    def view(self) -> KVStoreView:
        """Return all stores as one; what each has of a model is told by node."""
        views = [store.view() for store in self._stores()]
        capacities = [view.capacity_bytes for view in views if view.capacity_bytes is not None]
        return KVStoreView(
            tier="node",
            capacity_bytes=sum(capacities) if len(capacities) == len(views) else None,
            used_bytes=sum(view.used_bytes for view in views),
            num_leases=sum(view.num_leases for view in views),
            num_evicted=sum(view.num_evicted for view in views),
            models=tuple(model for view in views for model in view.models),
        )

    def node_of(self, prefix: KVPrefix) -> str:
        return max(self._stores(), key=lambda store: store.lookup(prefix)).node_of(prefix)

    def near(self, engine: Engine) -> KVStore:
        return _Near(self, self._store_of(engine))

    def lease_near(self, prefix: KVPrefix, near: KVStore) -> KVLease:
        """Lease from the store that has most of a prefix; of several that have as much, the near one."""
        return max((near, *self._stores()), key=lambda store: store.lookup(prefix)).lease(prefix)

    def _stores(self) -> Iterator[KVStore]:
        return iter((self._local, *(store for store in self._hosts.values() if not store.is_over)))

    def _store_of(self, engine: Engine) -> KVStore:
        """Return the store for what an engine computes."""
        if self._tasks is None or not isinstance(engine, LendsMemory):
            return self._local
        if (store := self._hosts.get(engine)) is None or store.is_over:
            self._hosts = {key: store for key, store in self._hosts.items() if not store.is_over}
            store = self._hosts[engine] = HostMemoryStore(self._capacity_bytes, engine, self._tasks)
        return store

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {[self._local, *self._hosts.values()]}>"


class _Near(KVStore):
    """A `NodeKVStore` as an engine uses it."""

    def __init__(self, store: NodeKVStore, own: KVStore) -> None:
        self._store, self._own = store, own
        self.outlives_fleets = own.outlives_fleets

    def lookup(self, prefix: KVPrefix) -> int:
        return self._store.lookup(prefix)

    def lease(self, prefix: KVPrefix) -> KVLease:
        return self._store.lease_near(prefix, self._own)

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        return self._own.put(prefix, prefill_s=prefill_s, copy_s=copy_s)

    def view(self) -> KVStoreView:
        return self._store.view()

    def node_of(self, prefix: KVPrefix) -> str:
        return self._store.node_of(prefix)


class HostMemoryStore(IndexedKVStore[Pages]):
    """Keeps KV blocks in memory of the host of one engine; the index is here, and the content there.

    Args:
        capacity_bytes: The budget.
        engine: The engine.
        tasks: For asking its host, when its link is new, what became of the memory.

    Attributes:
        is_over: Whether it can have no blocks any more: the host was started anew, or the engine has ended.
    """

    def __init__(self, capacity_bytes: int, engine: LendsMemory, tasks: TaskGroup) -> None:
        super().__init__(capacity_bytes, tier="node")
        self._engine, self._tasks = engine, tasks
        self._name = secrets.token_hex(16)
        self._pool = PagePool(self._capacity_bytes // PAGE_BYTES)
        self._opened: ControlLink | None = None  # over which the host has said what it has
        self._refused: ControlLink | None = None  # over which it has refused
        self._opening, self._is_asked = anyio.Lock(), False
        self._is_lost = False
        self._entered = True

    @property
    def is_over(self) -> bool:
        return self._is_lost or self._engine.has_ended

    # ------------------------------------------------------------------ verbs

    def lookup(self, prefix: KVPrefix) -> int:
        return super().lookup(prefix) if self._has_content() else 0

    def lease(self, prefix: KVPrefix) -> KVLease:
        return super().lease(prefix if self._has_content() else KVPrefix(prefix.layout, ()))

    def node_of(self, prefix: KVPrefix) -> str:
        return self._engine.status().node

    def view(self) -> KVStoreView:
        view, node = super().view(), self._engine.status().node
        return replace(view, models=tuple(replace(model, node=node) for model in view.models))

    def takes(self, block_bytes: int) -> bool:
        link = self._engine.memory_link
        return not self.is_over and link is not None and link is not self._refused

    def _has_content(self) -> bool:
        """Whether the host has said over its present link what it has; if there is one it is asked."""
        link = self._engine.memory_link
        if self.is_over or link is None:
            return False
        if link is not self._opened and link is not self._refused and not self._is_asked:
            self._is_asked = True
            self._tasks.start_soon(self._ask, name=f"memory for KV blocks of {self._engine.id}")
        return link is self._opened

    async def _ask(self) -> None:
        try:
            await self._open()
        except (InstanceError, StoreError) as exc:
            log.info("Stored KV blocks of %r are not found for now: %s", self._engine.id, exc)
        finally:
            self._is_asked = False

    # ------------------------------------------------------------------ where the content is

    def size_of(self, block_bytes: int) -> int:
        return whole_pages(block_bytes)

    def allocate(self, block_bytes: int) -> Pages:
        return self._pool.allocate(block_bytes)

    def free(self, place: Pages) -> None:
        self._pool.free(place)

    async def fill(self, places: Sequence[Pages], data: memoryview) -> None:
        blocks = _blocks_of(places, len(data) // len(places))
        async with self.sink(blocks) as sink:
            await sink.write(KVPages(0, len(places), data))

    async def content(self, places: Sequence[Pages], block_bytes: int) -> memoryview:
        async with self.source(_blocks_of(places, block_bytes)) as source:
            return (await source.read(0, len(places))).data

    def done(self, data: memoryview) -> None:
        return

    def sink(self, places: Places[Pages]) -> AbstractAsyncContextManager[KVSink]:
        return self._sink(places)

    def source(self, places: Places[Pages]) -> AbstractAsyncContextManager[KVSource]:
        return self._source(places)

    @asynccontextmanager
    async def _sink(self, places: Places[Pages]) -> AsyncGenerator[KVSink]:
        async with self._lent(places, is_sink=True) as lent:
            yield lent.sink

    @asynccontextmanager
    async def _source(self, places: Places[Pages]) -> AsyncGenerator[KVSource]:
        async with self._lent(places, is_sink=False) as lent:
            yield lent.source

    @asynccontextmanager
    async def _lent(self, places: Places[Pages], *, is_sink: bool) -> AsyncGenerator[LentMemory]:
        await self._open()
        lent: LentMemory | None = None
        try:
            async with self._engine.lend_memory(
                self._name,
                places.layout,
                packed_pages([*places.blocks, *places.states]),
                is_sink=is_sink,
                first_block=places.first_block,
                num_tokens=places.num_tokens,
                has_states=bool(places.states),
            ) as lent:
                yield lent
        finally:
            if lent is not None and lent.is_in_use:  # so its pages cannot be given to others
                self._lose("it does not say that it copies nothing more")

    async def _open(self) -> None:
        """Have the host say over its present link that it has the memory.

        Raises:
            InstanceLost: the host cannot be reached.
            MigrationAborted: it was started anew.
            TierFull: it has no such memory.
        """
        async with self._opening:
            link = self._engine.memory_link
            if self._refused is not None and link is self._refused:
                raise TierFull(f"The host of {self._engine.id!r} has refused memory for KV blocks.")
            if link is None or link is not self._opened:
                await self._open_over(link)
        if self._is_lost:
            raise MigrationAborted(f"The host of {self._engine.id!r} has lost what it kept.", stage="copy")

    async def _open_over(self, link: ControlLink | None) -> None:
        try:
            is_kept = await self._engine.open_memory(self._name, self._capacity_bytes)
        except StoreError as exc:
            self._refused = link
            log.error("KV blocks of %r are not saved: %s", self._engine.id, exc)
            raise
        if self._opened is not None and not is_kept:
            self._lose("it was started anew, or had another controller")
        self._opened = link

    def _lose(self, because: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.warning("KV blocks at the host of %r are lost: %s.", self._engine.id, because)


def _blocks_of(places: Sequence[Pages], block_bytes: int) -> Places[Pages]:
    """Return places as blocks of one token each, of which the host need not know what they are."""
    layout = KVLayout(
        model=ModelId(""), weights="", adapter=None, block_tokens=1, layers=(), block_bytes=block_bytes
    )
    return Places(layout, 0, len(places), tuple(places))
