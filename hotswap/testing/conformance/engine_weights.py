"""Checks of loading and unloading: an engine is EMPTY or SERVING afterwards, in every case."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest

from hotswap.engine import Engine
from hotswap.errors import InstanceError, InstanceLost, OutOfMemory, RequestEvicted, StoreError
from hotswap.model import HostChunk, Manifest, Shard
from hotswap.request import ModelId
from hotswap.store import WeightStore, WrapperStore
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.engine_suite import EngineSetup, EngineSuite, Reader, cards, collect
from hotswap.testing.conformance.suite import Heartbeat, check
from hotswap.view import InstanceState

__all__ = ["FailingStore", "GatedStore", "WeightChecks"]


class WeightChecks(EngineSuite):
    """Checks of `Engine.load` and `Engine.unload`."""

    @check
    async def test_an_engine_starts_empty(self) -> None:
        async with self.idle() as setup:
            assert_empty(setup.engine)

    @check
    async def test_a_loaded_engine_serves(self) -> None:
        async with self.serving() as setup:
            view = setup.engine.status()
            assert view.id == setup.engine.id
            assert (view.state, view.model) == (InstanceState.SERVING, setup.card.id)
            assert view.weight_bytes > 0
            assert view.num_free_kv_blocks == view.num_kv_blocks > 0

    @check
    async def test_it_is_loading_until_it_serves(self) -> None:
        async with self.idle() as setup, anyio.create_task_group() as tasks:
            store = GatedStore(setup.store)
            tasks.start_soon(setup.engine.load, setup.card, store)
            await store.reached.wait()
            assert setup.engine.status().state is InstanceState.LOADING
            with pytest.raises(RequestEvicted):
                await collect(setup.engine, self.request(setup.card))
            store.gate.set()

    @check
    async def test_models_can_take_turns(self) -> None:
        async with self.idle() as setup:
            for card in (*setup.cards[:2], *setup.cards[:2]):
                await setup.engine.load(card, setup.store)
                request = self.request(card)
                tokens = await collect(setup.engine, request)
                assert [token.id for token in tokens] == await self.expected(request, card)
                await setup.engine.unload()
                assert_empty(setup.engine)

    @check
    async def test_a_loaded_engine_refuses_a_second_load(self) -> None:
        async with self.serving() as setup:
            with pytest.raises(InstanceError):
                await setup.engine.load(setup.cards[1], setup.store)
            await self.assert_works(setup)

    @check
    async def test_a_store_that_fails_leaves_the_engine_empty(self) -> None:
        async with self.idle() as setup:
            for num_chunks in (0, 1, 2):
                with pytest.raises(StoreError, match="planted"):
                    await setup.engine.load(setup.card, FailingStore(setup.store, num_chunks))
                assert_empty(setup.engine)
            await setup.engine.load(setup.card, setup.store)
            await self.assert_works(setup)

    @check
    async def test_a_model_the_store_lacks_leaves_the_engine_empty(self) -> None:
        async with self.idle() as setup:
            with pytest.raises(StoreError):
                await setup.engine.load(replace(setup.card, id=ModelId("no-such-model")), setup.store)
            assert_empty(setup.engine)

    @check
    async def test_a_model_that_does_not_fit_leaves_the_engine_empty(self) -> None:
        async with self.idle() as setup:
            store = HugeStore(setup.store)
            manifest = await store.manifest(setup.card.id)
            with pytest.raises(OutOfMemory):
                await setup.engine.load(replace(setup.card, weight_bytes=manifest.weight_bytes), store)
            assert_empty(setup.engine)
            await setup.engine.load(setup.card, setup.store)
            await self.assert_works(setup)

    @check
    async def test_a_load_cancelled_anywhere_leaves_the_engine_empty_or_serving(self) -> None:
        async with self.idle() as setup:

            async def look() -> None:
                if setup.engine.status().state is InstanceState.SERVING:  # the cancellation came too late
                    await setup.engine.unload()
                assert_empty(setup.engine)

            await cancel_everywhere(lambda: setup.engine.load(setup.card, setup.store), look)
            await setup.engine.load(setup.card, setup.store)
            await self.assert_works(setup)

    @check
    async def test_a_load_lets_the_event_loop_go_on(self) -> None:
        async with self.idle() as setup:
            hearts = [Heartbeat() for _ in range(3)]  # a machine may falter once, or twice
            for heart in hearts:
                async with heart.beating():
                    await setup.engine.load(setup.card, setup.store)
                await setup.engine.unload()
            assert not all(heart.blocked for heart in hearts), f"loads stopped the event loop: {hearts}"

    @check
    async def test_unload_is_idempotent(self) -> None:
        async with self.idle() as setup:
            await setup.engine.unload()
            assert_empty(setup.engine)
            await setup.engine.load(setup.card, setup.store)
            await setup.engine.unload()
            await setup.engine.unload()
            assert_empty(setup.engine)

    @check
    async def test_unload_evicts_what_runs(self) -> None:
        async with self.serving() as setup:
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                await setup.engine.unload()
                assert_empty(setup.engine)
            for reader in readers:
                assert isinstance(reader.error, RequestEvicted)
                await self.assert_part(reader, setup.card)

    @check
    async def test_a_cancelled_unload_still_ends_empty(self) -> None:
        async with self.idle() as setup:

            async def load_and_unload() -> None:
                with anyio.CancelScope(shield=True):
                    await setup.engine.load(setup.card, setup.store)
                await setup.engine.unload()

            async def look() -> None:
                assert_empty(setup.engine)

            # Checkpoints of the shielded load count too; a cancellation there meets the unload at its first.
            await cancel_everywhere(load_and_unload, look)

    @check
    async def test_leaving_the_engine_ends_its_streams_and_frees_its_memory(self) -> None:
        readers: list[Reader] = []
        async with self.make_store() as store, anyio.create_task_group() as tasks:
            card, *_ = await cards(self.models, store)
            async with self.make_engine() as engine:
                await engine.load(card, store)
                readers.append(Reader(self.long_requests(card)[0]))
                tasks.start_soon(readers[0].read, engine)
                await readers[0].began.wait()
            assert engine.status().weight_bytes == 0
            with anyio.fail_after(self.step_s):
                await readers[0].ended.wait()
            assert isinstance(readers[0].error, (RequestEvicted, InstanceLost))
            await self.assert_part(readers[0], card)

    async def assert_works(self, setup: EngineSetup) -> None:
        """Raise unless the engine serves its model with the expected tokens."""
        request = self.request(setup.card)
        tokens = await collect(setup.engine, request)
        assert [token.id for token in tokens] == await self.expected(request, setup.card)


def assert_empty(engine: Engine) -> None:
    """Raise unless an engine is EMPTY and holds nothing."""
    view = engine.status()
    assert (view.state, view.model) == (InstanceState.EMPTY, None), f"it is to be EMPTY: {view}"
    assert view.weight_bytes == 0, f"weights are left over: {view}"
    assert view.num_kv_blocks == view.num_free_kv_blocks, f"KV blocks are left over: {view}"


class GatedStore(WrapperStore):
    """Lends no chunk until `gate` is set; `reached` is set when a shard is opened."""

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store)
        self.gate = anyio.Event()
        self.reached = anyio.Event()

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        self.reached.set()
        await self.gate.wait()
        async with self.wrapped.open(shard) as chunks:
            yield chunks


class FailingStore(WrapperStore):
    """Fails after lending `num_chunks` chunks; with 0, when asked for the manifest."""

    def __init__(self, store: WeightStore, num_chunks: int) -> None:
        super().__init__(store)
        self._num_chunks = num_chunks

    async def manifest(self, model: ModelId) -> Manifest:
        if not self._num_chunks:
            raise StoreError("This failure was planted in the manifest.")
        return await super().manifest(model)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        async with self.wrapped.open(shard) as chunks:
            yield self._some(chunks)

    async def _some(self, chunks: AsyncIterator[HostChunk]) -> AsyncIterator[HostChunk]:
        async for chunk in chunks:
            if not self._num_chunks:
                break
            self._num_chunks -= 1
            yield chunk
        raise StoreError("This failure was planted in a shard.")


class HugeStore(WrapperStore):
    """Reports every model as larger than any memory."""

    async def manifest(self, model: ModelId) -> Manifest:
        manifest = await super().manifest(model)
        first = replace(manifest.shards[0], size_bytes=1 << 60)
        return replace(manifest, shards=(first, *manifest.shards[1:]), buffer_bytes=1 << 60)
