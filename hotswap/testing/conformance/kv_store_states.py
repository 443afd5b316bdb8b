"""Checks of KV stores with models that have recurrent states: blocks are found with these, or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import pytest
from anyio.lowlevel import checkpoint

from hotswap.kv_store import KVLease, KVPrefix, KVStore
from hotswap.migration import KVPages
from hotswap.testing.conformance.kv_store_suite import LAYOUT, KVStoreSuite
from hotswap.testing.conformance.suite import check

__all__ = ["KVStateChecks"]

_STATE_BYTES: Final = 3000
_WITH_STATES = replace(LAYOUT, states=((0, (750,), "float32"),), state_bytes=_STATE_BYTES)


class KVStateChecks(KVStoreSuite):
    """Checks of what is stored with recurrent states."""

    @check
    async def test_recurrent_states_come_back_after_the_last_block(self) -> None:
        prefix = self.with_states(18)
        async with self.opened(blocks=8) as store:
            await self.save_with_states(store, prefix)
            assert store.lookup(prefix) == 18
            for asked in (prefix, self.with_states(18, then=(99, 98, 97))):
                with store.lease(asked) as lease:
                    assert lease.num_tokens == 18, "the states are those after 18 tokens"
                    await self.assert_states(lease, prefix)
                    assert len((await lease.read(0, 16)).data) == 4 * self.block_size

    @check
    async def test_blocks_without_their_states_are_not_found(self) -> None:
        prefix = self.with_states(18)
        async with self.opened(blocks=8) as store:
            await self.save(store, prefix)
            assert store.lookup(prefix) == 0
            with store.lease(prefix) as lease:
                assert lease.num_tokens == 0
            with store.put(prefix) as put:
                assert put.first_block <= 4, "the states come with the last block, which is written again"
                assert put.num_tokens == 18
            await self.save_with_states(store, prefix)
            with store.lease(prefix) as lease:
                await self.assert_states(lease, prefix)

    @check
    async def test_states_are_found_at_their_own_length(self) -> None:
        longer, shorter = self.with_states(18), self.with_states(10)
        async with self.opened(blocks=16) as store:
            await self.save_with_states(store, longer)
            assert [store.lookup(self.with_states(count)) for count in (17, 16, 10, 4)] == [0, 0, 0, 0]
            await self.save_with_states(store, shorter)
            found = [store.lookup(self.with_states(count)) for count in (20, 18, 17, 10, 9)]
            assert found == [18, 18, 10, 10, 0]
            for prefix in (longer, shorter):
                with store.lease(prefix) as lease:
                    await self.assert_states(lease, prefix)

    @check
    async def test_what_has_states_keeps_nothing_if_there_is_no_room_for_all_of_it(self) -> None:
        prefix = self.with_states(18)
        async with self.opened(blocks=5) as store:
            with store.put(prefix) as put:
                assert put.num_tokens == 0
            assert store.view().used_bytes == 0

    @check
    async def test_states_that_were_evicted_are_not_missed_in_what_is_found(self) -> None:
        """Whatever goes for the room of others: a prefix is found with its states, or not at all."""
        prefixes = [self.with_states(10, then=(100 + at,)) for at in range(6)]
        async with self.opened(blocks=8) as store:
            for prefix in prefixes:
                await self.save_with_states(store, prefix)
                for other in prefixes:
                    with store.lease(other) as lease:
                        assert lease.num_tokens in (0, 11)
                        if lease.num_tokens:
                            await self.assert_states(lease, other)
            assert store.view().num_evicted

    def with_states(self, num_tokens: int, *, then: Iterable[int] = ()) -> KVPrefix:
        """Like `prefix`, of a model with recurrent states."""
        if not self.has_content:
            pytest.skip("a store without content keeps no states")
        return KVPrefix(_WITH_STATES, (*range(num_tokens), *then))

    async def save_with_states(self, store: KVStore, prefix: KVPrefix) -> None:
        """Put a prefix with the states after it, in pieces of two blocks."""
        step = 2 * LAYOUT.block_tokens
        with store.put(prefix) as put:
            for at in range(put.first_block * LAYOUT.block_tokens, put.num_tokens, step):
                pages = self.pages(prefix, at // LAYOUT.block_tokens, min(step, put.num_tokens - at))
                if at + pages.num_tokens == len(prefix.tokens):
                    data = memoryview(bytearray(pages.data) + self._states(prefix))
                    pages = KVPages(pages.first_block, pages.num_tokens, data)
                await put.write(pages)

    async def assert_states(self, lease: KVLease, prefix: KVPrefix) -> None:
        """Raise unless the last blocks are read with the states that were written after them."""
        first = max(0, prefix.num_blocks - 2)
        count = len(prefix.tokens) - first * LAYOUT.block_tokens
        pages = await lease.read(first, count)
        await checkpoint()
        written = self.content(prefix, range(first, prefix.num_blocks)) + self._states(prefix)
        assert bytes(pages.data) == written, "other blocks or states than were written"

    def _states(self, prefix: KVPrefix) -> bytes:
        return f"states after {prefix.tokens}".encode().ljust(_STATE_BYTES, b"!")
