"""Checks of migration: requests move to another engine with their KV blocks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

import anyio
import pytest

from hotswap.engine import Engine
from hotswap.errors import InstanceLost, MigrationAborted, RequestEvicted
from hotswap.migration import KVPages, KVSink, KVSource, SupportsKVListing, SupportsMigration
from hotswap.request import Request, RequestId
from hotswap.testing.conformance.engine_status import all_told
from hotswap.testing.conformance.engine_suite import EngineSetup, EngineSuite, Reader, collect, no_requests
from hotswap.testing.conformance.suite import check, until

__all__ = ["MigrationChecks"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines that serve the first model."""

    setup: EngineSetup
    source: Engine
    destination: Engine

    def export(self, request: RequestId) -> AbstractAsyncContextManager[KVSource]:
        """Open the sending end of a move."""
        assert isinstance(self.source, SupportsMigration)
        return self.source.export_kv(request)

    def take(self, request: Request) -> AbstractAsyncContextManager[KVSink]:
        """Open the receiving end of a move."""
        assert isinstance(self.destination, SupportsMigration)
        return self.destination.import_kv(request)

    def back(self, request: Request) -> AbstractAsyncContextManager[KVSink]:
        """Open a receiving end on the source engine."""
        assert isinstance(self.source, SupportsMigration)
        return self.source.import_kv(request)


class MigrationChecks(EngineSuite):
    """Checks of `SupportsMigration`."""

    @check
    async def test_a_request_leaves_with_its_blocks_and_goes_on_elsewhere(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with (
                self.streaming(pair.source, [request]) as (reader,),
                pair.export(request.id) as source,
                pair.take(request) as sink,
            ):
                assert source.layout == sink.layout
                num_copied = await self.copy_full_blocks(source, sink)
                stopped = await source.stop()
                await sink.reserve(stopped.num_computed)
                first = num_copied // source.layout.block_tokens
                await sink.write(await source.read(first, stopped.num_computed - num_copied))
                await sink.commit(stopped.tokens)
                await source.release()
                await reader.ended.wait()
                assert isinstance(reader.error, RequestEvicted), "its stream was to end here"
                assert [*request.prompt, *reader.ids] == list(stopped.tokens), "tokens were lost or added"
                rest = await self.rest_of(pair.destination, request, reader)
            assert reader.ids + rest == await self.expected(request, pair.setup.card)

    @check
    async def test_an_arrived_request_finds_what_was_copied(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with (
                self.streaming(pair.source, [request]) as (reader,),
                pair.export(request.id) as source,
                pair.take(request) as sink,
            ):
                stopped = await source.stop()
                await sink.reserve(stopped.num_computed)
                await sink.write(await source.read(0, stopped.num_computed))
                await sink.commit(stopped.tokens)
                await source.release()
                await reader.ended.wait()
                async with pair.destination.stream(request.continued(reader.ids)) as tokens:
                    await anext(tokens)
                    assert tokens.num_reused_tokens == stopped.num_computed

    @check
    async def test_a_stopped_request_is_read_in_any_pieces_and_again(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with (
                self.streaming(pair.source, [request]) as (reader,),
                pair.export(request.id) as source,
                pair.take(request) as sink,
            ):
                stopped = await source.stop()
                await sink.reserve(stopped.num_computed)
                await self.copy_block_by_block(source, sink, stopped.num_computed)
                await sink.commit(stopped.tokens)
                await source.release()
                await reader.ended.wait()
                rest = await self.rest_of(pair.destination, request, reader)
            assert reader.ids + rest == await self.expected(request, pair.setup.card)

    @check
    async def test_a_request_that_was_not_released_goes_on_where_it_was(self) -> None:
        async with self.pair() as pair:
            requests = self.long_requests(pair.setup.card)
            async with (
                self.streaming(pair.source, requests) as readers,
                pair.export(requests[0].id) as source,
            ):
                await self.read_full_blocks(source)
                await source.stop()
            for reader in readers:
                await self.assert_whole(reader, pair.setup.card)

    @check
    async def test_a_stop_that_is_cancelled_leaves_no_request_stopped(self) -> None:
        async with self.pair() as pair:
            requests = self.long_requests(pair.setup.card)
            async with self.streaming(pair.source, requests) as readers:
                for request in requests:
                    async with pair.export(request.id) as source:
                        with anyio.CancelScope() as scope:
                            scope.cancel()
                            await source.stop()
            for reader in readers:
                await self.assert_whole(reader, pair.setup.card)

    @check
    async def test_blocks_that_were_not_committed_are_given_back(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with self.streaming(pair.source, [request]) as (reader,):
                view = pair.destination.status()
                most = (view.num_free_kv_blocks // 2 + 2) * view.kv_block_tokens
                for _ in range(3):  # all of them would not fit side by side
                    async with pair.export(request.id) as source, pair.take(request) as sink:
                        await self.copy_full_blocks(source, sink)
                        await sink.reserve(most)
                await until(lambda: no_requests(pair.destination))
            await self.assert_whole(reader, pair.setup.card)

    @check
    async def test_others_go_on_undisturbed_while_one_moves(self) -> None:
        async with self.pair() as pair:
            requests = self.long_requests(pair.setup.card)
            other = self.request(pair.setup.card, salt=9, max_tokens=self.long_tokens)
            async with (
                self.streaming(pair.destination, [other]) as (there,),
                self.streaming(pair.source, requests) as readers,
                pair.export(requests[1].id) as source,
                pair.take(requests[1]) as sink,
            ):
                await self.copy_full_blocks(source, sink)
            for reader in (*readers, there):
                await self.assert_whole(reader, pair.setup.card)

    @check
    async def test_what_an_eviction_takes_away_cannot_be_copied(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with self.streaming(pair.source, [request]), pair.export(request.id) as source:
                await pair.source.evict(deadline_s=0)
                with pytest.raises(MigrationAborted):
                    await source.stop()

    @check
    async def test_a_stopped_request_that_was_taken_away_cannot_be_copied(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with self.streaming(pair.source, [request]), pair.export(request.id) as source:
                stopped = await source.stop()
                await pair.source.evict(deadline_s=0)
                await until(lambda: no_requests(pair.source))
                with pytest.raises(MigrationAborted):
                    await source.read(0, stopped.num_computed)

    @check
    async def test_a_request_that_has_gone_cannot_be_released(self) -> None:
        async with self.pair() as pair:
            request = self.long_requests(pair.setup.card, 1)[0]
            async with AsyncExitStack() as move:
                async with pair.source.stream(request) as tokens:
                    await anext(tokens)
                    source = await move.enter_async_context(pair.export(request.id))
                    await source.stop()
                with pytest.raises(MigrationAborted):
                    await source.release()

    @check
    async def test_every_verb_of_a_move_ends_when_its_engine_is_lost(self) -> None:
        if not self.can_lose:
            pytest.skip("write lose(engine) and set can_lose")
        async with self.pair() as pair, AsyncExitStack() as moves:
            requests = self.long_requests(pair.setup.card, 2)
            async with self.streaming(pair.source, requests):
                source = await moves.enter_async_context(pair.export(requests[0].id))
                sink = await moves.enter_async_context(pair.back(requests[1]))
                self.lose(pair.source)
                await self.assert_all_raise(InstanceLost, source, sink)
            with suppress(InstanceLost):  # some engines do not come back
                await pair.source.unload()
            await self.assert_all_raise((MigrationAborted, InstanceLost), source, sink)

    @check
    async def test_what_an_ended_request_left_is_listed_and_serves_another_engine(self) -> None:
        async with self.pair() as pair:
            if not (isinstance(pair.source, SupportsKVListing) and self.keeps_prefixes):
                pytest.skip("the engine does not list what it keeps of ended requests")
            (first,) = self.long_requests(pair.setup.card, 1)
            ended = [*first.prompt, *(token.id for token in await collect(pair.source, first))]
            cached = await pair.source.cached_kv()
            (entry,) = [one for one in cached if list(one.tokens) == ended[: len(one.tokens)]]
            assert len(entry.tokens) >= len(ended) // 2, "most of it was to be kept"
            again = first.continued(ended[len(first.prompt) : -1])
            async with pair.take(again) as sink:
                assert sink.layout == entry.layout
                await sink.reserve(len(entry.tokens))
                await sink.write(await entry.read(0, len(entry.tokens)))
                await sink.commit(again.tokens)
                async with pair.destination.stream(again) as tokens:
                    token = await anext(tokens)
                assert tokens.num_reused_tokens >= len(entry.tokens) - entry.layout.block_tokens
            assert token.id == ended[-1]
            await pair.source.unload()
            await pair.source.load(pair.setup.card, pair.setup.store)
            with pytest.raises(MigrationAborted):
                await entry.read(0, len(entry.tokens))
            assert await pair.source.cached_kv() == []

    @check
    async def test_no_blocks_at_all_may_be_written(self) -> None:
        async with self.pair() as pair, pair.take(self.request(pair.setup.card)) as sink:
            await sink.write(KVPages(0, 0, memoryview(bytearray())))

    @check
    async def test_an_unknown_request_cannot_leave(self) -> None:
        async with self.pair() as pair:
            with pytest.raises(MigrationAborted):
                async with pair.export(RequestId("unknown")):
                    pass

    @check
    async def test_a_request_for_another_model_cannot_arrive(self) -> None:
        async with self.pair() as pair:
            with pytest.raises(MigrationAborted):
                async with pair.take(self.request(pair.setup.cards[1])):
                    pass

    @check
    async def test_more_blocks_than_there_are_cannot_be_reserved(self) -> None:
        async with self.pair() as pair:
            view = pair.destination.status()
            async with pair.take(self.request(pair.setup.card)) as sink:
                with pytest.raises(MigrationAborted):
                    await sink.reserve((view.num_kv_blocks + 1) * view.kv_block_tokens)
                assert pair.destination.status().num_free_kv_blocks == view.num_kv_blocks

    @check
    async def test_listeners_of_both_engines_are_told_of_every_change_while_a_request_moves(self) -> None:
        async with self.pair() as pair:
            requests = self.long_requests(pair.setup.card, 2)
            with all_told(pair.source, pair.destination):
                async with self.streaming(pair.source, requests) as (reader, _):
                    async with pair.export(requests[1].id) as source, pair.take(requests[1]) as sink:
                        await self.copy_full_blocks(source, sink)  # and no more
                    async with pair.export(requests[0].id) as source, pair.take(requests[0]) as sink:
                        stopped = await source.stop()
                        await sink.reserve(stopped.num_computed)
                        await sink.write(await source.read(0, stopped.num_computed))
                        await sink.commit(stopped.tokens)
                        await source.release()
                        await reader.ended.wait()
                        await self.rest_of(pair.destination, requests[0], reader)
                await until(lambda: no_requests(pair.source) and no_requests(pair.destination))

    # ------------------------------------------------------------------ helpers

    @asynccontextmanager
    async def pair(self) -> AsyncGenerator[Pair]:
        """Two engines that serve the first model; skips engines without support for migration."""
        async with self.serving() as setup, self.make_engine() as other:
            if not isinstance(setup.engine, SupportsMigration):
                pytest.skip("the engine does not support migration")
            await other.load(setup.card, setup.store)
            yield Pair(setup, setup.engine, other)
            await until(lambda: no_requests(other))
            self.assert_released(other)

    async def assert_all_raise(
        self, error: type[Exception] | tuple[type[Exception], ...], source: KVSource, sink: KVSink
    ) -> None:
        """Raise unless every verb of both ends raises an error."""
        pages = KVPages(0, 0, memoryview(bytearray()))
        for verb in (
            source.num_tokens,
            partial(source.read, 0, 1),
            source.stop,
            source.release,
            partial(sink.reserve, 1),
            partial(sink.write, pages),
            partial(sink.commit, ()),
        ):
            with pytest.raises(error):
                await verb()

    async def read_full_blocks(self, source: KVSource) -> int:
        """Read the blocks that are full now; return the number of their tokens."""
        block_tokens = source.layout.block_tokens
        full = await source.num_tokens() // block_tokens * block_tokens
        if full:
            pages = await source.read(0, full)
            assert (pages.first_block, pages.num_tokens) == (0, full)
        return full

    async def copy_full_blocks(self, source: KVSource, sink: KVSink) -> int:
        """Copy the blocks that are full now; return the number of their tokens."""
        block_tokens = source.layout.block_tokens
        full = await source.num_tokens() // block_tokens * block_tokens
        await sink.reserve(full + block_tokens)
        if full:
            await sink.write(await source.read(0, full))
        return full

    async def copy_block_by_block(self, source: KVSource, sink: KVSink, num_tokens: int) -> None:
        """Copy the blocks of a stopped request one at a time, and check them against a read of them all."""
        whole = bytes((await source.read(0, num_tokens)).data)
        block_tokens = source.layout.block_tokens
        num_blocks = -(-num_tokens // block_tokens)
        size = (len(whole) - source.layout.state_bytes) // num_blocks
        for block, first in enumerate(range(0, num_tokens, block_tokens)):
            pages = await source.read(block, min(block_tokens, num_tokens - first))
            assert (pages.first_block, pages.num_tokens) == (block, min(block_tokens, num_tokens - first))
            end = (block + 1) * size if block < num_blocks - 1 else len(whole)  # with states
            assert bytes(pages.data) == whole[block * size : end], "the block has changed"
            await sink.write(pages)

    async def rest_of(self, engine: Engine, request: Request, reader: Reader) -> list[int]:
        """Return the tokens that an engine generates from where a reader was interrupted."""
        return [token.id for token in await collect(engine, request.continued(reader.ids))]
