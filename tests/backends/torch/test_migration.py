"""KV sources and sinks of a migration keep blocks while they use them, and release them on any end."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import mmap
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest
from torch import Tensor

from hotswap import ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.forward import LocalForward
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.migration import TorchKVSink, context
from hotswap.backends.torch.prefix import root_key
from hotswap.backends.torch.runner import Report, Runner
from hotswap.errors import MigrationAborted, RequestEvicted
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model

LLAMA = ModelId("llama")


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    store.add(LLAMA, make_model("llama"))
    return store


@asynccontextmanager
async def serving(store: DictStore, name: str = "e0", kv_tokens: int = 2048) -> AsyncGenerator[TorchEngine]:
    skeletons = SkeletonCache()
    async with TorchEngine(
        name, kv_tokens=kv_tokens, memory_bytes="64 MiB", threads=1, skeletons=skeletons
    ) as engine:
        await engine.load(store.card(LLAMA), store)
        yield engine


def ask(name: str = "r", *, prompt_tokens: int = 3, max_tokens: int = 200) -> Request:
    return Request(
        id=RequestId(name),
        model=LLAMA,
        prompt=tuple(range(2, 2 + prompt_tokens)),
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
    )


async def test_a_request_continues_after_its_stop_was_cancelled_during_a_step(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    original = Runner.step

    def step(self: Runner) -> Report:
        began.set()
        go_on.wait()
        return original(self)

    request = ask()
    async with serving(store) as engine, engine.stream(request) as tokens, AsyncExitStack() as move:
        await anext(tokens)
        source = await move.enter_async_context(engine.export_kv(request.id))
        monkeypatch.setattr(Runner, "step", step)
        await anyio.to_thread.run_sync(began.wait)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await source.stop()
        await move.aclose()
        go_on.set()
        assert len(await tokens.collect()) == 199


async def test_announced_keys_are_used_for_the_announced_request_only(store: DictStore) -> None:
    """Another request could otherwise get blocks of other tokens, or of another adapter."""
    async with serving(store) as engine:
        context, request = engine._models.migration_context(), ask(prompt_tokens=100)

        def keys_of(arriving: Request, root: bytes) -> tuple[bytes, ...]:
            announced = context.announced(arriving, root)
            return () if announced is None else announced.keys

        async with engine.import_kv(request):
            root = root_key(context.weights)
            assert len(keys_of(request, root)) == 100 // engine.status().kv_block_tokens
            assert keys_of(request.continued([7]), root) == keys_of(request, root)
            assert keys_of(replace(request, prompt=(9, *request.prompt[1:])), root) == ()
            assert keys_of(replace(request, id=RequestId("another")), root) == ()
            assert keys_of(request, root_key(context.weights, b"1")) == ()
        assert keys_of(request, root) == ()


async def test_blocks_stay_allocated_while_a_cancelled_migration_still_writes_them(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    original = KVCache.restore

    def restore(self: KVCache, blocks: Sequence[int], data: Tensor) -> None:
        began.set()
        go_on.wait()
        original(self, blocks, data)

    async def look(engine: TorchEngine) -> int:
        """Return the number of free blocks, after the engine's thread has run all queued jobs."""
        for _ in range(3):
            async with engine.import_kv(ask("another")):
                pass
        return engine.status().num_free_kv_blocks

    request = ask(prompt_tokens=100)
    async with (
        serving(store, "a") as engine,
        serving(store, "b") as other,
        engine.stream(request) as tokens,
    ):
        await anext(tokens)

        async def move() -> None:
            async with engine.export_kv(request.id) as source, other.import_kv(request) as sink:
                await sink.reserve(96)
                await sink.write(await source.read(0, 96))

        monkeypatch.setattr(KVCache, "restore", restore)
        monkeypatch.setattr(context, "PIECE_BYTES", 0)  # smaller pages are written at once
        task = asyncio.get_running_loop().create_task(move())
        await anyio.to_thread.run_sync(began.wait)
        task.cancel()  # like `asyncio.timeout`, which anyio's shields do not delay
        num_blocks = other.status().num_kv_blocks
        assert await look(other) == num_blocks - 3
        go_on.set()
        with suppress(asyncio.CancelledError):
            await task
        assert await look(other) == num_blocks


@pytest.mark.skipif(sys.platform != "linux", reason="other systems allocate by the first write")
async def test_reserved_blocks_have_their_memory_before_they_are_written(store: DictStore) -> None:
    """A client waits for the last writes, and to allocate huge pages takes longer than these."""
    async with serving(store) as engine, engine.import_kv(ask(prompt_tokens=100)) as sink:
        cache = engine._models.migration_context().cache
        assert isinstance(cache, KVCache)
        assert set(allocated(cache, range(30, 32))) == {False}
        await sink.reserve(20 * 32)
        assert isinstance(sink, TorchKVSink)
        assert set(allocated(cache, sink._blocks)) == {True}
        assert set(allocated(cache, range(30, 32))) == {False}, "others are allocated later"


def allocated(cache: KVCache, blocks: Sequence[int]) -> list[bool]:
    """Return whether the system has allocated the first page of each of some blocks, in every layer."""
    libc, found = ctypes.CDLL(None), ctypes.c_ubyte()
    seen: list[bool] = []
    for pool in (pool for layer in cache.layers for pool in cache.pools(layer)):
        for block in blocks:
            page = pool[block].data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            assert libc.mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(found)) == 0
            seen.append(bool(found.value & 1))
    return seen


async def test_a_request_waits_while_an_arriving_one_holds_the_blocks(store: DictStore) -> None:
    """Nothing can be computed meanwhile, which is no fault of the engine."""
    async with serving(store, kv_tokens=512) as engine:
        arriving, waiting = (
            ask("arriving", prompt_tokens=100),
            ask("waiting", prompt_tokens=300, max_tokens=5),
        )
        async with AsyncExitStack() as move:
            sink = await move.enter_async_context(engine.import_kv(arriving))
            await sink.reserve(400)
            async with engine.stream(waiting) as tokens:
                for _ in range(5):  # the engine's thread goes on with what else it is asked
                    async with engine.import_kv(ask("another")):
                        pass
                assert engine.status().num_waiting == 1
                await move.aclose()
                assert len(await tokens.collect()) == 5


async def test_a_request_that_has_arrived_begins_while_the_first_waits_for_blocks(store: DictStore) -> None:
    """Else both would wait until the sink lapses."""
    arriving, first = ask("arriving", prompt_tokens=100), ask("first", prompt_tokens=420, max_tokens=5)
    first = replace(first, prompt=first.prompt[::-1])
    async with (
        serving(store, "a") as source_engine,
        serving(store, "b", kv_tokens=512) as engine,
        source_engine.stream(arriving) as before,
    ):
        await anext(before)
        async with AsyncExitStack() as move:
            source = await move.enter_async_context(source_engine.export_kv(arriving.id))
            sink = await move.enter_async_context(engine.import_kv(arriving))
            await sink.reserve(96)
            await sink.write(await source.read(0, 96))
            await sink.commit(arriving.tokens)
            async with engine.stream(first) as others, engine.stream(arriving) as tokens:
                await anext(tokens)
                assert tokens.num_reused_tokens >= 96
                await sink.reserve(96)  # it has not lapsed
                assert engine.status().num_waiting == 1
                await move.aclose()
                assert len(await tokens.collect()) == 199
                assert len(await others.collect()) == 5


async def test_a_request_waits_while_a_stopped_one_holds_the_blocks(store: DictStore) -> None:
    async with serving(store, kv_tokens=512) as engine:
        stopped = ask("stopped", prompt_tokens=300, max_tokens=200)
        waiting = replace(stopped, id=RequestId("waiting"), prompt=stopped.prompt[::-1])
        async with engine.stream(stopped) as tokens, AsyncExitStack() as move:
            await anext(tokens)
            source = await move.enter_async_context(engine.export_kv(stopped.id))
            await source.stop()
            async with engine.stream(waiting) as others:
                async with engine.import_kv(ask("another")):
                    assert engine.status().num_waiting == 1
                await move.aclose()
                assert len(await tokens.collect()) == 199
                await anext(others)


async def test_a_source_that_cannot_stop_a_request_does_not_resume_what_another_has_stopped(
    store: DictStore,
) -> None:
    async with serving(store) as engine, engine.stream(ask()) as tokens:
        await anext(tokens)
        async with engine.export_kv(ask().id) as first:
            async with engine.export_kv(ask().id) as second:
                stopped = await first.stop()
                with pytest.raises(MigrationAborted):
                    await second.stop()
            assert await first.num_tokens() == stopped.num_computed
            assert (await first.read(0, stopped.num_computed)).num_tokens == stopped.num_computed
        await anext(tokens)


async def test_nothing_that_was_lent_keeps_the_kv_blocks_of_an_unloaded_model(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the unload would wait for their memory, and fail, as long as a caller has a listed prefix."""
    caches: list[weakref.ref[KVCache]] = []
    make = Runner.__init__

    def record(self: Runner, forward: LocalForward, *others: Any) -> None:
        caches.append(weakref.ref(forward.cache))
        make(self, forward, *others)

    monkeypatch.setattr(Runner, "__init__", record)
    async with serving(store) as engine, AsyncExitStack() as moves:
        async with engine.stream(ask("ended", prompt_tokens=80, max_tokens=4)) as ended:
            await ended.collect()
        listed = await engine.cached_kv()
        running = await moves.enter_async_context(engine.stream(ask("moves")))
        await anext(running)
        source = await moves.enter_async_context(engine.export_kv(RequestId("moves")))
        await source.stop()
        sink = await moves.enter_async_context(engine.import_kv(ask("arrives")))
        await sink.reserve(3)
        assert listed
        assert caches[0]() is not None
        await engine.unload()
        gc.collect()
        assert caches[0]() is None
        for one in (listed[0].read(0, 32), source.read(0, 3), sink.reserve(3)):
            with pytest.raises(MigrationAborted, match=r"unloaded|evicted"):
                await one
        with pytest.raises(RequestEvicted):
            await running.collect()
