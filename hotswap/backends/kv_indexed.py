"""`IndexedKVStore`: what KV stores share that keep an index of their blocks in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Generic, Self, TypeVar

from anyio.lowlevel import checkpoint

from hotswap.backends.kv_index import Found, KVIndex, Places, StoredBlock, states_key
from hotswap.backends.kv_too_large import TooLarge
from hotswap.errors import StoreError
from hotswap.hardware import parse_bytes
from hotswap.kv_store import KVCopy, KVLease, KVPrefix, KVPut, KVStore
from hotswap.migration import CachedKV, KVLayout, KVPages, KVSink, KVSource
from hotswap.store_view import KVStoreView
from hotswap.worker_threads import in_thread

__all__ = ["IndexedKVStore"]

PlaceT = TypeVar("PlaceT")


class IndexedKVStore(KVStore, Generic[PlaceT]):
    """A KV store under a budget of bytes; a subclass says where the content of blocks is.

    Args:
        capacity: The budget, as a number of bytes or as text such as `"4 GiB"`.
        tier: What it is called in spans and metrics.

    Raises:
        ConfigError: the capacity is no size.
    """

    def __init__(self, capacity: int | str, *, tier: str) -> None:
        self.tier, self._capacity_bytes = tier, parse_bytes(capacity, "capacity")
        self._index = KVIndex[PlaceT](self._capacity_bytes)
        self._num_open = 0
        self._entered = False
        self._too_large = TooLarge()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._entered = True
        try:
            yield self
        finally:
            self._entered = False
            self._index = KVIndex[PlaceT](self._capacity_bytes)

    def lookup(self, prefix: KVPrefix) -> int:
        return _found_in(self._index, prefix).num_tokens

    def lease(self, prefix: KVPrefix) -> KVLease:
        return _Lease(self, self._index, prefix)

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        num_tokens, layout = max(1, len(prefix.tokens)), prefix.layout
        worth = prefill_s / (num_tokens * max(1, layout.block_bytes)) * layout.block_tokens
        if layout.state_bytes:  # without which its blocks are worth nothing
            worth = prefill_s / (prefix.num_blocks * layout.block_bytes + layout.state_bytes)
        is_worth_it = not copy_s or copy_s < prefill_s
        is_taken = self.takes(layout.block_bytes) and self.takes(layout.state_bytes)
        takes_room = self._entered and is_worth_it and is_taken and self._fits(layout)
        return _Put(self, self._index, prefix, worth=worth, takes_room=takes_room)

    def view(self) -> KVStoreView:
        return KVStoreView(
            tier=self.tier,
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._index.used_bytes,
            num_leases=self._num_open,
            num_evicted=self._index.num_evicted,
            models=self._index.models(),
        )

    def clear(self) -> None:
        """Forget everything but blocks that are being saved or restored, and those before them."""
        while (block := self._index.pop()) is not None:
            self.free(block.place)

    def _fits(self, layout: KVLayout) -> bool:
        """Whether its blocks are small enough to be kept; the log says once if they are not."""
        size, most = max(map(self.size_of, (layout.block_bytes, layout.state_bytes))), self.most_block_bytes
        if size > most and self._capacity_bytes:  # with no room at all it is meant to
            self._too_large.tell(self, layout, size, most)
        return size <= most

    # ------------------------------------------------------------------ where the content is

    @property
    def most_block_bytes(self) -> int:
        """The most that a block may take of the budget to be kept."""
        return self._capacity_bytes

    def takes(self, block_bytes: int) -> bool:
        """Return whether blocks of that size are kept now."""
        return True

    def is_broken(self, place: PlaceT) -> bool:
        """Return whether what was written to a place cannot be read: its block is lost, and written anew."""
        return False

    @abstractmethod
    def size_of(self, block_bytes: int) -> int:
        """Return what a block takes of the budget."""

    @abstractmethod
    def allocate(self, block_bytes: int) -> PlaceT:
        """Return a place for a block, for which there is room in the budget."""

    @abstractmethod
    def free(self, place: PlaceT) -> None:
        """Take a place back."""

    @abstractmethod
    async def fill(self, places: Sequence[PlaceT], data: memoryview) -> None:
        """Copy blocks of equal size to their places; a cancellation waits for the end of the copy."""

    @abstractmethod
    async def content(self, places: Sequence[PlaceT], block_bytes: int) -> memoryview:
        """Return the content of blocks, one after another; `done` takes the memory back.

        Raises:
            StoreError: a place is broken.
        """

    @abstractmethod
    def done(self, data: memoryview) -> None:
        """Take back what `content` returned."""

    def sink(self, places: Places[PlaceT]) -> AbstractAsyncContextManager[KVSink] | None:
        """Return a block in which places are the sink of a move; `None` if `fill` alone reaches them."""
        return None

    def source(self, places: Places[PlaceT]) -> AbstractAsyncContextManager[KVSource] | None:
        """Return a block in which places are the source of a move; `None` if `content` alone reaches them."""
        return None

    # ------------------------------------------------------------------ leases and puts

    @asynccontextmanager
    async def changing(self) -> AsyncGenerator[None]:
        """A block in which blocks that were filled are added to the index; nothing is awaited in it."""
        yield

    def opened(self, number: int) -> None:
        """Count a lease or a put that begins (1) or ends (-1)."""
        self._num_open += number

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier} {self._index!r}>"


class _Lease(KVLease, Generic[PlaceT]):
    def __init__(self, store: IndexedKVStore[PlaceT], index: KVIndex[PlaceT], prefix: KVPrefix) -> None:
        self._store, self._index, self._layout = store, index, prefix.layout
        self._found: Found[PlaceT] = _found_in(index, prefix)
        self.num_tokens = self._found.num_tokens
        self._lent: memoryview | None = None
        self._is_open = True
        self._leased = self._found.blocks[-2:]
        if self._found.states is not None:
            self._leased = (*self._leased, self._found.states)
        index.use(self._found.blocks)
        index.use(self._leased)
        for block in self._leased:
            index.lease(block)
        store.opened(1)

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        block_tokens = self._layout.block_tokens
        end = first_block * block_tokens + num_tokens
        if not (self._is_open and first_block >= 0 and num_tokens >= 0 and end <= self.num_tokens):
            raise ValueError(f"Tokens up to {end} are read, and {self.num_tokens} are leased.")
        self._take_back()
        blocks = self._found.blocks[first_block : -(-end // block_tokens)]
        places = [block.place for block in blocks]
        states = self._found.states if end == self.num_tokens else None
        try:
            self._lent = await self._store.content(places, self._layout.block_bytes)
            if states is None:
                return KVPages(first_block, num_tokens, self._lent)
            return KVPages(first_block, num_tokens, await self._with_states(self._lent, states))
        except StoreError:
            for block in blocks if states is None else (*blocks, states):
                self._lose_if_broken(block)
            raise

    @asynccontextmanager
    async def copying_to(self, sink: KVSink) -> AsyncGenerator[KVCopy]:
        blocks = tuple(block.place for block in self._found.blocks)
        states = () if self._found.states is None else (self._found.states.place,)
        places = Places(self._layout, 0, self.num_tokens, blocks, states)
        if (lending := self._store.source(places)) is None:
            async with super().copying_to(sink) as copy:
                yield copy
        else:
            async with lending as source:
                yield partial(source.copy_to, sink)

    async def _with_states(self, content: memoryview, states: StoredBlock[PlaceT]) -> memoryview:
        """Return the content of blocks followed by that of states; nothing is lent afterwards."""
        whole = bytearray(len(content) + self._layout.state_bytes)
        await in_thread(partial(_copy, content, memoryview(whole)[: len(content)]))
        self._take_back()
        self._lent = await self._store.content([states.place], self._layout.state_bytes)
        await in_thread(partial(_copy, self._lent, memoryview(whole)[len(content) :]))
        self._take_back()
        return memoryview(whole)

    def _lose_if_broken(self, block: StoredBlock[PlaceT]) -> None:
        if self._store.is_broken(block.place) and self._index.get(block.key) is block:
            self._index.lose(block)
            self._store.free(block.place)

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._take_back()
            for block in reversed(self._leased):
                self._index.release(block)
            self._store.opened(-1)

    def _take_back(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            self._store.done(lent)


class _Put(KVPut, Generic[PlaceT]):
    def __init__(
        self,
        store: IndexedKVStore[PlaceT],
        index: KVIndex[PlaceT],
        prefix: KVPrefix,
        *,
        worth: float,
        takes_room: bool,
    ) -> None:
        self._store, self._index, self._prefix, self._worth = store, index, prefix, worth
        self._layout = prefix.layout
        self._size = store.size_of(self._layout.block_bytes)
        self._state_size = store.size_of(self._layout.state_bytes)
        self._leased: list[StoredBlock[PlaceT]] = []
        self._places: list[PlaceT] = []  # of the blocks from `_next` on
        self._state_places: list[PlaceT] = []  # one, if there are states to be written
        self._is_open = True
        found = index.find(prefix)
        index.use(found.blocks, worth)
        self._next = self.first_block = found.num_tokens // self._layout.block_tokens
        if found.num_tokens == len(prefix.tokens):
            self._next = self.first_block = prefix.num_blocks
        lacks_states = self._layout.state_bytes > 0 and not self._has_states()
        for block in found.blocks[: self._next][-1:]:  # not one that makes way for a fuller one
            self._lease(block)
        store.opened(1)
        if takes_room and (self._takes_states() if lacks_states else True):
            self._take_room()
        end = self._next + len(self._places)
        self.num_tokens = min(end * self._layout.block_tokens, len(prefix.tokens))
        if lacks_states and (end < prefix.num_blocks or not self._state_places):
            self._give_all_back()  # blocks are of no use without the states after them
            self.first_block = self._next = self.num_tokens = 0

    def _has_states(self) -> bool:
        """Whether states are stored after the last token; else the last block is to be written with them."""
        num_blocks = self._prefix.num_blocks
        last = self._index.get(self._prefix.key(num_blocks - 1)) if num_blocks else None
        if last is None:  # another block may begin with its tokens, and have the states after others
            self._next = self.first_block = min(self._next, max(0, num_blocks - 1))
            return not num_blocks
        self._lease(last)
        states = self._index.get(states_key(last.key))
        if states is None:
            self.first_block = num_blocks - 1
            return False
        self._lease(states)
        self._index.use([states], self._worth)
        return True

    def _takes_states(self) -> bool:
        """Reserve a place for states, before those of blocks; false if there is no room."""
        self._state_places = self._reserve(self._state_size, self._layout.state_bytes)
        return bool(self._state_places)

    def _take_room(self) -> None:
        """Reserve places for the missing blocks, up to the first for which there is no room."""
        for _ in range(self._next, self._prefix.num_blocks):
            place = self._reserve(self._size, self._layout.block_bytes)
            if not place:
                return
            self._places += place

    def _reserve(self, size: int, content_bytes: int) -> list[PlaceT]:
        """Return a place of a size of the budget; none if there is no room for it."""
        worth = self._worth * (content_bytes / size if size else 1.0)
        evicted = self._index.reserve(size, worth)
        if evicted is None:
            num_left = self._prefix.num_blocks - self._next - len(self._places)
            self._index.refuse(self._size * num_left, worth)
            return []
        for block in evicted:
            self._store.free(block.place)
        return [self._store.allocate(content_bytes)]

    async def write(self, pages: KVPages) -> None:
        layout, first = self._layout, pages.first_block
        places, skipped = self._missing(first, pages.num_tokens)
        size = (skipped + len(places)) * layout.block_bytes
        if places:
            await self._store.fill(places, pages.data[skipped * layout.block_bytes : size])
            await self._keep_all(len(places))
        else:
            await checkpoint()
        if self._has_states_after(first, pages.num_tokens, len(pages.data) - size):
            await self._store.fill(self._state_places, pages.data[size:])
            await self._keep_states_too()

    @asynccontextmanager
    async def copying_from(self, source: KVSource | CachedKV) -> AsyncGenerator[KVCopy]:
        first, blocks, states = self._next, tuple(self._places), tuple(self._state_places)
        lending = self._store.sink(Places(self._layout, first, self.num_tokens, blocks, states))
        if lending is None:
            async with super().copying_from(source) as copy:
                yield copy
        else:
            async with lending as sink:
                yield partial(self._take_from, source, sink)

    async def _take_from(
        self, source: KVSource | CachedKV, sink: KVSink, first_block: int, num_tokens: int
    ) -> int:
        """Have blocks copied to their places, and be found."""
        places, skipped = self._missing(first_block, num_tokens)
        if skipped:  # states come with a block that may be stored, and has no place
            pages = await source.read(first_block, num_tokens)
            await self.write(pages)
            return len(pages.data)
        num_bytes = await source.copy_to(sink, first_block, num_tokens)
        await self._keep_all(len(places))
        if self._has_states_after(
            first_block, num_tokens, num_bytes - len(places) * self._layout.block_bytes
        ):
            await self._keep_states_too()
        return num_bytes

    def _missing(self, first: int, num_tokens: int) -> tuple[list[PlaceT], int]:
        """Return the places of blocks that are to be written, and how many before them are stored.

        Raises:
            ValueError: the blocks do not follow those before, or there is no room for them.
        """
        layout = self._layout
        end = first * layout.block_tokens + num_tokens
        count = -(-num_tokens // layout.block_tokens)
        is_whole = end % layout.block_tokens == 0 or end == len(self._prefix.tokens)
        if not (self._is_open and is_whole and first <= self._next):
            raise ValueError(f"Tokens {first * layout.block_tokens} to {end} do not follow those before.")
        if first + count > self._next + len(self._places):
            raise ValueError(f"There is no room for tokens up to {end}, but for {self.num_tokens}.")
        skipped = min(self._next - first, count)
        return self._places[: count - skipped], skipped

    def _has_states_after(self, first: int, num_tokens: int, num_bytes: int) -> bool:
        """Whether so many bytes after some blocks are states that are to be kept."""
        is_last = first * self._layout.block_tokens + num_tokens == len(self._prefix.tokens)
        return bool(self._state_places) and is_last and num_bytes == self._layout.state_bytes

    async def _keep_all(self, count: int) -> None:
        """Have the next blocks be found, which were copied."""
        async with self._store.changing():
            for _ in range(count):
                self._keep(self._places[0])
                del self._places[0]

    async def _keep_states_too(self) -> None:
        async with self._store.changing():
            self._keep_states(self._state_places[0])
            self._state_places.clear()

    def _keep(self, place: PlaceT) -> None:
        """Have a block be found that was copied, unless another put has stored it meanwhile."""
        prefix, at = self._prefix, self._next
        tokens = prefix.tokens_of(at)
        worth = self._worth * len(tokens) / self._layout.block_tokens
        key, parent = prefix.key(at), prefix.parent(at)
        self._add(StoredBlock(key, parent, tokens, self._layout.model, place, self._size, worth))
        self._next += 1

    def _keep_states(self, place: PlaceT) -> None:
        """Have states be found that were copied, likewise; the block before them is leased."""
        parent = self._prefix.key(self._prefix.num_blocks - 1)
        model, size = self._layout.model, self._state_size
        self._add(StoredBlock(states_key(parent), parent, (), model, place, size, self._worth))

    def _add(self, block: StoredBlock[PlaceT]) -> None:
        stored = self._index.get(block.key)
        if stored is not None:
            self._give_back(block.place, block.size_bytes)
        else:
            for covered in self._index.add(block):
                self._store.free(covered.place)
        self._lease(stored or block)

    def release(self) -> None:
        if self._is_open:
            self._is_open = False
            self._give_all_back()
            while self._leased:
                self._index.release(self._leased.pop())
            self._store.opened(-1)

    def _give_all_back(self) -> None:
        while self._places:
            self._give_back(self._places.pop(), self._size)
        while self._state_places:
            self._give_back(self._state_places.pop(), self._state_size)

    def _give_back(self, place: PlaceT, size: int) -> None:
        self._store.free(place)
        self._index.unreserve(size)

    def _lease(self, block: StoredBlock[PlaceT]) -> None:
        self._index.lease(block)
        self._leased.append(block)


def _found_in(index: KVIndex[PlaceT], prefix: KVPrefix) -> Found[PlaceT]:
    """Return what can be used of a prefix: blocks, up to the last states for a model that has some."""
    return index.find_with_states(prefix) if prefix.layout.state_bytes else index.find(prefix)


def _copy(content: memoryview, out: memoryview) -> None:
    out[:] = content
