"""The life of models in a `TorchEngine` on a GPU: load, sampled steps, preload, a move, a swap, an unload.

Loads and the engine's thread run on the event loop by turns, since fake tensors belong to one thread.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import torch
import transformers
from anyio.lowlevel import checkpoint
from torch import Tensor

import hotswap.worker_threads
from hotswap import Model, ModelId, Request, Sampling, StoreView
from hotswap.abc import HostChunk, Manifest, ModelCard, RequestId, Shard, WeightStore
from hotswap.backends.torch import TorchEngine, device, engine, loader, preflight, sampling, settings, worker
from hotswap.backends.torch.migration import MigrationContext
from hotswap.backends.torch.modeling import SkeletonCache
from hotswap.backends.torch.runner import Report, Runner
from hotswap.backends.torch.weights import layout
from tests.backends.torch.fake_cuda.driver import DEVICE, FREE_BYTES, STEP_BYTES, Driver

__all__ = ["StagingStore", "live", "run_inline"]

_CHUNK_BYTES = 1 << 15
_SAMPLINGS = (
    Sampling(logprobs=2),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, seed=1, logprobs=2, logprobs_of="sampled"),
    Sampling(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.2, logit_bias={5: 2.0}),
    Sampling(temperature=1.0, seed=2, min_tokens=4, suppress_tokens=(7,), bad_words_ids=((9,), (8, 9))),
    Sampling(forced_end_tokens=(3, 4)),
)


class StagingStore(WeightStore):
    """Lends chunks in one staging buffer, which it overwrites when the next chunk is requested.

    Args:
        config: The architecture of its models.
        driver: Says whether a copy still reads the buffer.
    """

    def __init__(self, config: Any, driver: Driver) -> None:
        with torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self._specs, self._size_bytes = layout(module)
        self._config, self._architecture = json.dumps(module.config.to_dict()), type(module).__name__
        self._driver, self._staging = driver, bytearray(_CHUNK_BYTES)

    def card(self, name: str) -> ModelCard:
        return ModelCard.of(Model(name), self._manifest(ModelId(name)))

    async def manifest(self, model: ModelId) -> Manifest:
        await checkpoint()
        return self._manifest(model)

    @asynccontextmanager
    async def open(self, shard: Shard) -> AsyncGenerator[AsyncIterator[HostChunk]]:
        yield self._chunks(shard)
        self._driver.check_reuse(memoryview(self._staging))

    async def _chunks(self, shard: Shard) -> AsyncIterator[HostChunk]:
        memory = memoryview(self._staging)
        for at in range(0, shard.size_bytes, _CHUNK_BYTES):
            await checkpoint()
            self._driver.check_reuse(memory)
            part = memory[: shard.size_bytes - at]
            is_view = at // _CHUNK_BYTES % 2  # as a `PinnedStore` lends what it has
            yield HostChunk(at, part.toreadonly() if is_view else part, tier="staging", pinned=True)

    def view(self) -> StoreView:
        return StoreView()

    def _manifest(self, model: ModelId) -> Manifest:
        shard = Shard(
            model=model,
            rank=0,
            file="weights-0.bin",
            file_offset_bytes=0,
            buffer_offset_bytes=0,
            size_bytes=self._size_bytes,
            checksum=f"test:{model}",
        )
        return Manifest(
            model=model,
            shards=(shard,),
            buffer_bytes=self._size_bytes,
            tensors=self._specs,
            architecture=self._architecture,
            config=self._config,
            max_context_tokens=1024,
        )


class _Thread:
    """Stands for the thread of an engine, which runs when it is joined: to its end."""

    ident = 0

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self._target = target

    def start(self) -> None:
        pass

    def join(self) -> None:
        self._target()


class _InlineWorker(worker.Worker):
    """Runs commands and steps on the event loop, after some turns of it, in which clients go on."""

    _num_scheduled = 0

    def _send(self, command: Callable[[], None]) -> None:
        super()._send(command)
        self._schedule()

    def _schedule(self, num_turns: int = 8) -> None:
        """Call `_turn` soon, once."""
        if num_turns == 8:
            self._num_scheduled += 1
        call = partial(self._schedule, num_turns - 1) if num_turns else self._turn
        asyncio.get_running_loop().call_soon(call)

    def _turn(self) -> None:
        self._num_scheduled -= 1
        if self._num_scheduled or self._stopping or not (self._commands or self._has_work()):
            return
        try:
            with torch.inference_mode():
                self._run_commands()
                self._iterate()
        except Exception as exc:
            self._ended(exc)
        self._schedule()


def run_inline(driver: Driver) -> None:
    """Replace threads, and what compares values or asks a driver for them."""

    async def inline(function: Callable[..., Any], *arguments: Any, **_: object) -> Any:
        await checkpoint()
        return function(*arguments)

    def read(parts: list[Tensor]) -> list[list[float]]:
        assert all(part.device == DEVICE for part in parts), "what is sampled is on the device"
        driver.num_reads += 1
        return [[1.0] * part.numel() for part in parts]

    step = Runner.step

    def step_with_one_read(runner: Runner) -> Report:
        before = driver.num_reads
        report = step(runner)
        assert driver.num_reads <= before + 1, "a step waits for the device once"
        return report

    runners: Any = Runner
    runners.step = step_with_one_read
    vars(hotswap.worker_threads)["to_thread"] = SimpleNamespace(run_sync=inline)
    vars(worker)["threading"] = SimpleNamespace(Thread=_Thread, Condition=threading.Condition)
    vars(engine)["Worker"] = _InlineWorker
    vars(sampling)["read"] = read
    vars(device)["_RECLAIM_S"] = 0.1
    vars(settings)["resolve"] = torch.device
    vars(loader)["check_device"] = lambda device: None  # it reads a value
    vars(loader)["check_config"] = lambda config: None  # it computes on the CPU
    vars(preflight)["_compare"] = lambda *given: None
    vars(preflight)["HeldChoices"] = lambda *given: nullcontext()
    contexts: Any = MigrationContext
    contexts.host_memory = lambda context, size_bytes: driver.host_memory(size_bytes)
    cuda: Any = torch.cuda
    cuda.empty_cache, cuda.device_count = lambda: None, lambda: 1


async def live(store: StagingStore) -> None:
    """Let two models of a store serve on two engines."""
    one, two = store.card("one"), store.card("two")
    options: dict[str, Any] = {
        "device": str(DEVICE),
        "gpu_steps": "in_place",
        "kv_tokens": 2048,
        "memory_bytes": "1 GiB",
        "adapter_bytes": "1 MiB",
        "skeletons": SkeletonCache(),
    }
    async with TorchEngine("a", **options) as a, TorchEngine("b", **options) as b:
        await a.load(one, store)
        async with anyio.create_task_group() as tasks:
            for number, chosen in enumerate(_SAMPLINGS):
                tasks.start_soon(_serve, a, _request(one, number, replace(chosen, max_tokens=5)))
            tasks.start_soon(a.preload, two, store)
        await b.load(one, store)
        await _move(a, b, _request(one, 0, Sampling(max_tokens=12)))
        await a.evict(deadline_s=0)
        await a.unload()
        await a.load(two, store)
        await _serve(a, _request(two, 0, Sampling(max_tokens=2)))
        assert await _serve(a, _request(two, 0, Sampling(max_tokens=2))) >= 32, "a full block is reused"
        await a.unload()
        await b.unload()
        assert a.status().weight_bytes == b.status().weight_bytes == 0
    await _take_rest(one, store)


async def _take_rest(model: ModelCard, store: StagingStore) -> None:
    """Load a model without numbers: KV blocks take what steps, adapters and a preload leave."""
    async with TorchEngine("c", device=str(DEVICE), adapter_bytes="1 MiB") as c:
        await c.load(model, store)
        assert (c.status().max_requests, c.token_budget) == (128, 2048)
        left_bytes, block_bytes = _left_bytes(c)
        assert abs(left_bytes - model.weight_bytes) <= block_bytes, "a preload fits beside it"
        await c.unload()


def _left_bytes(on: TorchEngine) -> tuple[int, int]:
    """Return what KV blocks, states, steps and adapters of 1 MiB leave free, and the size of a block."""
    pool = on._models._pool
    assert pool is not None
    return FREE_BYTES - STEP_BYTES - (1 << 20) - pool.size_bytes, pool.cache.block_bytes


def _request(model: ModelCard, number: int, chosen: Sampling) -> Request:
    prompt = tuple(range(3, 40 + 3 * number))
    return Request(id=RequestId(f"r{number}"), model=model.id, prompt=prompt, sampling=chosen)


async def _serve(on: TorchEngine, request: Request) -> int:
    """Read all tokens of a request; return how many of its prompt were reused."""
    async with on.stream(request) as stream:
        assert len([token async for token in stream]) == request.remaining_tokens
        return stream.num_reused_tokens


async def _move(a: TorchEngine, b: TorchEngine, request: Request) -> None:
    """Move a request with its KV blocks while it decodes, as the fleet does."""
    async with a.stream(request) as stream:
        await anext(stream)
        async with a.export_kv(request.id) as source, b.import_kv(request) as sink:
            block_tokens = source.layout.block_tokens
            full = await source.num_tokens() // block_tokens
            await sink.reserve(full * block_tokens)
            await source.copy_to(sink, 0, full * block_tokens)
            stopped = await source.stop()
            await sink.reserve(stopped.num_computed + 1)
            await source.copy_to(sink, full, stopped.num_computed - full * block_tokens)
            await sink.commit(stopped.tokens)
            await source.release()
            moved = request.continued(stopped.tokens[len(request.prompt) :])
            async with b.stream(moved) as rest:
                assert len([token async for token in rest]) == moved.remaining_tokens
                assert rest.num_reused_tokens == stopped.num_computed
