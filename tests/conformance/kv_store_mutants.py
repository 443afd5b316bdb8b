"""KV stores with one fault each, and the check that must notice it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from hotswap.abc import KVLayout, KVLease, KVPages, KVPrefix, KVPut
from hotswap.backends.kv_index import Found, KVIndex, StoredBlock
from hotswap.backends.kv_stores import HostKVStore, SharedKVStore
from hotswap.backends.kv_stores.pages import PAGE_BYTES, Pages

__all__ = ["KV_STORES"]

KV_STORES: dict[type[HostKVStore | SharedKVStore], str] = {}

_K = TypeVar("_K", bound=type[HostKVStore | SharedKVStore])
Block = StoredBlock[Pages]


def caught_by(test: str) -> Callable[[_K], _K]:
    def register(mutant: _K) -> _K:
        KV_STORES[mutant] = test
        return mutant

    return register


class Indexed(HostKVStore):
    """Keeps its blocks in an index of another kind."""

    index: type[KVIndex[Pages]]

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with super().__asynccontextmanager__():
            self._index = self.index(self._capacity_bytes)
            yield self


# ---------------------------------------------------------------------- leases and eviction


class WithoutLeases(KVIndex[Pages]):
    def lease(self, block: Block) -> None:
        return

    def release(self, block: Block) -> None:
        return


@caught_by("test_a_leased_block_stays_as_it_is_while_others_are_saved")
class LeasesNothing(Indexed):
    index = WithoutLeases


@caught_by("test_what_one_put_has_written_is_not_evicted_by_another")
class ProtectsNoPut(Indexed):
    index = WithoutLeases

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        put = super().put(prefix, prefill_s=prefill_s, copy_s=copy_s)
        for block in self._index.find(prefix).blocks:
            block.num_leases = 0
        if put.num_tokens < len(prefix.tokens):  # it takes the room of another
            put.num_tokens = len(prefix.tokens)
        return put


class BeginningsFirst(KVIndex[Pages]):
    def _may_go(self, block: Block) -> bool:
        return not block.num_leases and block.key in self._blocks

    def remove(self, block: Block) -> None:
        for child in list(self._children.get(block.key, {}).values()):
            self.remove(child)
        super().remove(block)


@caught_by("test_ends_are_evicted_before_beginnings")
class EvictsBeginnings(Indexed):
    index = BeginningsFirst


class ByNoUse(KVIndex[Pages]):
    def use(self, blocks: Iterable[Block], worth: float = 0.0) -> None:
        return


@caught_by("test_the_one_used_longest_ago_is_evicted_first")
class ForgetsUse(Indexed):
    index = ByNoUse


class WorthIsNothing(KVIndex[Pages]):
    def reserve(self, size_bytes: int, worth: float) -> list[Block] | None:
        for block in self._blocks.values():
            block.worth, block.rank = 0.0, (0.0, block.rank[1])
            self._offer(block)
        return super().reserve(size_bytes, 0.0)


@caught_by("test_what_saves_less_time_is_evicted_first")
class IgnoresWorth(Indexed):
    index = WorthIsNothing


class NeverAges(KVIndex[Pages]):
    def reserve(self, size_bytes: int, worth: float) -> list[Block] | None:
        self._floor = 0.0
        return super().reserve(size_bytes, worth)


@caught_by("test_what_was_dear_and_is_not_asked_for_goes_in_the_end")
class KeepsTheDearForEver(Indexed):
    index = NeverAges


class AgesByEvictionsAlone(KVIndex[Pages]):
    def refuse(self, size_bytes: int, worth: float) -> None:
        return


@caught_by("test_a_store_that_is_full_of_what_was_dear_takes_other_blocks_in_the_end")
class NeverTakesWhatIsWorthLess(Indexed):
    index = AgesByEvictionsAlone


@caught_by("test_what_copies_would_not_repay_is_not_stored")
class StoresAtAnyCost(HostKVStore):
    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        return super().put(prefix, prefill_s=prefill_s)


# ---------------------------------------------------------------------- recurrent states


class FindsBlocksAlone(KVIndex[Pages]):
    def find_with_states(self, prefix: KVPrefix) -> Found[Pages]:
        return self.find(prefix)


@caught_by("test_recurrent_states_come_back_after_the_last_block")
class ReadsNoStates(Indexed):
    index = FindsBlocksAlone


@caught_by("test_blocks_without_their_states_are_not_found")
class FindsBlocksWithoutStates(Indexed):
    index = FindsBlocksAlone


@caught_by("test_states_are_found_at_their_own_length")
class TakesStatesOfALongerText(Indexed):
    index = FindsBlocksAlone


@caught_by("test_states_that_were_evicted_are_not_missed_in_what_is_found")
class MissesStatesThatWereEvicted(Indexed):
    index = FindsBlocksAlone


@caught_by("test_what_has_states_keeps_nothing_if_there_is_no_room_for_all_of_it")
class CountsBlocksAlone(HostKVStore):
    def size_of(self, block_bytes: int) -> int:
        return 0 if block_bytes < PAGE_BYTES else super().size_of(block_bytes)


# ---------------------------------------------------------------------- keys


def changed(prefix: KVPrefix, layout: KVLayout, salt: str = "") -> KVPrefix:
    return KVPrefix(layout, prefix.tokens, salt=salt)


class Renaming(HostKVStore):
    """Names blocks otherwise than they are asked for."""

    def named(self, prefix: KVPrefix) -> KVPrefix:
        return prefix

    def lookup(self, prefix: KVPrefix) -> int:
        return super().lookup(self.named(prefix))

    def lease(self, prefix: KVPrefix) -> KVLease:
        return super().lease(self.named(prefix))

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        return super().put(self.named(prefix), prefill_s=prefill_s, copy_s=copy_s)


FOUND_BY_ALL = "test_blocks_are_found_by_all_that_they_depend_on_and_by_nothing_else"


@caught_by(FOUND_BY_ALL)
class IgnoresWeights(Renaming):
    def named(self, prefix: KVPrefix) -> KVPrefix:
        layout = prefix.layout
        return changed(
            prefix,
            KVLayout(
                model=layout.model,
                weights="",
                adapter=layout.adapter,
                block_tokens=layout.block_tokens,
                layers=layout.layers,
                block_bytes=layout.block_bytes,
            ),
        )


@caught_by(FOUND_BY_ALL)
class NamesByTheModel(Renaming):
    def named(self, prefix: KVPrefix) -> KVPrefix:
        return changed(prefix, prefix.layout, salt=str(prefix.layout.model))


@caught_by(FOUND_BY_ALL)
class MixesFleets(Renaming):
    def named(self, prefix: KVPrefix) -> KVPrefix:
        return changed(prefix, prefix.layout)


class FullBlocksAlone(KVIndex[Pages]):
    def find(self, prefix: KVPrefix) -> Found[Pages]:
        found, block_tokens = super().find(prefix), prefix.layout.block_tokens
        num_full = found.num_tokens // block_tokens
        return Found(found.blocks[:num_full], num_full * block_tokens)


@caught_by("test_as_many_first_tokens_are_found_as_are_alike")
class FindsFullBlocksAlone(Indexed):
    index = FullBlocksAlone


# ---------------------------------------------------------------------- content


@caught_by("test_what_was_put_is_found_and_read_back")
class MixesBlocksUp(HostKVStore):
    async def content(self, places: Sequence[Pages], block_bytes: int) -> memoryview:
        return await super().content(places[::-1], block_bytes)


@caught_by("test_every_byte_is_right_whatever_saves_and_restores_at_once")
class HandsPagesOutTwice(HostKVStore):
    def allocate(self, block_bytes: int) -> Pages:
        fresh = super().allocate(block_bytes)
        return fresh % 4 if self._index.num_evicted % 7 == 3 else fresh


@caught_by("test_room_that_was_not_written_to_is_given_back")
class KeepsReservedRoom(HostKVStore):
    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        put = super().put(prefix, prefill_s=prefill_s, copy_s=copy_s)
        self._index.used_bytes += prefix.layout.block_bytes
        return put


@caught_by("test_a_beginning_is_stored_once")
class StoresEachRequestForItself(Renaming):
    num_puts = 0

    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> KVPut:
        self.num_puts += 1
        own = changed(prefix, prefix.layout, salt=str(self.num_puts))
        return super().put(own, prefill_s=prefill_s, copy_s=copy_s)


class KeepsAll(KVIndex[Pages]):
    def _is_covered(self, block: Block, by: Block) -> bool:
        return False


@caught_by("test_a_partly_full_block_makes_way_for_the_one_that_has_more")
class KeepsEveryPart(Indexed):
    index = KeepsAll


class Late:
    """A put that keeps what it is given until its end."""

    def __init__(self, put: KVPut) -> None:
        self._put, self._pages = put, list[KVPages]()
        self.first_block, self.num_tokens = put.first_block, put.num_tokens

    async def write(self, pages: KVPages) -> None:
        self._pages.append(pages)

    def __enter__(self) -> Late:
        return self

    def __exit__(self, *_: object) -> None:
        self._put.release()


@caught_by("test_what_is_written_can_be_found_at_once_and_not_before")
class WritesLate(HostKVStore):
    def put(self, prefix: KVPrefix, *, prefill_s: float = 0.0, copy_s: float = 0.0) -> Any:
        return Late(super().put(prefix, prefill_s=prefill_s, copy_s=copy_s))


# ---------------------------------------------------------------------- what outlives fleets


@caught_by("test_what_outlives_fleets_is_found_when_the_store_is_opened_again")
class FindsItsOwnAlone(SharedKVStore):
    def _named(self, prefix: KVPrefix) -> KVPrefix:
        return prefix.under(self._own)


BY_ENGINES_ALIKE = "test_what_outlives_fleets_is_found_by_engines_that_compute_alike_alone"


@caught_by(BY_ENGINES_ALIKE)
class FindsWhateverComputedIt(SharedKVStore):
    def _named(self, prefix: KVPrefix) -> KVPrefix:
        return prefix.under("any" if prefix.layout.computed_by else self._own)


@caught_by(BY_ENGINES_ALIKE)
class FindsWhatEnginesDoNotTell(SharedKVStore):
    def _named(self, prefix: KVPrefix) -> KVPrefix:
        return prefix.under(prefix.layout.computed_by)
