"""KV blocks stay across swaps between models of one format, and none is read for another model."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from torch import Tensor

from hotswap import Adapter, ModelId, Request, RequestId, Sampling
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.backends.torch import admission as admission_module
from hotswap.backends.torch import engine as engine_module
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.migration import context as context_module
from hotswap.backends.torch.prefix import root_key
from hotswap.errors import MigrationAborted
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import generate, make_model

PROMPT = tuple((37 * at) % 500 + 2 for at in range(90))
SKELETONS = SkeletonCache()
MODELS = {name: make_model("llama", seed=seed) for seed, name in enumerate("abc", start=1)}


def make_store() -> DictStore:
    store = DictStore()
    for name, model in MODELS.items():
        store.add(name, model)
    store.add("other", make_model("qwen3"))
    return store


@asynccontextmanager
async def serving(store: DictStore, name: str = "a", **options: Any) -> AsyncGenerator[TorchEngine]:
    settings: dict[str, Any] = {
        "kv_tokens": 512,
        "kv_block_tokens": 16,
        "threads": 1,
        "memory_bytes": "64 MiB",
        "packed_bytes": 0,
        "skeletons": SKELETONS,
    }
    async with TorchEngine("e0", **settings | options) as engine:
        await engine.load(store.card(name), store)
        yield engine


async def swap(engine: TorchEngine, store: DictStore, name: str) -> None:
    """Swap like a fleet: preload, evict, unload, load."""
    await engine.preload(store.card(name), store)
    await engine.evict(deadline_s=0)
    await engine.unload()
    await engine.load(store.card(name), store)


async def read(
    engine: TorchEngine,
    prompt: tuple[int, ...] = PROMPT,
    count: int = 12,
    *,
    adapter: Adapter | None = None,
    seed: int | None = None,
) -> tuple[list[int], int]:
    """Return a request's tokens, and the number of its tokens that were reused."""
    model = engine.status().model
    assert model is not None
    request = Request(
        id=RequestId("r"),
        model=ModelId(model),
        prompt=prompt,
        sampling=Sampling(max_tokens=count, temperature=0.0 if seed is None else 1.0, seed=seed),
        adapter=None if adapter is None else adapter.version,
    )
    async with engine.stream(request) as tokens:
        return [token.id async for token in tokens], tokens.num_reused_tokens


async def test_a_model_finds_its_blocks_again_after_a_swap_to_another_and_back() -> None:
    store = make_store()
    async with serving(store) as engine:
        answer, _ = await read(engine)
        await swap(engine, store, "b")
        other, reused = await read(engine)
        assert reused == 0
        assert other == generate(MODELS["b"], list(PROMPT), 12) != answer
        await swap(engine, store, "a")
        assert await read(engine, (*PROMPT, *answer, 7)) == (
            generate(MODELS["a"], [*PROMPT, *answer, 7], 12),
            len(PROMPT) + 11,
        )
        await swap(engine, store, "b")
        assert await read(engine) == (other, len(PROMPT) - 1)
        status = engine.status()
        assert status.num_free_kv_blocks == status.num_kv_blocks


async def test_a_request_that_is_evicted_leaves_its_blocks_for_its_return() -> None:
    store = make_store()
    async with serving(store) as engine:
        request = Request(
            id=RequestId("r"), model=ModelId("a"), prompt=PROMPT, sampling=Sampling(max_tokens=300)
        )
        received: list[int] = []
        with pytest.raises(Exception, match="evicted"):  # noqa: PT012 - the block is the request's life
            async with engine.stream(request) as tokens:
                async for token in tokens:
                    received.append(token.id)
                    if len(received) == 20:
                        await engine.preload(store.card("b"), store)
                        await engine.evict(deadline_s=0)
        await engine.unload()
        await engine.load(store.card("b"), store)
        await swap(engine, store, "a")
        async with engine.stream(request.continued(received)) as tokens:
            received += [token.id async for token in tokens]
            assert tokens.num_reused_tokens >= len(PROMPT) + 16
    assert received == generate(MODELS["a"], list(PROMPT), 300)


async def test_it_tells_since_when_blocks_are_kept_where_blocks_alone_make_a_prefix() -> None:
    store = make_store()
    async with serving(store) as engine:
        since_s = engine.status().kept_since_s
        assert since_s is not None
        assert since_s <= anyio.current_time()
        await read(engine)
        for name in "ba":
            await swap(engine, store, name)
        assert engine.status().kept_since_s == since_s
        await engine.unload()
        assert engine.status().kept_since_s is None
        await engine.load(store.card("a"), store)
        later_s = engine.status().kept_since_s
        assert later_s is not None
        assert later_s > since_s, "the memory was given back"
    async with serving(store, prefix_reuse=False) as engine:
        assert engine.status().kept_since_s is None


async def test_memory_is_given_back_where_the_next_model_has_another_format_or_is_not_known() -> None:
    store = make_store()
    async with serving(store) as engine:
        await read(engine)
        await swap(engine, store, "other")
        assert (await read(engine))[1] == 0
        await swap(engine, store, "a")
        assert (await read(engine))[1] == 0
        # An unload to nothing frees all memory, as its caller relies on.
        await engine.unload()
        assert engine._models.cache_bytes == 0
        await engine.load(store.card("a"), store)
        assert (await read(engine))[1] == 0
        # Also what is kept for a model that is not loaded after all.
        for give_up in (engine.drop_preload, lambda: engine.load(store.card("c"), store)):
            await engine.preload(store.card("b"), store)
            await engine.unload()
            assert engine._models.cache_bytes > 0, "accounted while it is kept"
            await give_up()
            if engine.status().model is None:
                assert engine._models.cache_bytes == 0
                await engine.load(store.card("a"), store)
        assert (await read(engine))[1] == 0


async def test_a_changed_checkpoint_under_the_same_name_finds_nothing_of_the_old_one() -> None:
    store = make_store()
    async with serving(store) as engine:
        await read(engine)
        await swap(engine, store, "b")
        store.add("a", MODELS["c"])
        await swap(engine, store, "a")
        assert await read(engine) == (generate(MODELS["c"], list(PROMPT), 12), 0)
        store.add("a", MODELS["b"])  # and a copy of a model under another name finds all of it
        await swap(engine, store, "b")
        answer, _ = await read(engine)
        await swap(engine, store, "a")
        assert await read(engine) == (answer, len(PROMPT) - 1)


async def test_weights_without_checksums_are_known_by_their_load_alone() -> None:
    store = make_store()
    for name in "ab":
        manifest = store.manifests[name]
        store.manifests[name] = replace(
            manifest, shards=tuple(replace(shard, checksum="") for shard in manifest.shards)
        )
    async with serving(store) as engine:
        await read(engine)
        await swap(engine, store, "b")
        await swap(engine, store, "a")
        assert (await read(engine))[1] == 0


async def test_blocks_of_an_adapter_are_found_with_equal_matrices_alone(tmp_path: Path) -> None:
    store = make_store()
    for name, seed in (("one", 1), ("two", 2)):
        write(tmp_path / name, MODELS["a"], seed=seed)
    one, two = (Adapter(name, model="a", source=str(tmp_path / name)) for name in ("one", "two"))
    async with serving(store) as engine:

        async def back() -> None:
            for name in "ba":
                await swap(engine, store, name)

        await engine.load_adapter(one)
        answer, _ = await read(engine, adapter=one)
        await back()
        await engine.load_adapter(one)
        assert await read(engine, adapter=one) == (answer, len(PROMPT) - 1)
        await back()
        for path in (tmp_path / "two").iterdir():  # other matrices under the same name
            (tmp_path / "one" / path.name).write_bytes(path.read_bytes())
        await engine.load_adapter(one)
        await engine.load_adapter(two)
        changed, reused = await read(engine, adapter=one)
        assert reused == 0
        assert changed != answer
        assert await read(engine, adapter=two) == (changed, len(PROMPT) - 1)
        assert (await read(engine))[1] == 0, "nor without an adapter"


async def _random_turns(random: Random) -> list[str]:
    """Swap among models at random, and ask each for what others have computed; return the wrong answers."""
    store, wrong = make_store(), list[str]()
    beginnings = [tuple(random.randrange(2, 500) for _ in range(length)) for length in (17, 48, 75)]
    expected = {
        (name, at): generate(model, list(prompt), 10)
        for name, model in MODELS.items()
        for at, prompt in enumerate(beginnings)
    }
    async with serving(store, kv_tokens=320) as engine:
        for _ in range(12):
            name = engine.status().model
            assert name is not None

            async def ask(at: int, count: int, name: str = name) -> None:
                tokens, reused = await read(engine, beginnings[at], count)
                if tokens != expected[name, at][:count]:
                    wrong.append(f"{name} {at} with {reused} reused")

            async with anyio.create_task_group() as tasks:
                for at in range(len(beginnings)):
                    if random.random() < 0.8:
                        tasks.start_soon(ask, at, random.choice([1, 4, 10]))
            await swap(engine, store, random.choice([other for other in MODELS if other != name]))
    return wrong


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_of_a_model_is_read_for_another_one(seed: int) -> None:
    assert await _random_turns(Random(seed)) == []


async def test_the_property_fails_if_keys_do_not_cover_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_for_all(weights: str, adapter: bytes = b"") -> bytes:
        return root_key("", adapter)

    for module in (admission_module, engine_module):
        monkeypatch.setattr(module, "root_key", same_for_all)
    assert await _random_turns(Random(0))


async def test_a_late_write_of_a_move_never_reaches_blocks_of_the_next_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A copy in another thread may outlast the model for which it writes."""
    store = make_store()
    began, go_on = threading.Event(), threading.Event()
    original = KVCache.restore

    def restore(self: KVCache, blocks: list[int], data: Tensor) -> None:
        began.set()
        go_on.wait()
        original(self, blocks, data)

    request = Request(id=RequestId("r"), model=ModelId("a"), prompt=PROMPT, sampling=Sampling(max_tokens=100))
    async with (
        serving(store) as engine,
        serving(store, kv_tokens=160) as other,  # so few that the next model needs these blocks
        engine.stream(request) as stream,
    ):
        await anext(stream)

        async def move() -> None:
            with pytest.raises(MigrationAborted):  # noqa: PT012 - wherever it notices
                async with engine.export_kv(request.id) as source, other.import_kv(request) as sink:
                    await sink.reserve(80)
                    await sink.write(await source.read(0, 80))
                    await sink.commit(request.tokens)

        monkeypatch.setattr(KVCache, "restore", restore)
        monkeypatch.setattr(context_module, "PIECE_BYTES", 0)  # smaller pages are written at once
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move)
            await anyio.to_thread.run_sync(began.wait)
            await swap(other, store, "b")
            answer = (await read(other))[0]
            go_on.set()
        assert await read(other, (*PROMPT, *answer)) == (
            generate(MODELS["b"], [*PROMPT, *answer], 12),
            len(PROMPT) + 11,
        )
