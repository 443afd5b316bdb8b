"""`TorchEngine`: an instance in this process, serving Hugging Face causal language models through PyTorch.

Limits: one device, no tensor parallelism, no adapters, greedy and sampled decoding. Architectures that keep
state outside attention, or mask keys in ways of their own, are refused when they are loaded. Bits do not
depend on the batch on a CPU; on other devices they may.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Self, TypeVar

import anyio
import anyio.to_thread
import torch
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from hotswap.backends.torch.admission import check_servable, to_sequence
from hotswap.backends.torch.batcher import Batcher
from hotswap.backends.torch.device import free_bytes, reclaimed, resolve, total_bytes, touch
from hotswap.backends.torch.forward import LocalForward, least_rows
from hotswap.backends.torch.kv import BlockPool, KVCache
from hotswap.backends.torch.loader import KVBudget, LoadedModel, Loader
from hotswap.backends.torch.modeling import SkeletonCache
from hotswap.backends.torch.runner import Report, Runner
from hotswap.backends.torch.streams import Streams
from hotswap.backends.torch.worker import Worker
from hotswap.engine import Engine
from hotswap.errors import ConfigError, InstanceError, InstanceLost, RequestEvicted
from hotswap.hardware import parse_bytes
from hotswap.model import ModelCard
from hotswap.request import ModelId, Request
from hotswap.store import WeightStore
from hotswap.stream import TokenQueue, TokenStream
from hotswap.view import InstanceId, InstanceState, InstanceView

__all__ = ["TorchEngine"]

_EMPTY, _LOADING, _SERVING, _DRAINING, _LOST = (
    InstanceState.EMPTY,
    InstanceState.LOADING,
    InstanceState.SERVING,
    InstanceState.DRAINING,
    InstanceState.LOST,
)

_T = TypeVar("_T")


class TorchEngine(Engine):
    """Serves one model from a slice of a device; can preload the next beside it.

    Steps run on a thread of the engine's own, loads on others; the event loop (asyncio) waits for neither.
    In fp32 greedy tokens are those of transformers' `generate` for the request alone. With `invariant`, on a
    CPU, logits have the same bits whatever shares the batch, so a request that was preempted or continued
    elsewhere goes on as it would have.

    Args:
        id: The instance's name.
        device: Where weights and KV blocks lie, `"cpu"` or `"cuda:0"`.
        dtype: Serve weights of the model's main dtype in this one, converted while loading, which takes both
            copies' memory for a moment; `None` serves them as they are stored.
        kv_tokens: How many tokens the KV blocks hold.
        kv_bytes: The same as a size, which then counts instead; `"2 GiB"` or a number.
        kv_block_tokens: Tokens of a KV block, a multiple of 16.
        token_budget: Tokens of a step, decodes and prefill chunks together; at least `max_requests`.
        max_requests: Requests that run at once; more wait inside the engine.
        memory_bytes: What weights (preloaded ones included) and KV blocks may take together; `None` is the
            whole device, so say it where engines share one. Weights that a store lends to a CPU count for
            nothing: they are in the store's budget.
        idle_bytes: On a CPU, how much freed weight memory is kept for the next load, which then writes to
            pages that exist; 0 gives all of it back at once.
        threads: CPU threads of a step; `None` is PyTorch's default.
        invariant: Whether bits may not depend on the batch; costs a few per cent. CPU only.
        skeletons: Modules kept between loads; may be shared by engines of a process.
    """

    def __init__(
        self,
        id: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        kv_tokens: int = 16_384,
        kv_bytes: int | str | None = None,
        kv_block_tokens: int = 32,
        token_budget: int = 256,
        max_requests: int = 64,
        memory_bytes: int | str | None = None,
        idle_bytes: int | str = "1 GiB",
        threads: int | None = None,
        invariant: bool = True,
        skeletons: SkeletonCache | None = None,
    ) -> None:
        _check(
            kv_block_tokens >= 16 and kv_block_tokens % 16 == 0,
            "kv_block_tokens",
            kv_block_tokens,
            "16, 32 ...",
        )
        _check(max_requests >= 1, "max_requests", max_requests, "1 or more")
        _check(token_budget >= max_requests, "token_budget", token_budget, "at least max_requests")
        _check(kv_tokens >= kv_block_tokens, "kv_tokens", kv_tokens, "at least one block")
        _check(threads is None or threads >= 1, "threads", threads, "1 or more")
        self.id = InstanceId(id)
        self.device = resolve(device)
        self._threads = threads or torch.get_num_threads()
        self._invariant = invariant
        self._token_budget, self._max_requests = token_budget, max_requests
        size = None if kv_bytes is None else parse_bytes(kv_bytes)
        self._kv = KVBudget(kv_tokens, size, kv_block_tokens, max_requests)
        self._loader = Loader(
            self.device,
            dtype=dtype,
            memory_bytes=total_bytes(self.device) if memory_bytes is None else parse_bytes(memory_bytes),
            idle_bytes=parse_bytes(idle_bytes),
            skeletons=skeletons if skeletons is not None else SkeletonCache(),
            block_tokens=kv_block_tokens,
            min_rows=self._least_rows,
        )
        self._state = _EMPTY
        self._worker: Worker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: LoadedModel | None = None
        self._staged: LoadedModel | None = None
        self._staging = False
        self._num_blocks = self._cache_bytes = 0
        self._streams = Streams()
        self._books = Report()
        self._detached = anyio.Event()
        self._lost_because = ""
        self._lost_cause: Exception | None = None
        self._verbs: set[anyio.CancelScope] = set()

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        self._loop = asyncio.get_running_loop()
        self._worker = self._start()
        try:
            yield self
        finally:
            self._evict_all("It was stopped")
            with anyio.CancelScope(shield=True):
                await self._stop()
            self._worker = None
            self._state = _EMPTY
            self._loader.close()

    # ------------------------------------------------------------------ weights

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._require(_EMPTY, "load")
        self._state = _LOADING
        try:
            loaded, cache = await self._unless_lost(self._bring(model, store))
        except BaseException:
            if self._state is _LOADING:
                self._state = _EMPTY
            raise
        self._serve(loaded, cache)

    async def unload(self) -> None:
        if self._state is _LOADING:
            raise InstanceError(f"Engine {self.id!r} is LOADING; cancel the load instead of unloading it.")
        with anyio.CancelScope(shield=True):
            if self._state is _LOST:
                await self._restart()
            elif self._state is not _EMPTY:
                await self._unload()
        await checkpoint_if_cancelled()

    def can_preload(self, model: ModelCard) -> bool:
        staged_bytes = self._staged.weights.own_bytes if self._staged else 0
        return self._used_bytes - staged_bytes + model.weight_bytes <= self._loader.memory_bytes

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        if self._staged is not None and self._staged.card == model:
            return await checkpoint()
        self._require(_SERVING, "preload")
        if self._staging:
            raise InstanceError(f"Engine {self.id!r} is preloading already; cancel that first.")
        await self._drop_staged()
        self._staging = True
        try:
            staged = await self._unless_lost(self._load(model, store))
        finally:
            self._staging = False
        self._staged = staged
        return None

    async def drop_preload(self) -> None:
        await checkpoint()
        await self._drop_staged()

    # ------------------------------------------------------------------ requests

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        ticket, tokens = self._admit(request)
        try:
            yield tokens
        finally:
            if self._streams.leave(ticket):
                self._running_worker.remove(ticket)

    async def evict(self, *, deadline_s: float) -> int:
        self._require(_SERVING, "evict")
        self._state = _DRAINING
        try:
            await self._unless_lost(self._streams.wait_until_drained(deadline_s))
        except BaseException:
            if self._state is _DRAINING:
                self._state = _SERVING
            raise
        return self._evict_all(f"A deadline of {deadline_s} s passed")

    # ------------------------------------------------------------------ faults

    def lose(self, reason: str = "it was dropped on purpose") -> None:
        """Drop the instance as a crashed device would: streams and pending verbs raise `InstanceLost`.

        Call it from the event loop. `unload` brings the engine back EMPTY.
        """
        self._lose(reason, None)

    # ------------------------------------------------------------------ view

    def view(self) -> InstanceView:
        running = min(self._books.num_running, len(self._streams))
        num_blocks = 0 if self._is_lost else self._num_blocks
        return InstanceView(
            id=self.id,
            state=self._state,
            model=self._model,
            num_running=running,
            num_waiting=len(self._streams) - running,
            max_requests=self._max_requests,
            num_kv_blocks=num_blocks,
            num_free_kv_blocks=min(self._books.num_free_blocks, num_blocks),
            kv_block_tokens=self._kv.block_tokens,
            memory_bytes=self._loader.memory_bytes,
            weight_bytes=self._loader.weight_bytes,
            preloaded=self._staged.card.id if self._staged else None,
        )

    @property
    def num_preempted(self) -> int:
        """How often a request gave up its KV blocks for an older one since the model was loaded."""
        return self._books.num_preempted

    # ------------------------------------------------------------------ loading

    async def _bring(self, model: ModelCard, store: WeightStore) -> tuple[LoadedModel, KVCache]:
        await checkpoint()
        loaded, self._staged = self._staged, None
        if loaded is not None and loaded.card.id != model.id:
            await self._loader.release(loaded)
            loaded = None
        if loaded is None:
            loaded = await self._load(model, store)
        try:
            cache = await anyio.to_thread.run_sync(self._loader.make_cache, loaded, self._kv)
            self._refuse_if_lost()
        except BaseException:
            await self._loader.release(loaded)
            raise
        return loaded, cache

    async def _load(self, model: ModelCard, store: WeightStore) -> LoadedModel:
        loaded = await self._loader.load(model, store, others_bytes=self._cache_bytes)
        if self._state is _LOST:
            await self._loader.release(loaded)
        self._refuse_if_lost()
        return loaded

    def _serve(self, loaded: LoadedModel, cache: KVCache) -> None:
        batcher = Batcher(
            BlockPool(cache.num_blocks),
            block_tokens=self._kv.block_tokens,
            token_budget=self._token_budget,
            max_requests=self._max_requests,
        )
        min_rows = self._least_rows(loaded.skeleton.dtype)
        runner = Runner(LocalForward(loaded.skeleton.module, cache, min_rows=min_rows), batcher)
        self._serving, self._num_blocks, self._cache_bytes = loaded, cache.num_blocks, cache.size_bytes
        self._books = runner.report()
        self._running_worker.attach(runner)
        self._state = _SERVING

    async def _unload(self) -> None:
        self._evict_all("The model was unloaded")
        self._state = _DRAINING
        free_before, held_bytes = free_bytes(self.device), self._used_bytes
        self._detached = anyio.Event()
        self._running_worker.detach(partial(self._post, self._detached.set))
        await self._detached.wait()
        if self._is_lost:
            await self._restart()
            return
        await self._release_serving()
        try:
            await reclaimed(self.device, free_before, held_bytes - self._used_bytes)
        finally:
            self._state = _EMPTY

    async def _restart(self) -> None:
        await self._stop()
        try:
            await anyio.to_thread.run_sync(touch, self.device)
        except RuntimeError as exc:
            raise InstanceLost(
                f"Engine {self.id!r} cannot come back: {self.device} fails ({exc}); restart the process."
            ) from exc
        self._worker = self._start()
        self._state = _EMPTY

    def _start(self) -> Worker:
        return Worker(
            f"steps of {self.id}",
            threads=self._threads,
            publish=partial(self._post, self._deliver),
            ended=partial(self._post, self._note_end),
        )

    async def _stop(self) -> None:
        """End the thread, and free what it used."""
        self._running_worker.stop()
        await anyio.to_thread.run_sync(self._running_worker.join)
        await self._drop_staged()
        await self._release_serving()

    async def _release_serving(self) -> None:
        if self._serving is not None:
            await self._loader.release(self._serving)
        self._serving, self._books = None, Report()
        self._num_blocks = self._cache_bytes = 0

    async def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            await self._loader.release(staged)

    # ------------------------------------------------------------------ streams

    def _admit(self, request: Request) -> tuple[int, TokenQueue]:
        self._refuse_if_lost()
        model = self._serving
        if model is None or self._state is not _SERVING or model.card.id != request.model:
            raise RequestEvicted(
                f"Engine {self.id!r} is {self._state} with model {self._model!r} and admits no request for "
                f"{request.model!r}; ask another."
            )
        check_servable(request, model, kv_tokens=self._num_blocks * self._kv.block_tokens)
        ticket, tokens = self._streams.open()
        self._running_worker.add(to_sequence(request, ticket, model))
        return ticket, tokens

    def _deliver(self, report: Report) -> None:
        self._books = report
        self._streams.deliver(report)

    def _evict_all(self, why: str) -> int:
        evicted = self._streams.close_all(
            lambda: RequestEvicted(f"Engine {self.id!r} gave its requests back. {why}; they go on elsewhere.")
        )
        for ticket in evicted:
            self._running_worker.remove(ticket)
        return len(evicted)

    # ------------------------------------------------------------------ loss

    def _note_end(self, error: Exception | None) -> None:
        if error is not None:
            self._lose(f"a step failed: {error!r}", error)

    def _lose(self, reason: str, cause: Exception | None) -> None:
        if self._state is _LOST:
            return
        self._state, self._lost_because, self._lost_cause = _LOST, reason, cause
        self._streams.close_all(self._lost)
        self._detached.set()
        if self._worker is not None:
            self._worker.stop()
        for scope in self._verbs:
            scope.cancel()

    def _lost(self) -> InstanceLost:
        error = InstanceLost(f"Engine {self.id!r} is lost: {self._lost_because}. Unload it to bring it back.")
        error.__cause__ = self._lost_cause
        return error

    def _refuse_if_lost(self) -> None:
        if self._state is _LOST:
            raise self._lost()

    async def _unless_lost(self, work: Awaitable[_T]) -> _T:
        """Return what `work` returns; interrupt it by `InstanceLost` when the engine is lost meanwhile."""
        with anyio.CancelScope() as scope:
            self._verbs.add(scope)
            try:
                return await work
            finally:
                self._verbs.discard(scope)
        raise self._lost()

    # ------------------------------------------------------------------ private

    def _post(self, call: Callable[..., object], *arguments: object) -> None:
        """Have the event loop make a call, from any thread; calls are made in the order of asking."""
        assert self._loop is not None, "only an engine that was entered gets here"
        self._loop.call_soon_threadsafe(call, *arguments)

    def _require(self, state: InstanceState, verb: str) -> None:
        self._refuse_if_lost()
        if self._worker is None:
            raise InstanceError(f"Engine {self.id!r} cannot {verb} before `async with` has started it.")
        if self._state is not state:
            raise InstanceError(
                f"Engine {self.id!r} is {self._state}; it can {verb} only while it is {state}."
            )

    def _least_rows(self, dtype: torch.dtype) -> int:
        return least_rows(self.device, self._threads, dtype) if self._invariant else 0

    @property
    def _running_worker(self) -> Worker:
        assert self._worker is not None, "only an engine that was entered gets here"
        return self._worker

    @property
    def _is_lost(self) -> bool:
        return self._state is _LOST  # may turn true during any await

    @property
    def _model(self) -> ModelId | None:
        return self._serving.card.id if self._serving and self._state is not _LOST else None

    @property
    def _used_bytes(self) -> int:
        return self._loader.weight_bytes + self._cache_bytes


def _check(holds: bool, name: str, value: object, otherwise: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value!r}, it must be {otherwise}.")
