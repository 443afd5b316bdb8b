"""`KVStoreConformance`: the contract of every `KVStore`."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap.kv_store import KVPrefix, KVStore
from hotswap.request import AdapterId, ModelId
from hotswap.testing.conformance.kv_store_states import KVStateChecks
from hotswap.testing.conformance.kv_store_suite import LAYOUT
from hotswap.testing.conformance.suite import check

__all__ = ["KVStoreConformance"]


class KVStoreConformance(KVStateChecks):
    """Checks every testable promise of `hotswap.kv_store.KVStore`; inherit from it.

    ```python
    class TestMyStore(KVStoreConformance):
        def make_store(self, capacity_bytes: int) -> MyStore:
            return MyStore(capacity_bytes)
    ```

    Attributes:
        has_content: Whether the store keeps what is written; a simulated one need not.
    """

    # ------------------------------------------------------------------ what is found

    @check
    async def test_what_was_put_is_found_and_read_back(self) -> None:
        prefix = self.prefix(18)
        async with self.opened(blocks=8) as store:
            assert store.lookup(prefix) == 0
            await self.save(store, prefix)
            assert store.lookup(prefix) == 18
            await self.assert_content(store, prefix)

    @check
    async def test_blocks_are_read_in_any_pieces_and_again(self) -> None:
        prefix = self.prefix(18)
        async with self.opened(blocks=8) as store:
            await self.save(store, prefix)
            with store.lease(prefix) as lease:
                for first, num_tokens in ((2, 10), (0, 18), (4, 2), (1, 4), (0, 0)):
                    await self.assert_read(lease, prefix, first, num_tokens)

    @check
    async def test_as_many_first_tokens_are_found_as_are_alike(self) -> None:
        prefix = self.prefix(18)
        async with self.opened(blocks=8) as store:
            await self.save(store, prefix)
            for num_alike in (0, 3, 4, 11, 16, 17, 18):
                other = self.prefix(num_alike, then=(901, 902, 903, 904, 905))
                assert store.lookup(other) == num_alike
                with store.lease(other) as lease:
                    assert lease.num_tokens == num_alike
                    await self.assert_read(lease, prefix, 0, num_alike)

    @check
    async def test_blocks_are_found_by_all_that_they_depend_on_and_by_nothing_else(self) -> None:
        prefix = self.prefix(12)
        others = (
            replace(LAYOUT, weights="w2"),
            replace(LAYOUT, adapter=AdapterId("sql@0")),
            replace(LAYOUT, block_tokens=2),
            replace(LAYOUT, layers=((2, 256, 256, "float32"),)),
            replace(LAYOUT, layers=((1, 512, 512, "int32"),)),
        )
        async with self.opened(blocks=8) as store:
            await self.save(store, prefix)
            for layout in others:
                assert store.lookup(KVPrefix(layout, prefix.tokens)) == 0, f"found by {layout}"
            assert store.lookup(KVPrefix(LAYOUT, prefix.tokens, salt="another fleet")) == 0
            renamed = KVPrefix(replace(LAYOUT, model=ModelId("m2")), prefix.tokens)
            assert store.lookup(renamed) == 12, "equal weights under another name have equal blocks"

    @check
    async def test_what_is_written_can_be_found_at_once_and_not_before(self) -> None:
        prefix = self.prefix(12)
        async with self.opened(blocks=8) as store:
            with store.put(prefix) as put:
                assert (put.first_block, put.num_tokens) == (0, 12)
                assert store.lookup(prefix) == 0
                await put.write(self.pages(prefix, 0, 8))
                assert store.lookup(prefix) == 8
            assert store.lookup(prefix) == 8

    @check
    async def test_content_is_kept_though_the_writer_uses_its_memory_again(self) -> None:
        prefix = self.prefix(8)
        async with self.opened(blocks=4) as store:
            with store.put(prefix) as put:
                pages = self.pages(prefix, 0, 8)
                await put.write(pages)
                pages.data[:] = bytes(len(pages.data))
            await self.assert_content(store, prefix)

    # ------------------------------------------------------------------ sharing

    @check
    async def test_a_beginning_is_stored_once(self) -> None:
        first, second = self.prefix(12), self.prefix(8, then=range(700, 706))
        async with self.opened(blocks=16) as store:
            await self.save(store, first)
            before = store.view().used_bytes
            with store.put(second) as put:
                assert put.first_block == 2
            await self.save(store, second)
            assert store.view().used_bytes == before + 2 * before // 3
            await self.assert_content(store, first)
            await self.assert_content(store, second)

    @check
    async def test_an_unchanged_request_is_not_copied_again(self) -> None:
        async with self.opened(blocks=16) as store:
            await self.save(store, self.prefix(18))
            with store.put(self.prefix(18)) as put:
                assert (put.first_block, put.num_tokens) == (5, 18)
            with store.put(self.prefix(23)) as put:
                assert put.first_block == 4, "the partly full block alone is written again"

    @check
    async def test_a_partly_full_block_makes_way_for_the_one_that_has_more(self) -> None:
        async with self.opened(blocks=16) as store:
            for num_tokens in (18, 19, 23):
                await self.save(store, self.prefix(num_tokens))
                (stored,) = store.view().models
                assert stored.num_blocks == self.prefix(num_tokens).num_blocks
                await self.assert_content(store, self.prefix(num_tokens))

    @check
    async def test_two_that_put_one_prefix_at_once_store_it_once(self) -> None:
        prefix = self.prefix(18)
        async with self.opened(blocks=16) as store:
            with store.put(prefix) as one, store.put(prefix) as other:
                for put in (one, other):
                    await put.write(self.pages(prefix, 0, 8))
                for put in (other, one):
                    await put.write(self.pages(prefix, 2, 10))
            (stored,) = store.view().models
            assert stored.num_blocks == 5
            await self.assert_content(store, prefix)

    # ------------------------------------------------------------------ room

    @check
    async def test_a_leased_block_stays_as_it_is_while_others_are_saved(self) -> None:
        """Without leases the room of a block that is read is taken for another, and is read as that."""
        prefix = self.prefix(16)
        async with self.opened(blocks=5) as store:
            await self.save(store, prefix)
            with store.lease(prefix) as lease:
                pages = await lease.read(0, 16)
                for number in range(3):
                    await self.save(store, self.prefix(0, then=range(100 * number + 100, 100 * number + 116)))
                if self.has_content:
                    assert bytes(pages.data) == self.content(prefix, range(4)), "a leased block has changed"
                await self.assert_read(lease, prefix, 0, 16)

    @check
    async def test_what_one_put_has_written_is_not_evicted_by_another(self) -> None:
        first, second = self.prefix(16), self.prefix(0, then=range(200, 216))
        async with self.opened(blocks=6) as store:
            with store.put(first) as one, store.put(second) as other:
                assert (one.num_tokens, other.num_tokens) == (16, 8), "room is planned ahead"
                await one.write(self.pages(first, 0, 16))
                await other.write(self.pages(second, 0, 8))
            await self.assert_content(store, first)
            assert store.lookup(second) == 8

    @check
    async def test_room_that_was_not_written_to_is_given_back(self) -> None:
        async with self.opened(blocks=4) as store:
            for number in range(3):
                prefix = self.prefix(0, then=range(100 * number, 100 * number + 16))
                with store.put(prefix) as put:
                    assert put.num_tokens == 16
                    await put.write(self.pages(prefix, 0, 4))
            assert store.view().used_bytes <= 3 * self.block_size

    @check
    async def test_ends_are_evicted_before_beginnings(self) -> None:
        prefix = self.prefix(32)
        async with self.opened(blocks=8) as store:
            await self.save(store, prefix)
            await self.save(store, self.prefix(0, then=range(300, 312)))
            assert store.lookup(prefix) == 20
            with store.lease(prefix) as lease:
                await self.assert_read(lease, prefix, 0, 20)

    @check
    async def test_the_one_used_longest_ago_is_evicted_first(self) -> None:
        first, second = self.prefix(16), self.prefix(0, then=range(200, 216))
        async with self.opened(blocks=8) as store:
            await self.save(store, first)
            await self.save(store, second)
            store.lease(first).release()
            store.lookup(second)  # which is no use
            await self.save(store, self.prefix(0, then=range(300, 316)))
            assert (store.lookup(first), store.lookup(second)) == (16, 0)

    @check
    async def test_what_saves_less_time_is_evicted_first(self) -> None:
        dear, cheap = self.prefix(16), self.prefix(0, then=range(200, 216))
        async with self.opened(blocks=8) as store:
            await self.save(store, dear, prefill_s=10.0)
            await self.save(store, cheap, prefill_s=1.0)
            await self.save(store, self.prefix(0, then=range(300, 316)), prefill_s=5.0)
            assert (store.lookup(dear), store.lookup(cheap)) == (16, 0)

    @check
    async def test_what_was_dear_and_is_not_asked_for_goes_in_the_end(self) -> None:
        dear = self.prefix(16)
        async with self.opened(blocks=8) as store:
            await self.save(store, dear, prefill_s=10.0)
            for number in range(1, 40):
                begin = 100 * number
                await self.save(store, self.prefix(0, then=range(begin, begin + 16)), prefill_s=1.0)
            assert store.lookup(dear) == 0

    @check
    async def test_a_store_that_is_full_of_what_was_dear_takes_other_blocks_in_the_end(self) -> None:
        dear = self.prefix(32)
        async with self.opened(blocks=8) as store:
            await self.save(store, dear, prefill_s=10.0)
            for number in range(1, 40):
                begin = 100 * number
                await self.save(store, self.prefix(0, then=range(begin, begin + 16)), prefill_s=1.0)
            assert store.lookup(dear) == 0

    @check
    async def test_what_copies_would_not_repay_is_not_stored(self) -> None:
        async with self.opened(blocks=8) as store:
            with store.put(self.prefix(16), prefill_s=1.0, copy_s=2.0) as put:
                assert put.num_tokens == 0
            with store.put(self.prefix(16), prefill_s=2.0, copy_s=1.0) as put:
                assert put.num_tokens == 16

    @check
    async def test_a_store_without_room_keeps_nothing(self) -> None:
        async with self.opened(blocks=0) as store:
            await self.save(store, self.prefix(16))
            assert store.lookup(self.prefix(16)) == 0

    # ------------------------------------------------------------------ what outlives fleets

    @check
    async def test_what_outlives_fleets_is_found_when_the_store_is_opened_again(self) -> None:
        prefix = self.computed_by("one")
        async with self.opened(blocks=8) as store:
            self._skip_unless_it_outlives_fleets(store)
            await self.save(store, prefix)
        async with self.opened(blocks=8) as store:
            await self.assert_content(store, prefix)

    @check
    async def test_what_outlives_fleets_is_found_by_engines_that_compute_alike_alone(self) -> None:
        prefixes = [self.computed_by(name) for name in ("one", "")]
        async with self.opened(blocks=16) as store:
            self._skip_unless_it_outlives_fleets(store)
            for prefix in prefixes:
                await self.save(store, prefix)
                assert store.lookup(prefix) == len(prefix.tokens)
        async with self.opened(blocks=16) as store:
            assert store.lookup(self.computed_by("other")) == 0
            assert store.lookup(self.computed_by("")) == 0, "engines that do not tell may differ"

    def computed_by(self, name: str) -> KVPrefix:
        """Return a prefix in the format of engines that compute in the way of this name."""
        return KVPrefix(replace(LAYOUT, computed_by=name), range(18))

    def _skip_unless_it_outlives_fleets(self, store: KVStore) -> None:
        if not store.outlives_fleets:
            pytest.skip("the store does not outlive fleets")

    # ------------------------------------------------------------------ faults

    @check
    async def test_pages_out_of_order_or_without_room_are_refused(self) -> None:
        prefix = self.prefix(16)
        async with self.opened(blocks=2) as store:
            with store.put(prefix) as put:
                for first, num_tokens in ((1, 4), (0, 12), (0, 3)):
                    with pytest.raises(ValueError, match="okens"):
                        await put.write(self.pages(prefix, first, num_tokens))
            assert store.lookup(prefix) == 0

    @check
    async def test_what_is_not_leased_cannot_be_read(self) -> None:
        prefix = self.prefix(16)
        async with self.opened(blocks=4) as store:
            await self.save(store, prefix)
            lease = store.lease(self.prefix(8, then=(901,)))
            with pytest.raises(ValueError, match="leased"):
                await lease.read(1, 8)
            lease.release()
            lease.release()
            with pytest.raises(ValueError, match="leased"):
                await lease.read(0, 4)
            assert store.view().num_leases == 0

    @check
    async def test_a_cancelled_write_keeps_nothing_and_harms_nothing(self) -> None:
        prefix = self.prefix(16)
        async with self.opened(blocks=4) as store:
            with anyio.CancelScope() as scope, store.put(prefix) as put:
                scope.cancel()
                await put.write(self.pages(prefix, 0, 16))
            assert store.lookup(prefix) == 0
            await self.save(store, prefix)
            await self.assert_content(store, prefix)

    @check
    async def test_every_byte_is_right_whatever_saves_and_restores_at_once(self) -> None:
        """Saves and restores by seed, side by side, in a store that is far too small for all of them."""
        async with self.opened(blocks=12) as store, anyio.create_task_group() as tasks:
            for seed in range(4):
                tasks.start_soon(self._save_and_restore, store, Random(seed))

    async def _save_and_restore(self, store: KVStore, random: Random) -> None:
        prefixes = [
            self.prefix(8 * kind, then=range(1000 + 50 * kind, 1026 + 50 * kind)) for kind in range(3)
        ]
        for _ in range(60):
            prefix = random.choice(prefixes)
            prefix = KVPrefix(LAYOUT, prefix.tokens[: random.randrange(1, len(prefix.tokens) + 1)])
            if random.random() < 0.5:
                await self.save(store, prefix)
            else:
                with store.lease(prefix) as lease:
                    await checkpoint()
                    await self.assert_read(lease, prefix, 0, lease.num_tokens)
            view = store.view()
            assert view.capacity_bytes is None or view.used_bytes <= view.capacity_bytes, f"over full: {view}"
