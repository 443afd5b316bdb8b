"""Requests that move while they run give their clients what an undisturbed run gives, every token once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from random import Random
from typing import Any

import anyio
import pytest
import torch
from anyio.lowlevel import checkpoint

from hotswap import Fleet, InstanceState, MigrationMethod, Model, Request, RequestId, Sampling
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch.kv import KVCache
from hotswap.errors import InvalidRequest, MigrationAborted
from hotswap.policies import LeastLoadedRouter
from hotswap.testing.chaos import EngineFaults, chaotic_engine
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.runtime.support import Idle, until

KINDS = ("llama", "gemma2")
DEVICES = (
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
        ],
    ),
)
GREEDY = Sampling(max_tokens=60, ignore_eos=True)
SAMPLED = Sampling(
    max_tokens=60, ignore_eos=True, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2
)


@pytest.fixture(scope="module")
def store() -> DictStore:
    store = DictStore()
    for kind in KINDS:
        store.add(kind, make_model(kind))
    return store


@pytest.fixture(scope="module")
def skeletons() -> SkeletonCache:
    return SkeletonCache()


def make_engine(name: str, skeletons: SkeletonCache, **options: Any) -> TorchEngine:
    given = {"kv_tokens": 2048, "memory_bytes": "64 MiB", "threads": 1, "max_requests": 8, **options}
    return TorchEngine(name, skeletons=skeletons, **given)


@asynccontextmanager
async def two_replicas(
    store: DictStore, skeletons: SkeletonCache, kind: str, **options: Any
) -> AsyncGenerator[Fleet]:
    engines = [make_engine(name, skeletons, **options) for name in ("e0", "e1")]
    fleet = Fleet(
        engines=engines,
        store=store,
        models=[Model(kind)],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )
    async with fleet:
        for engine in engines:
            await fleet.swap(engine.id, to=kind)
        yield fleet


async def undisturbed(
    store: DictStore,
    skeletons: SkeletonCache,
    kind: str,
    prompt: tuple[int, ...],
    sampling: Sampling,
    **options: Any,
) -> list[int]:
    async with make_engine("oracle", skeletons, **options) as engine:
        await engine.load(store.card(kind), store)
        request = Request(id=RequestId("r"), model=store.card(kind).id, prompt=prompt, sampling=sampling)
        async with engine.stream(request) as tokens:
            return [token.id for token in await tokens.collect()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["kv", "tokens"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_moved_stream_is_that_of_an_undisturbed_run(
    store: DictStore, skeletons: SkeletonCache, kind: str, method: MigrationMethod, device: str
) -> None:
    random = Random(f"{kind}{method}")
    async with two_replicas(store, skeletons, kind, device=device) as fleet:
        for number in range(6):
            prompt = tuple(random.randrange(2, 500) for _ in range(random.choice([3, 31, 32, 100])))
            sampling = replace(random.choice([GREEDY, SAMPLED]), seed=number)
            moments = sorted(random.sample(range(1, 50), 3))
            read: list[int] = []
            async with fleet.stream(kind, prompt, sampling) as stream:
                async for token in stream:
                    read.append(token.id)
                    if moments and len(read) == moments[0]:
                        moments.pop(0)
                        if stream.finish_reason is not None:  # the engine was far ahead of this reader
                            continue
                        at = stream.hops[-1].instance
                        record = await fleet.migrate(
                            stream.request.id, to="e1" if at == "e0" else "e0", method=method
                        )
                        assert record.outcome in ("done", "finished"), record
                        assert record.method == method
            assert read == await undisturbed(store, skeletons, kind, prompt, sampling, device=device)
        assert sum(record.outcome == "done" for record in fleet.migrations) >= 6
        for instance in fleet.view().instances:
            assert instance.num_requests == 0
            assert instance.state is InstanceState.SERVING
        await until(lambda: all(i.num_free_kv_blocks == i.num_kv_blocks for i in fleet.view().instances))


async def test_the_log_of_a_move_that_broke_off_keeps_no_blocks(
    store: DictStore,
    skeletons: SkeletonCache,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A handler may keep records for as long as it likes."""

    def fail(self: KVCache, blocks: object, out: object) -> None:
        raise ZeroDivisionError("a library's fault")

    monkeypatch.setattr(KVCache, "save", fail)
    gc.collect()
    gc.disable()
    try:
        async with two_replicas(store, skeletons, "llama") as fleet:
            caches = [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is KVCache]
            async with fleet.stream("llama", (5, 6, 7), replace(GREEDY, max_tokens=900)) as stream:
                await anext(stream)
                to = "e1" if stream.hops[-1].instance == "e0" else "e0"
                record = await fleet.migrate(stream.request.id, to=to, method="kv")
                assert record.outcome == "aborted"
            for name in ("e0", "e1"):
                await fleet.unload(name)
            assert [cache() for cache in caches if cache() is not None] == []
    finally:
        gc.enable()
    (told,) = [each for each in caplog.records if "broke off" in each.getMessage()]
    assert "ZeroDivisionError: a library's fault" in told.getMessage(), "with its traceback"


async def test_moves_that_fail_keep_no_blocks_of_engines_that_have_unloaded(
    store: DictStore, skeletons: SkeletonCache
) -> None:
    """Not even until the collector comes: the next model may need their memory."""
    random, faults = Random(3), EngineFaults(abort=0.1)
    engines = [
        chaotic_engine(make_engine(name, skeletons, kv_tokens=512), Random(number), faults)
        for number, name in enumerate(("e0", "e1"))
    ]
    fleet = Fleet(
        engines=engines,
        store=store,
        models=[Model("llama")],
        router=LeastLoadedRouter(),
        scheduler=Idle(),
    )

    async def ask_for_ever() -> None:
        while True:
            prompt = tuple(random.randrange(2, 500) for _ in range(40))
            async with fleet.stream("llama", prompt, GREEDY) as stream:
                await stream.collect()

    async with fleet:
        for engine in engines:
            engine.injector.armed = False
            await fleet.swap(engine.id, to="llama")
            engine.injector.armed = True
        gc.collect()  # those that other tests left
        caches = [weakref.ref(thing) for thing in gc.get_objects() if type(thing) is KVCache]
        assert len(caches) >= 2
        gc.disable()
        try:
            async with anyio.create_task_group() as clients:
                for _ in range(6):
                    clients.start_soon(ask_for_ever)
                while len(failed := [m for m in fleet.migrations if m.outcome == "aborted"]) < 20:
                    await checkpoint()
                    for request in fleet.view().running[:1]:
                        to = "e1" if request.instance == "e0" else "e0"
                        with suppress(InvalidRequest, MigrationAborted), anyio.move_on_after(1):
                            await fleet.migrate(request.id, to=to, method="kv")
                clients.cancel_scope.cancel()
            for engine in engines:
                await fleet.unload(engine.id)
            assert len({move.stage for move in failed}) > 2, failed
            assert [cache() for cache in caches if cache() is not None] == []
        finally:
            gc.enable()
