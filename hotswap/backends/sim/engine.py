"""`SimEngine`: an engine whose times follow a `DeviceProfile`, and whose tokens are hashes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Self, TypeVar

import anyio
from anyio.lowlevel import checkpoint, checkpoint_if_cancelled

from hotswap.backends.notifier import Observed, StatusNotifier
from hotswap.backends.sim.adapters import check_adaptable
from hotswap.backends.sim.batcher import Batcher, Batching
from hotswap.backends.sim.drain import Drain
from hotswap.backends.sim.load import Load, Reporting, Reports, load_of
from hotswap.backends.sim.loading import Weights, read_weights
from hotswap.backends.sim.memory import memory_of
from hotswap.backends.sim.migration import MigrationContext, aborted
from hotswap.backends.sim.sequence import Sequence
from hotswap.backends.sim.tokens import VOCABULARY, Streamed, check_request, expected_tokens
from hotswap.device_budget import DeviceBudget
from hotswap.engine import Engine, StatusListener
from hotswap.errors import InstanceError, InstanceLost, RequestEvicted, UnknownAdapter
from hotswap.hardware import DeviceProfile
from hotswap.migration import KVSink, KVSource
from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.store import WeightStore
from hotswap.stream import TokenStream
from hotswap.view import EngineStatus, InstanceId, InstanceState

__all__ = ["SimEngine"]

_EMPTY, _LOADING, _SERVING, _DRAINING, _LOST = InstanceState

_T = TypeVar("_T")
_S = TypeVar("_S", bound=Sequence)


class SimEngine(Engine):
    """Keeps the whole `Engine` contract and all its optional abilities, and computes nothing.

    The duration of a step follows from its tokens, batch and context by `profile`; a load reads every chunk
    from the store, then sleeps for `profile.load_s`. Tokens are a function of model, adapter, prompt, seed
    and position (`expected_tokens`), so that a token that is lost, repeated or out of order is noticed.
    `profile.memory_bytes` bounds weights, staged weights and the KV pool together, unless the engine shares a
    `device_budget`: then it has `floor_bytes` for itself, and its KV pool grows and shrinks above them.

    Args:
        id: the instance's name.
        profile: how long things take, and how much memory there is.
        kv_blocks: KV blocks of the pool, the same for every model; the most of one that is leased.
        kv_block_tokens: tokens of a block.
        max_requests: sequences of a batch; more wait inside the engine.
        token_budget: tokens of a step, decodes and prefill chunks together.
        vocabulary: token ids lie below it.
        max_adapters: how many adapters it holds at once; their files are not read.
        batching: prefill chunks beside decodes, or whole prompts before them.
        watermark: the share of KV blocks that an admission leaves free; for `"prefill_first"` alone.
        node: where it is, for a store that tells nodes apart.
        prefix_reuse: whether KV blocks of a prefix are computed once for all prompts that begin with it.
        reporting: whether the status has the load as it is, or as of the last step that has ended.
        device_budget: the memory that it shares with other engines.
        floor_bytes: what it has of that in any case. No request may need more KV blocks than these bytes
            hold beside the weights, so that each that was admitted can end.
    """

    _checks_tokens = True
    _outline: EngineStatus | None = None  # its status, but for the load

    def _state_changed(self) -> None:
        self._outline = None
        self._notifier.state_changed()

    _state = Observed[InstanceState](_state_changed)
    _serving = Observed[Weights | None](_state_changed)
    _staged = Observed[Weights | None](_state_changed)
    _adapters = Observed[dict[AdapterId, Adapter]](_state_changed)
    _reserved_bytes = Observed[int](_state_changed)

    def __init__(
        self,
        id: str,
        profile: DeviceProfile | None = None,
        *,
        kv_blocks: int = 1024,
        kv_block_tokens: int = 16,
        max_requests: int = 256,
        token_budget: int = 512,
        vocabulary: int = VOCABULARY,
        max_adapters: int = 8,
        batching: Batching = "mixed",
        watermark: float = 0.0,
        node: str = "",
        prefix_reuse: bool = False,
        reporting: Reporting = "live",
        device_budget: DeviceBudget | None = None,
        floor_bytes: int | str = 0,
    ) -> None:
        self.id, self.node, self.vocabulary = InstanceId(id), node, vocabulary
        self.profile = profile if profile is not None else DeviceProfile()
        self.max_requests, self.max_adapters = max_requests, max_adapters
        self._batcher = Batcher(
            num_blocks=kv_blocks,
            block_tokens=kv_block_tokens,
            max_requests=max_requests,
            token_budget=token_budget,
            batching=batching,
            watermark=watermark,
            prefix_reuse=prefix_reuse,
            turnover=self.profile.turnover_s(joined=1, left=1) > 0,
        )
        self._notifier = StatusNotifier()
        self._batcher.on_change, self._batcher.clock = self._notifier.load_changed, anyio.current_time
        self._reports = Reports(reporting, self._batcher)
        self._memory = memory_of(
            self.id, self._batcher, self.profile.memory_bytes, device_budget, floor_bytes, self._state_changed
        )
        self._state, self._started = _EMPTY, False
        self._serving = self._staged = None
        self._adapters = {}
        self._reserved_bytes, self._because, self._lost_for_good = 0, "", False
        self._verb: anyio.CancelScope | None = None
        self._migration = MigrationContext(
            self._batcher,
            self.profile,
            check=self._refuse_if_lost,
            give_up=self._give_up,
            resumed=lambda: self._step_soon(),
        )
        self._work, self._drain = anyio.Event(), Drain(self._batcher)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with anyio.create_task_group() as workers:
            workers.start_soon(self._run_steps, name=f"steps of {self.id}")
            try:
                with self._running():
                    yield self
            finally:
                workers.cancel_scope.cancel()

    @contextmanager
    def _running(self) -> Generator[None]:
        """Start the engine, and leave it as it was before."""
        with self._memory:
            self._started = True
            try:
                yield
            finally:
                self._started = False
                self._evict_all("It was stopped")
                self._serving = self._staged = None
                self._adapters = {}
                self._state = _EMPTY
                self._settle()

    # ------------------------------------------------------------------ weights

    async def load(self, model: ModelCard, store: WeightStore) -> None:
        self._require(_EMPTY, "load")
        self._state = _LOADING
        try:
            self._serving = await self._unless_lost(self._take_staged_or_read(model, store))
        except BaseException:
            if self._state is _LOADING:
                self._state = _EMPTY
            self._settle()
            raise
        self._state = _SERVING

    async def unload(self) -> None:
        with anyio.CancelScope(shield=True):
            if self._state is not _EMPTY:
                self._evict_all(f"Model {self._model!r} was unloaded")
                if self._state is not _LOST:
                    self._state = _DRAINING
                await anyio.sleep(self.profile.unload_s)
                if self._lost_for_good:
                    raise self._lost()
                self._serving, self._adapters, self._because = None, {}, ""
                self._state = _EMPTY
                self._settle()
        await checkpoint_if_cancelled()

    def can_preload(self, model: ModelCard) -> bool:
        staged_bytes = self._staged.size_bytes if self._staged else 0
        return self._memory.can_preload(model, self._weight_bytes - staged_bytes + model.weight_bytes)

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        if self._staged is not None and self._staged.model == model:
            return await checkpoint()
        self._require(_SERVING, "preload")
        self._staged = None
        self._memory.preload(model, self._weight_bytes + model.weight_bytes)
        try:
            self._staged = await self._unless_lost(self._read(model, store))
        finally:
            self._settle()
        return None

    async def drop_preload(self) -> None:
        await checkpoint()
        self._staged = None
        self._settle()

    # ------------------------------------------------------------------ adapters

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._unless_lost(self._read_adapter(adapter))

    async def drop_adapter(self, adapter: AdapterId) -> None:
        await checkpoint()
        if any(sequence.request.adapter == adapter for sequence in self._batcher):
            raise InstanceError(
                f"A request of engine {self.id!r} uses adapter {adapter!r}; let it end first."
            )
        self._adapters = {held: it for held, it in self._adapters.items() if held != adapter}

    async def _read_adapter(self, adapter: Adapter) -> None:
        await checkpoint()
        self._require_adaptable(adapter)
        if adapter.version not in self._adapters:
            await anyio.sleep(self.profile.adapter_s)
            self._require_adaptable(adapter)
            self._adapters = {**self._adapters, adapter.version: adapter}

    def _require_adaptable(self, adapter: Adapter) -> None:
        self._require(_SERVING, "load an adapter")
        check_adaptable(adapter, self.id, self._model, self._adapters, self.max_adapters)

    # ------------------------------------------------------------------ requests

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncGenerator[TokenStream]:
        sequence = self._admit(request, lambda of, model: Streamed.of(of, model, self.vocabulary))
        try:
            yield sequence.tokens
        finally:
            self._batcher.remove(sequence)
            self._drain.note()

    async def evict(self, *, deadline_s: float) -> int:
        self._require(_SERVING, "evict")
        self._state = _DRAINING
        try:
            await self._unless_lost(self._drain.wait(deadline_s))
        except BaseException:
            if self._state is _DRAINING:
                self._state = _SERVING
            raise
        return self._evict_all(f"A deadline of {deadline_s} s passed")

    def most_kv_tokens(self, model: ModelCard) -> int:
        """See `SupportsKVLimit`."""
        return self._memory.num_request_blocks(model) * self._batcher.block_tokens

    async def resize_kv(self, num_blocks: int) -> int:
        await checkpoint()
        self._require(_SERVING, "resize its KV pool")
        self._step_soon()
        return self._memory.resize(num_blocks)

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of prompts whose KV blocks were cached, also by the same request before a preemption."""
        return self._batcher.num_reused_tokens

    def expected_tokens(self, request: Request, model: ModelCard) -> list[int]:
        """Return what this engine generates for a request that nothing disturbs."""
        return expected_tokens(request, model, vocabulary=self.vocabulary)

    # ------------------------------------------------------------------ moves

    @asynccontextmanager
    async def export_kv(self, request: RequestId) -> AsyncGenerator[KVSource]:
        self._refuse_if_lost()
        with self._migration.source(request, self._serving.model if self._serving else None) as source:
            yield source

    @asynccontextmanager
    async def import_kv(self, request: Request) -> AsyncGenerator[KVSink]:
        self._refuse_if_lost()
        serving = self._serving
        if serving is None or self._state is not _SERVING or self._model != request.model:
            raise aborted("reserve", f"engine {self.id!r} is {self._state} with {self._model!r}")

        def check() -> None:
            self._refuse_if_lost()
            if self._serving is not serving:
                raise aborted("copy", f"engine {self.id!r} unloaded the model")

        with self._migration.sink(request, serving.model, check) as sink:
            yield sink

    def _give_up(self, sequence: Sequence) -> None:
        self._batcher.remove(sequence)
        sequence.close(RequestEvicted(f"Engine {self.id!r} gave a request up that moves on."))
        self._drain.note()

    def _refuse_if_lost(self) -> None:
        if self._state is _LOST:
            raise self._lost()

    # ------------------------------------------------------------------ faults

    def lose(self, reason: str = "its device failed", *, for_good: bool = False) -> None:
        """Become LOST at once: streams and pending verbs raise `InstanceLost`.

        `unload` brings the engine back EMPTY, unless it is lost `for_good`.
        """
        self._because, self._lost_for_good = reason, for_good
        self._batcher.clear(self._lost())
        self._drain.note()
        self._serving = self._staged = None
        self._adapters = {}
        self._migration.arrivals.clear()
        self._state = _LOST
        self._settle()
        self._migration.end_step()
        if self._verb is not None:
            self._verb.cancel()

    # ------------------------------------------------------------------ view

    def status(self) -> EngineStatus:
        if self._outline is None:
            self._outline = EngineStatus(
                id=self.id,
                state=self._state,
                model=self._model,
                max_requests=self.max_requests,
                num_kv_blocks=self._batcher.num_blocks if self._serving else 0,
                kv_block_tokens=self._batcher.block_tokens,
                memory_bytes=self.profile.memory_bytes,
                weight_bytes=self._weight_bytes,
                adapters=tuple(self._adapters),
                max_adapters=self.max_adapters,
                preloaded=self._staged.model.id if self._staged else None,
                node=self.node,
            ).updated_by(self._memory.status_fields() if self._serving else {})
        status = self._outline.updated_by(self._load())
        # Without a model there is no pool.
        return status if self._serving else status.updated(num_free_kv_blocks=0, lost_because=self._because)

    def _load(self) -> Load:
        return self._reports.told or load_of(self._batcher)

    def watch(self, listener: StatusListener) -> bool:
        return self._notifier.watch(listener)

    def watch_recoveries(self, tell: Callable[[RequestId, float], None]) -> None:
        """Call `tell` with a preempted request once its tokens are computed again, and the seconds since."""
        self._batcher.on_recovered = tell

    # ------------------------------------------------------------------ private

    async def _run_steps(self) -> None:
        while True:
            step = self._batcher.plan()
            self._drain.note()  # a plan refuses what has outgrown the pool
            self._reports.begin(idle=not step.num_tokens)
            if not step.num_tokens:
                self._work = anyio.Event()
                await self._work.wait()
                continue
            self._migration.is_stepping = True
            await anyio.sleep(step.seconds(self.profile))
            self._reports.end()
            self._batcher.commit(step)
            self._drain.note()
            self._migration.end_step()

    def _step_soon(self) -> None:
        """Begin to step, unless steps are under way."""
        self._work.set()

    def _admit(self, request: Request, make: Callable[[Request, ModelCard], _S]) -> _S:
        self._refuse_if_lost()
        if self._serving is None or self._state is not _SERVING or self._model != request.model:
            raise RequestEvicted(
                f"Engine {self.id!r} is {self._state} with model {self._model!r} and admits no request for "
                f"{request.model!r}; ask another."
            )
        model = self._serving.model
        if request.adapter is not None and request.adapter not in self._adapters:
            raise UnknownAdapter(f"Engine {self.id!r} holds no adapter {request.adapter!r}; load it first.")
        check_request(request, model, self.vocabulary if self._checks_tokens else None)
        sequence = make(request, model)
        self._batcher.add(sequence)
        self._migration.attach_arrival(sequence)
        self._step_soon()
        return sequence

    async def _take_staged_or_read(self, model: ModelCard, store: WeightStore) -> Weights:
        await checkpoint()
        staged, self._staged = self._staged, None
        self._memory.load(model, self._weight_bytes + model.weight_bytes)
        if staged is not None and staged.model.id == model.id:
            return staged
        return await self._read(model, store)

    async def _read(self, model: ModelCard, store: WeightStore) -> Weights:
        """Read all shards into reserved memory, which is freed unless all of them were read."""
        self._reserved_bytes = model.weight_bytes
        try:
            return await read_weights(model, store, self.profile)
        finally:
            self._reserved_bytes = 0

    def _evict_all(self, why: str) -> int:
        error = RequestEvicted(f"Engine {self.id!r} gave its requests back. {why}; they go on elsewhere.")
        evicted = self._batcher.clear(error)
        self._migration.arrivals.clear()
        self._drain.note()
        return evicted

    async def _unless_lost(self, work: Awaitable[_T]) -> _T:
        """Return what `work` returns; interrupt it by `InstanceLost` when the engine is lost meanwhile."""
        with anyio.CancelScope() as self._verb:
            result = await work
            if self._state is not _LOST:
                return result
        raise self._lost()

    def _lost(self) -> InstanceLost:
        return InstanceLost(f"Engine {self.id!r} is lost: {self._because}. Unload it to bring it back.")

    def _require(self, state: InstanceState, verb: str) -> None:
        self._refuse_if_lost()
        if not self._started:
            raise InstanceError(f"Engine {self.id!r} cannot {verb} before `async with` has started it.")
        if self._state is not state:
            raise InstanceError(f"Engine {self.id!r} is {self._state}; it can {verb} only while {state}.")

    def _settle(self) -> None:
        """Give memory back that is not used any more."""
        self._memory.settle(self._weight_bytes, serving=self._serving is not None)

    @property
    def _model(self) -> ModelId | None:
        return self._serving.model.id if self._serving else None

    @property
    def _weight_bytes(self) -> int:
        held = sum(weights.size_bytes for weights in (self._serving, self._staged) if weights)
        return held + self._reserved_bytes
