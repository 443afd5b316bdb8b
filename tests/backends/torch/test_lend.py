"""On a CPU weights are used in the store's memory: a load copies nothing, and the memory is not written."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from hotswap import Fleet, InstanceState, Model, ModelId, Sampling
from hotswap.abc import HostBuffer, Manifest, ModelCard, Shard
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.stores.writer import write_model
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.buffers import in_place
from hotswap.backends.torch.loader import LocalModel
from hotswap.errors import ShardCorrupt
from hotswap.policies import FirstOf, LeastLoadedRouter
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.test_swaps import PROMPT, ask, tokens_of
from tests.backends.torch.zoo import generate, make_model

LLAMA, QWEN = ModelId("llama"), ModelId("qwen3")
_PAGE = 4096


class NoReading(TieredStore):
    """Raises an error on reads: a load that succeeds has borrowed the memory."""

    def open(self, shard: Shard) -> NoReturn:
        raise AssertionError(f"{shard.file!r} was read")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the two models."""
    directory = tmp_path_factory.mktemp("root")
    source = DictStore()
    for model in (LLAMA, QWEN):
        source.add(model, make_model(model))
        data = memoryview(source.buffers[model].numpy().data)
        write_model(directory, source.manifests[model], [[data]])
    return directory


def store_of(root: Path) -> NoReading:
    return NoReading(PinnedStore("64 MiB"), NvmeStore(root))


def engine(**options: Any) -> TorchEngine:
    return TorchEngine("e0", threads=1, kv_tokens=256, **options)


async def card_of(store: TieredStore, model: ModelId) -> ModelCard:
    return ModelCard.of(Model(model), await store.manifest(model))


def addresses(engine: TorchEngine) -> set[int]:
    """Return the addresses of the serving model's parameters."""
    model = engine._models.serving
    assert isinstance(model, LocalModel)
    return {parameter.data_ptr() for parameter in model.skeleton.module.parameters()}


def span(buffer: HostBuffer | None) -> range:
    assert buffer is not None
    start = in_place(buffer.data).data_ptr()
    return range(start, start + len(buffer.data))


@contextmanager
def unwritable(memory: range) -> Generator[None]:
    """Make memory read-only: a write to it ends the process."""
    libc = ctypes.CDLL(None, use_errno=True)

    def protect(flags: int) -> None:
        assert not libc.mprotect(ctypes.c_void_p(memory.start), ctypes.c_size_t(len(memory)), flags)

    assert memory.start % _PAGE == 0
    protect(1)  # PROT_READ
    try:
        yield
    finally:
        protect(3)


async def test_parameters_are_views_of_the_stores_memory(root: Path) -> None:
    async with store_of(root) as store, engine(memory_bytes="1 MiB") as one, engine() as other:
        card = await card_of(store, LLAMA)
        await store.prefetch(LLAMA)
        await one.load(card, store)
        await other.load(card, store)
        async with store.lend(await store.manifest(LLAMA)) as buffer:
            memory = span(buffer)
        assert len(addresses(one)) > 20
        assert all(address in memory for address in addresses(one))
        assert addresses(one) == addresses(other)
        assert one.status().weight_bytes == 0


async def test_lent_memory_is_not_written(root: Path) -> None:
    expected = generate(make_model(LLAMA), PROMPT, 6)
    async with store_of(root) as store, engine() as engine_, AsyncExitStack() as loan:
        manifest = await store.manifest(LLAMA)
        buffer = await loan.enter_async_context(store.lend(manifest))
        with unwritable(span(buffer)):
            await engine_.load(ModelCard.of(Model(LLAMA), manifest), store)
            assert await tokens_of(engine_, ask(LLAMA)) == expected
            await engine_.unload()


async def test_the_loan_lasts_until_the_model_is_unloaded(root: Path) -> None:
    async with store_of(root) as store, engine() as engine_:
        await engine_.load(await card_of(store, LLAMA), store)
        await engine_.preload(await card_of(store, QWEN), store)
        assert store.num_lent == 2
        await engine_.unload()
        assert store.num_lent == 1
        await engine_.load(await card_of(store, QWEN), store)
        assert await tokens_of(engine_, ask(QWEN)) == generate(make_model(QWEN), PROMPT, 6)
        assert store.num_lent == 1
        engine_.lose()
        await engine_.unload()
        assert store.num_lent == 0


async def test_a_load_that_fails_ends_its_loan(root: Path) -> None:
    class Lying(NoReading):
        async def manifest(self, model: ModelId) -> Manifest:
            right = await super().manifest(model)
            return replace(right, tensors=right.tensors[1:])

    async with Lying(PinnedStore("64 MiB"), NvmeStore(root)) as store, engine() as engine_:
        with pytest.raises(ShardCorrupt, match="missing"):
            await engine_.load(await card_of(store, LLAMA), store)
        assert store.num_lent == 0
        assert engine_.status().state is InstanceState.EMPTY


async def test_another_dtype_is_converted_from_the_loan(root: Path) -> None:
    async with store_of(root) as store, engine(dtype=torch.bfloat16) as engine_:
        await engine_.load(await card_of(store, LLAMA), store)
        assert store.num_lent == 0
        assert engine_.status().weight_bytes > 0


async def test_a_swap_reports_the_loaded_bytes_and_their_tier(root: Path) -> None:
    async with Fleet(
        engines=[engine()],
        store=store_of(root),
        models=[Model(LLAMA), Model(QWEN)],
        router=LeastLoadedRouter(),
        scheduler=FirstOf(),
    ) as fleet:
        cold = await fleet.swap("e0", to=LLAMA)
        assert cold.tier == "nvme"
        await fleet.swap("e0", to=QWEN)
        warm = await fleet.swap("e0", to=LLAMA)
        assert (warm.tier, warm.loaded_bytes) == ("pinned", cold.loaded_bytes)
        assert warm.loaded_bytes == fleet.view().model(LLAMA).weight_bytes
        async with fleet.stream(LLAMA, PROMPT, Sampling(max_tokens=6)) as tokens:
            received = [token.id async for token in tokens]
    assert received == generate(make_model(LLAMA), PROMPT, 6)
