"""Engines and stores with one fault each, and the check that must notice it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import anyio
from anyio.lowlevel import checkpoint

from hotswap import (
    Adapter,
    AdapterId,
    InstanceState,
    ModelId,
    Request,
    RequestId,
    Residency,
    StoreView,
    Token,
)
from hotswap.abc import (
    EngineStatus,
    HostChunk,
    KVPages,
    KVSource,
    Manifest,
    ModelCard,
    Shard,
    StatusListener,
    Stopped,
    TokenStream,
    WeightStore,
)
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.backends.sim.sequence import Sequence as SimSequence
from hotswap.backends.sim.tokens import Streamed
from hotswap.errors import InstanceError
from tests.runtime.edited_moves import EditedMoves

__all__ = ["ENGINES", "STORES"]

ENGINES: dict[type[SimEngine], str] = {}
STORES: dict[type[SimStore], str] = {}

_E = TypeVar("_E", bound=type[SimEngine])
_S = TypeVar("_S", bound=type[SimStore])
SequenceT = TypeVar("SequenceT", bound=SimSequence)


def engine_caught_by(test: str) -> Callable[[_E], _E]:
    def register(mutant: _E) -> _E:
        ENGINES[mutant] = test
        return mutant

    return register


def store_caught_by(test: str) -> Callable[[_S], _S]:
    def register(mutant: _S) -> _S:
        STORES[mutant] = test
        return mutant

    return register


def hog(seconds: float) -> None:
    """Keep the event loop busy in real time."""
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pass


# ---------------------------------------------------------------------- what comes out of a stream


class Edited(TokenStream):
    """Another stream with some tokens changed, dropped or doubled."""

    def __init__(self, tokens: TokenStream, edit: Callable[[Token], Sequence[Token]]) -> None:
        self._tokens = tokens
        self._edit = edit
        self._held: list[Token] = []

    async def __anext__(self) -> Token:
        while not self._held:
            self._held.extend(self._edit(await anext(self._tokens)))
        return self._held.pop(0)


class EditingEngine(SimEngine):
    """Edits the tokens of each stream, and the request before."""

    def edit(self, request: Request, token: Token) -> Sequence[Token]:
        return [token]

    def rewrite(self, request: Request) -> Request:
        return request

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        async with super().stream(self.rewrite(request)) as tokens:
            yield Edited(tokens, lambda token: self.edit(request, token))


@engine_caught_by("test_a_stream_yields_each_token_once_and_ends_with_a_reason")
class DoublesAToken(EditingEngine):
    def edit(self, request: Request, token: Token) -> Sequence[Token]:
        return [token, token] if token.index == 3 else [token]


@engine_caught_by("test_a_stream_yields_each_token_once_and_ends_with_a_reason")
class LosesAToken(EditingEngine):
    def edit(self, request: Request, token: Token) -> Sequence[Token]:
        return [] if token.index == 3 else [token]


@engine_caught_by("test_a_stream_yields_each_token_once_and_ends_with_a_reason")
class EndsWithoutAReason(EditingEngine):
    def edit(self, request: Request, token: Token) -> Sequence[Token]:
        return [replace(token, finish_reason=None)]


@engine_caught_by("test_a_continued_request_gets_the_rest")
class CountsFromZeroAgain(EditingEngine):
    def edit(self, request: Request, token: Token) -> Sequence[Token]:
        return [replace(token, index=token.index - len(request.generated))]


@engine_caught_by("test_a_continued_request_gets_the_rest")
class StartsAgain(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, generated=())


@engine_caught_by("test_max_tokens_ends_a_generation_by_length")
class GeneratesOneTooMany(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(
            request, sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens + 1)
        )


@engine_caught_by("test_a_stop_token_ends_a_generation_at_its_first_place")
class NeverStops(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, sampling=replace(request.sampling, stop_token_ids=()))


@engine_caught_by("test_nothing_stops_before_min_tokens")
class StopsTooSoon(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, sampling=replace(request.sampling, min_tokens=0))


@engine_caught_by("test_the_same_request_gives_the_same_tokens_beside_any_others")
class MixesItsBatch(EditingEngine):
    def edit(self, request: Request, token: Token) -> Sequence[Token]:
        return [replace(token, id=token.id + len(self._batcher.running) // 3)]


@engine_caught_by("test_a_request_for_another_model_is_given_back")
class ServesWhatIsThere(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, model=self.status().model or request.model)


@engine_caught_by("test_a_prompt_that_fills_the_context_is_too_long")
class CutsThePrompt(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, prompt=request.prompt[:8])


@engine_caught_by("test_token_ids_outside_of_the_vocabulary_are_refused_by_the_name_of_their_field")
class LeavesOutUnknownTokens(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        known = tuple(token for token in request.sampling.suppress_tokens if token < self.vocabulary)
        return replace(request, sampling=replace(request.sampling, suppress_tokens=known))


@engine_caught_by("test_a_cancelled_iteration_loses_no_token")
class LosesATokenWhenCancelled(EditingEngine):
    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        async with super().stream(request) as tokens:
            yield Fragile(tokens, lambda token: [token])


class Fragile(Edited):
    """Takes a token, then suspends: a cancellation there loses it."""

    async def __anext__(self) -> Token:
        token = await super().__anext__()
        await checkpoint()
        return token


@engine_caught_by("test_leaving_a_stream_gives_its_blocks_back")
class LosesABlockOnAbort(SimEngine):
    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        async with super().stream(request) as tokens:
            yield tokens
            aborted = bool(len(self._batcher))
        if aborted:
            self._batcher.num_free_blocks -= 1


@engine_caught_by("test_a_stream_cancelled_anywhere_gives_its_blocks_back")
class KeepsWhatWasCancelled(SimEngine):
    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        sequence = self._admit(request, lambda of, model: Streamed.of(of, model, self.vocabulary))
        self._work.set()
        try:
            yield sequence.tokens
        except anyio.get_cancelled_exc_class():
            raise
        else:
            self._batcher.remove(sequence)


@engine_caught_by("test_a_reader_that_is_cancelled_disturbs_no_request")
class EndsAllStreamsTogether(SimEngine):
    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        try:
            async with super().stream(request) as tokens:
                yield tokens
        finally:
            self._batcher.clear(InstanceError("This stream was ended beside another."))


# ---------------------------------------------------------------------- what the view says


@engine_caught_by("test_the_view_is_true_while_requests_come_and_go")
class HidesUsedBlocks(SimEngine):
    def status(self) -> EngineStatus:
        view = super().status()
        return replace(view, num_free_kv_blocks=view.num_kv_blocks)


@engine_caught_by("test_the_view_counts_every_request")
class HidesRequests(SimEngine):
    def status(self) -> EngineStatus:
        return replace(super().status(), num_running=min(1, super().status().num_running))


@engine_caught_by("test_it_is_loading_until_it_serves")
class HidesItsLoading(SimEngine):
    def status(self) -> EngineStatus:
        view = super().status()
        loading = view.state is InstanceState.LOADING
        return replace(view, state=InstanceState.EMPTY if loading else view.state)


@engine_caught_by("test_a_draining_engine_admits_none")
class HidesItsDraining(SimEngine):
    def status(self) -> EngineStatus:
        view = super().status()
        draining = view.state is InstanceState.DRAINING
        return replace(view, state=InstanceState.SERVING if draining else view.state)


# ---------------------------------------------------------------------- loading and unloading


@engine_caught_by("test_a_load_lets_the_event_loop_go_on")
class BlocksTheLoopWhileLoading(SimEngine):
    async def load(self, model: ModelCard, store: WeightStore) -> None:
        await super().load(model, store)
        hog(0.3)


@engine_caught_by("test_a_store_that_fails_leaves_the_engine_empty")
class StaysHalfLoaded(SimEngine):
    async def load(self, model: ModelCard, store: WeightStore) -> None:
        try:
            await super().load(model, store)
        except Exception:
            self._reserved_bytes = model.weight_bytes
            raise


@engine_caught_by("test_a_load_cancelled_anywhere_leaves_the_engine_empty_or_serving")
class StaysLoadingWhenCancelled(SimEngine):
    async def load(self, model: ModelCard, store: WeightStore) -> None:
        try:
            await super().load(model, store)
        except anyio.get_cancelled_exc_class():
            self._state = InstanceState.LOADING
            raise


@engine_caught_by("test_a_loaded_engine_refuses_a_second_load")
class LoadsOverWhatIsLoaded(SimEngine):
    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._state, self._serving = InstanceState.EMPTY, None
        await super().load(model, store)


@engine_caught_by("test_unload_is_idempotent")
class UnloadsOnce(SimEngine):
    async def unload(self) -> None:
        if self.status().state is InstanceState.EMPTY:
            raise InstanceError("It is unloaded already.")
        await super().unload()


@engine_caught_by("test_a_cancelled_unload_still_ends_empty")
class UnloadsByHalves(SimEngine):
    async def unload(self) -> None:
        await checkpoint()
        await super().unload()


@engine_caught_by("test_unload_evicts_what_runs")
class UnloadsInSilence(SimEngine):
    async def unload(self) -> None:
        for sequence in list(self._batcher):
            self._batcher.remove(sequence)
            sequence.close()
        await super().unload()


# ---------------------------------------------------------------------- evicting, losing, preloading


@engine_caught_by("test_what_ends_before_the_deadline_is_not_evicted")
class EvictsTooEarly(SimEngine):
    async def evict(self, *, deadline_s: float) -> int:
        return await super().evict(deadline_s=0)


@engine_caught_by("test_what_still_runs_at_the_deadline_is_evicted_then")
class EvictsTooLate(SimEngine):
    async def evict(self, *, deadline_s: float) -> int:
        return await super().evict(deadline_s=deadline_s + 1.0)


@engine_caught_by("test_eviction_at_once_ends_every_stream_after_its_tokens")
class MiscountsTheEvicted(SimEngine):
    async def evict(self, *, deadline_s: float) -> int:
        return await super().evict(deadline_s=deadline_s) - 1


@engine_caught_by("test_unread_tokens_survive_an_eviction")
class ForgetsUnreadTokens(SimEngine):
    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        async with super().stream(request) as tokens:
            yield Edited(tokens, lambda token: [token] if self.status().model else [])


@engine_caught_by("test_a_draining_engine_admits_none")
class AdmitsWhileDraining(SimEngine):
    def _admit(self, request: Request, make: Callable[[Request, ModelCard], SequenceT]) -> SequenceT:
        state = self._state
        if state is InstanceState.DRAINING:
            self._state = InstanceState.SERVING
        try:
            return super()._admit(request, make)
        finally:
            self._state = state


@engine_caught_by("test_an_eviction_called_off_loses_nothing")
class EvictsWhenCalledOff(SimEngine):
    async def evict(self, *, deadline_s: float) -> int:
        try:
            return await super().evict(deadline_s=deadline_s)
        except anyio.get_cancelled_exc_class():
            self._evict_all("It was called off")
            raise


@engine_caught_by("test_an_eviction_called_off_loses_nothing")
class DrainsForEver(SimEngine):
    async def evict(self, *, deadline_s: float) -> int:
        try:
            return await super().evict(deadline_s=deadline_s)
        except anyio.get_cancelled_exc_class():
            self._state = InstanceState.DRAINING
            raise


@engine_caught_by("test_a_lost_engine_ends_its_streams_after_their_tokens")
class LosesItsStreams(SimEngine):
    def lose(self, reason: str = "it was planted", *, for_good: bool = False) -> None:
        held = list(self._batcher)
        for sequence in held:
            self._batcher.remove(sequence)  # without telling their readers
        super().lose(reason, for_good=for_good)


@engine_caught_by("test_a_staging_that_fails_leaves_nothing_staged")
class StaysHalfStaged(SimEngine):
    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        try:
            await super().preload(model, store)
        except Exception:
            self._reserved_bytes = model.weight_bytes
            raise


# ---------------------------------------------------------------------- telling of changes


class EditingListener:
    """Passes on what an engine tells; a mutant overrides some of it."""

    def __init__(self, listener: StatusListener) -> None:
        self.listener = listener

    def load_changed(self) -> None:
        self.listener.load_changed()

    def state_changed(self) -> None:
        self.listener.state_changed()


@engine_caught_by("test_a_listener_is_told_of_every_change_while_requests_run")
class KeepsItsLoadToItself(SimEngine):
    def watch(self, listener: StatusListener) -> bool:
        class Edited(EditingListener):
            def load_changed(self) -> None:
                pass

        return super().watch(Edited(listener))


@engine_caught_by("test_a_listener_is_told_of_every_change_while_models_come_and_go")
class KeepsItsStateToItself(SimEngine):
    def watch(self, listener: StatusListener) -> bool:
        class Edited(EditingListener):
            def state_changed(self) -> None:
                pass

        return super().watch(Edited(listener))


@engine_caught_by("test_a_listener_is_told_of_every_change_while_requests_are_evicted")
class TellsOfItsStateAsOfItsLoad(SimEngine):
    def watch(self, listener: StatusListener) -> bool:
        class Edited(EditingListener):
            def state_changed(self) -> None:
                self.load_changed()

        return super().watch(Edited(listener))


@engine_caught_by("test_a_listener_is_told_of_requests_that_are_cancelled")
class TellsOfItsLoadInTheNextTurn(SimEngine):
    def watch(self, listener: StatusListener) -> bool:
        class Edited(EditingListener):
            def load_changed(self) -> None:
                asyncio.get_running_loop().call_soon(self.listener.load_changed)

        return super().watch(Edited(listener))


@engine_caught_by("test_a_listener_is_told_of_requests_that_are_cancelled")
class TellsFromAnotherThread(SimEngine):
    def watch(self, listener: StatusListener) -> bool:
        class Edited(EditingListener):
            def load_changed(self) -> None:
                thread = threading.Thread(target=self.listener.load_changed)
                thread.start()
                thread.join()

        return super().watch(Edited(listener))


@engine_caught_by("test_a_second_listener_takes_the_place_of_the_first")
class TellsItsFirstListenerOnly(SimEngine):
    is_watched = False

    def watch(self, listener: StatusListener) -> bool:
        if not self.is_watched:
            super().watch(listener)
        self.is_watched = True
        return True


@engine_caught_by("test_a_listener_is_told_of_a_loss_and_of_what_follows")
class IsLostInSilence(SimEngine):
    def lose(self, reason: str = "it was planted", *, for_good: bool = False) -> None:
        told, self._notifier = self._notifier, StatusNotifier()
        super().lose(reason, for_good=for_good)
        self._notifier = told


@engine_caught_by("test_a_listener_is_told_of_every_change_while_a_model_is_staged")
class StagesInSilence(SimEngine):
    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        told, self._notifier = self._notifier, StatusNotifier()
        try:
            await super().preload(model, store)
        finally:
            self._notifier = told


@engine_caught_by("test_a_listener_is_told_of_every_change_while_adapters_come_and_go")
class DropsAdaptersInSilence(SimEngine):
    async def drop_adapter(self, adapter: AdapterId) -> None:
        told, self._notifier = self._notifier, StatusNotifier()
        try:
            await super().drop_adapter(adapter)
        finally:
            self._notifier = told


@engine_caught_by("test_listeners_of_both_engines_are_told_of_every_change_while_a_request_moves")
class ReservesInSilence(EditedMoves):
    def edit_sink(self, sink: Any) -> None:
        reserve = sink.reserve

        async def in_silence(num_tokens: int) -> None:
            told, self._batcher.on_change = self._batcher.on_change, lambda: None
            await reserve(num_tokens)
            self._batcher.on_change = told

        sink.reserve = in_silence


# ---------------------------------------------------------------------- adapters


@engine_caught_by("test_requests_of_one_batch_each_run_with_their_own_adapter")
class IgnoresAdapters(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, adapter=None)


@engine_caught_by("test_requests_of_one_batch_each_run_with_their_own_adapter")
class HasOneAdapterForAll(EditingEngine):
    def rewrite(self, request: Request) -> Request:
        return replace(request, adapter=next(iter(self._adapters), None))


@engine_caught_by("test_an_adapter_in_use_is_not_dropped")
class DropsAnAdapterInUse(SimEngine):
    async def drop_adapter(self, adapter: AdapterId) -> None:
        await checkpoint()
        self._adapters.pop(adapter, None)


@engine_caught_by("test_an_unload_forgets_every_adapter")
class KeepsAdaptersAcrossLoads(SimEngine):
    async def unload(self) -> None:
        kept = dict(self._adapters)
        await super().unload()
        self._adapters.update(kept)


@engine_caught_by("test_what_does_not_fit_is_refused_and_disturbs_no_request")
class MakesRoomByItself(SimEngine):
    async def load_adapter(self, adapter: Adapter) -> None:
        if len(self._adapters) >= self.max_adapters:
            self._adapters.popitem()
        await super().load_adapter(adapter)


@engine_caught_by("test_an_adapter_needs_its_model")
class TakesAdaptersOfOtherModels(SimEngine):
    async def load_adapter(self, adapter: Adapter) -> None:
        await super().load_adapter(replace(adapter, model=self.status().model or adapter.model))


@engine_caught_by("test_loading_an_adapter_lets_the_event_loop_go_on")
class BlocksTheLoopWhileLoadingAnAdapter(SimEngine):
    async def load_adapter(self, adapter: Adapter) -> None:
        hog(0.3)
        await super().load_adapter(adapter)


# ---------------------------------------------------------------------- moves


@engine_caught_by("test_a_request_that_was_not_released_goes_on_where_it_was")
class ForgetsToResume(EditedMoves):
    def edit_source(self, source: Any) -> None:
        source.resume = lambda: None


@engine_caught_by("test_a_stop_that_is_cancelled_leaves_no_request_stopped")
class StopsForAMoveThatHasGone(SimEngine):
    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        async with super().export_kv(request) as source:
            yield source
        source._ended = False  # type: ignore[attr-defined]


@engine_caught_by("test_blocks_that_were_not_committed_are_given_back")
class KeepsReservedBlocks(EditedMoves):
    def edit_sink(self, sink: Any) -> None:
        sink.close = lambda: None


@engine_caught_by("test_a_request_leaves_with_its_blocks_and_goes_on_elsewhere")
class TellsOldTokensWhenStopped(EditedMoves):
    def edit_source(self, source: Any) -> None:
        stop = source.stop

        async def early() -> Stopped:
            stopped = await stop()
            return Stopped(stopped.tokens[:-1], stopped.num_computed - 1)

        source.stop = early


@engine_caught_by("test_a_stopped_request_is_read_in_any_pieces_and_again")
class HasOneReadForAStoppedRequest(EditedMoves):
    def edit_source(self, source: Any) -> None:
        read, last = source.read, list[KVPages]()

        async def once(first_block: int, num_tokens: int) -> KVPages:
            if not (source._stopped and last):
                last[:] = [await read(first_block, num_tokens)]
            return last[0]

        source.read = once


@engine_caught_by("test_an_arrived_request_finds_what_was_copied")
class ForgetsWhatArrived(SimEngine):
    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        self._migration.arrivals.clear()
        async with super().stream(request) as tokens:
            yield tokens


@engine_caught_by("test_more_blocks_than_there_are_cannot_be_reserved")
class ReservesWhatIsNotThere(EditedMoves):
    def edit_sink(self, sink: Any) -> None:
        async def reserve(num_tokens: int) -> None:
            await checkpoint()

        sink.reserve = reserve


# ---------------------------------------------------------------------- stores


class EditingStore(SimStore):
    """Edits the chunks of each read."""

    def edit(self, chunk: HostChunk, number: int) -> HostChunk | None:
        return chunk

    async def _lend(self, shard: Shard) -> AsyncGenerator[HostChunk]:
        number = 0
        async with contextlib.aclosing(super()._lend(shard)) as chunks:
            async for chunk in chunks:
                edited = self.edit(chunk, number)
                number += 1
                if edited is not None:
                    yield edited


@store_caught_by("test_chunks_ascend_without_gaps_and_stay_the_same")
class LeavesAGap(EditingStore):
    def edit(self, chunk: HostChunk, number: int) -> HostChunk | None:
        return None if number == 1 else chunk


@store_caught_by("test_chunks_ascend_without_gaps_and_stay_the_same")
class EndsEarly(EditingStore):
    def edit(self, chunk: HostChunk, number: int) -> HostChunk:
        return HostChunk(offset_bytes=chunk.offset_bytes, data=chunk.data[:-1], tier=chunk.tier)


@store_caught_by("test_chunks_ascend_without_gaps_and_stay_the_same")
class ChangesItsBytes(EditingStore):
    num_reads = 0

    def edit(self, chunk: HostChunk, number: int) -> HostChunk:
        self.num_reads += 1
        data = bytearray(chunk.data)
        data[0] = self.num_reads % 256
        return HostChunk(offset_bytes=chunk.offset_bytes, data=memoryview(data), tier=chunk.tier)


@store_caught_by("test_a_chunk_holds_still_until_the_next_is_asked_for")
class LendsOneBufferToAll(EditingStore):
    shared = bytearray(1 << 20)

    def edit(self, chunk: HostChunk, number: int) -> HostChunk:
        data = memoryview(self.shared)[: len(chunk.data)]
        data[:] = chunk.data
        return HostChunk(offset_bytes=chunk.offset_bytes, data=data, tier=chunk.tier)


@store_caught_by("test_models_differ")
class HoldsOneModelOnly(EditingStore):
    def edit(self, chunk: HostChunk, number: int) -> HostChunk:
        zeros = memoryview(bytes(len(chunk.data)))
        return HostChunk(offset_bytes=chunk.offset_bytes, data=zeros, tier=chunk.tier)


@store_caught_by("test_a_chunk_is_flat_bytes_from_a_tier_of_the_view")
class NamesAnotherTier(EditingStore):
    def edit(self, chunk: HostChunk, number: int) -> HostChunk:
        return replace(chunk, tier="elsewhere")


@store_caught_by("test_leaving_early_gives_everything_back")
class KeepsWhatItLent(SimStore):
    async def _lend(self, shard: Shard) -> AsyncGenerator[HostChunk]:
        async with contextlib.aclosing(super()._lend(shard)) as chunks:
            async for chunk in chunks:
                self._num_lent += 1
                yield chunk
                self._num_lent -= 1  # not reached when the reader leaves early


@store_caught_by("test_an_unknown_model_is_missing")
class KnowsEveryModel(SimStore):
    async def manifest(self, model: ModelId) -> Manifest:
        return replace(next(iter(self._manifests.values())), model=model)


@store_caught_by("test_an_unknown_shard_is_missing")
class OpensAnything(SimStore):
    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with contextlib.aclosing(self._lend(shard)) as chunks:
            yield chunks


@store_caught_by("test_reading_lets_the_event_loop_go_on")
class BlocksTheLoopWhileReading(SimStore):
    async def _lend(self, shard: Shard) -> AsyncGenerator[HostChunk]:
        hog(0.3)
        async with contextlib.aclosing(super()._lend(shard)) as chunks:
            async for chunk in chunks:
                yield chunk


@store_caught_by("test_the_view_says_where_every_model_lies")
class HidesAModel(SimStore):
    def view(self) -> StoreView:
        view = super().view()
        return replace(view, residency=view.residency[:-1])


@store_caught_by("test_a_dropped_model_lies_on_another_tier")
class NeverDrops(SimStore):
    async def drop(self, model: ModelId) -> None:
        await checkpoint()


@store_caught_by("test_a_prefetched_model_lies_on_the_fastest_tier")
class ClaimsToHavePrefetched(SimStore):
    async def prefetch(self, model: ModelId) -> None:
        await self.manifest(model)


@store_caught_by("test_a_cancelled_prefetch_leaves_the_tier_as_it_was")
class PrefetchesByHalves(SimStore):
    async def prefetch(self, model: ModelId) -> None:
        try:
            await super().prefetch(model)
        except anyio.get_cancelled_exc_class():
            self._keep(model, {self._manifests[model].shards[0]})
            raise


@store_caught_by("test_a_drop_waits_for_what_is_lent")
class DropsWhatIsLent(SimStore):
    async def drop(self, model: ModelId) -> None:
        await checkpoint()
        self._cached.pop(model, None)


@store_caught_by("test_the_view_says_where_every_model_lies")
class ForgetsSizes(SimStore):
    def view(self) -> StoreView:
        view = super().view()
        empty = tuple(Residency(model=entry.model, tier=entry.tier) for entry in view.residency)
        return replace(view, residency=empty)
