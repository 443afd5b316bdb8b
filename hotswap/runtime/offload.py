"""KV blocks that outlive a swap: saved before requests are evicted, and restored before they go on.

    save      full blocks while requests decode, in a preload and until the deadline; then all requests stop
              at one step boundary, the rest is copied, and each is released as after any eviction
    restore   a move whose source is the store: the blocks are in the prefix cache when the stream begins
    at last   what ended requests left, when the fleet closes, if the store outlives it

Both are moves whose other end is a `KVStore`, by the verbs of `SupportsMigration`. Nothing depends on them: a
block that is missing is computed again, and what fails is logged and left out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import anyio

from hotswap import telemetry as tm
from hotswap.checks import check_positive_seconds
from hotswap.errors import ConfigError
from hotswap.kv_store import KVStore
from hotswap.loop_time import current_time
from hotswap.migration import KVLayout, SupportsMigration
from hotswap.request import RequestId
from hotswap.runtime.active import ActiveRequest
from hotswap.runtime.instance import Instance
from hotswap.runtime.kv_context import AHEAD, KVContext, logged
from hotswap.runtime.kv_restoring import NoRestore, Restore, RestoreQueue
from hotswap.runtime.kv_saving import Save, Saved
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.state import FleetState
from hotswap.tasks_beside import tasks_beside
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceState

if TYPE_CHECKING:
    from opentelemetry.trace import Span

__all__ = ["Offload", "beside"]

# Of restores that are expected to take too long so many are one that is made, to learn whether they still do.
ONE_IN = 16
# How long what ended requests left is copied while the instance is down.
CACHED_S = 1.0


class Offload:
    """Saves KV blocks of requests to a store, and restores them; belongs to one fleet.

    Args:
        state: Of the fleet.
        store: Keeps the blocks.
        lifetime: Has the tasks of restores.
        telemetry: Records spans and metrics.
        save_s: How long saving may take once requests have stopped.
        write_through_s: The seconds between saves of what runs; `None` makes none.
    """

    def __init__(
        self,
        state: FleetState,
        store: KVStore,
        lifetime: Lifetime,
        telemetry: Telemetry,
        *,
        save_s: float,
        write_through_s: float | None = None,
    ) -> None:
        self._context = KVContext(state, store, telemetry)
        self._lifetime, self._save_s, self._write_through_s = lifetime, save_s, write_through_s
        self._num_not_copied = 0
        self._queues: WeakKeyDictionary[Instance, RestoreQueue] = WeakKeyDictionary()

    @classmethod
    def of(
        cls, state: FleetState, lifetime: Lifetime, telemetry: Telemetry, save_s: float, every_s: float | None
    ) -> Offload | None:
        """Return what saves to the store of a fleet; `None` without a store."""
        if every_s is not None:
            check_positive_seconds(ConfigError, kv_write_through_s=every_s)
        if (store := state.kv_store) is not None:
            return cls(state, store, lifetime, telemetry, save_s=save_s, write_through_s=every_s)
        if every_s is not None:
            raise ConfigError("kv_write_through_s is given without a kv_store; give that too.")
        return None

    # ------------------------------------------------------------------ saving

    async def evict(self, instance: Instance, deadline_s: float, saved: Saved, span: Span) -> int:
        """Evict like the engine's own `evict`, and save what its requests have in KV blocks.

        The engine admits no request from the beginning on. Returns how many requests it had to evict itself;
        errors and cancellation are those of `evict`.
        """
        engine = instance.engine
        if not isinstance(engine, SupportsMigration):
            return await engine.evict(deadline_s=deadline_s)
        num_evicted, waiting = 0, anyio.CancelScope()
        with self._saving(instance, saved, span) as save:
            async with tasks_beside() as tasks:
                tasks.start_soon(save.until_stopped, deadline_s, waiting)
                with waiting:
                    num_evicted = await engine.evict(deadline_s=deadline_s + self._save_s)
            # An engine elsewhere may have evicted all before it heard that it need not wait.
            if waiting.cancelled_caught and instance.status().state is InstanceState.SERVING:
                num_evicted = await engine.evict(deadline_s=0.0)
            with anyio.move_on_after(min(CACHED_S, self._save_s / 2)):  # the phase has a limit
                await save.ended()
        return num_evicted

    async def save_ahead(self, instance: Instance, saved: Saved, span: Span) -> None:
        """Save full blocks while the instance serves; what does not work is left for later."""
        if isinstance(instance.engine, SupportsMigration):
            with logged("saved", instance.id), self._saving(instance, saved, span) as save:
                await save.ahead()

    async def _write_through(self, every_s: float) -> None:
        """Save full blocks of what runs again and again."""
        while True:
            await anyio.sleep(every_s)
            await self._on_all(AHEAD, Save.full_blocks)

    async def save_common(self) -> None:
        """Save what ended requests left, where the store keeps it for fleets that open it later."""
        await self._on_all("saved", partial(Save.ended, common=True), lasting=True)

    async def _on_all(
        self, what: str, saves: Callable[[Save], Awaitable[None]], *, lasting: bool = False
    ) -> None:
        """Save on all instances that serve, at once; what does not work, or would not last, is left out."""

        async def save_on(instance: Instance) -> None:
            with anyio.move_on_after(self._save_s), logged(what, instance.id):
                if lasting and not self._context.store.near(instance.engine).outlives_fleets:
                    return
                is_serving = instance.status().state is InstanceState.SERVING
                if is_serving and isinstance(instance.engine, SupportsMigration):
                    with self._saving(instance, Saved(), None) as save:
                        await saves(save)

        async with anyio.create_task_group() as tasks:
            for instance in self._context.state.instances.values():
                tasks.start_soon(save_on, instance)

    async def save_running(self, instance: Instance) -> frozenset[RequestId]:
        """Stop the requests that run on an instance, save their blocks, and have the engine evict them.

        Returns those; the others run on.
        """
        if not isinstance(instance.engine, SupportsMigration):
            return frozenset()
        with self._saving(instance, Saved(), None) as save:
            with anyio.move_on_after(self._save_s):
                await save.stop_all()
            return frozenset(save.released)

    @contextmanager
    def _saving(self, instance: Instance, saved: Saved, parent: Span | None) -> Generator[Save]:
        before = saved.num_requests, saved.num_tokens, saved.num_bytes
        attributes = {tm.INSTANCE: instance.id, tm.KV_TIER: self._context.lookup.tier}
        with (
            self._context.telemetry.span(tm.SPAN_OFFLOAD, attributes, parent=parent) as span,
            ExitStack() as leases,
        ):
            try:
                yield Save(self._context, instance, saved, leases, limit_s=self._save_s)
            finally:
                span.set_attribute(tm.KV_SAVED_REQUESTS, saved.num_requests - before[0])
                span.set_attribute(tm.KV_SAVED_TOKENS, saved.num_tokens - before[1])
                span.set_attribute(tm.KV_SAVED_BYTES, saved.num_bytes - before[2])

    # ------------------------------------------------------------------ restoring

    def restored(self, active: ActiveRequest, instance: Instance, span: Span) -> Restore | NoRestore:
        """Return a block in which an instance finds what is stored of a request in its prefix cache.

        A stream of the request is to be opened in it; `leave` it at the first token. A request of which
        nothing is stored, or whose blocks are sooner computed than copied, costs a look-up.
        """
        if (every_s := self._write_through_s) is not None:
            self._write_through_s = None  # one task is enough
            self._lifetime.tasks.start_soon(self._write_through, every_s)
        request, num_tokens = active.remaining, 0
        lookup = self._context.lookup
        layout = lookup.layout(request.model, request.adapter)
        # Log-probabilities of a prompt are told of what is computed.
        is_told = request.sampling.prompt_logprobs is not None and not request.generated
        if is_told or not isinstance(instance.engine, SupportsMigration):
            return NoRestore(current_time())
        if (queue := self._queues.get(instance)) is None:
            queue = self._queues[instance] = RestoreQueue()
        if layout is None:  # the store may have blocks of an earlier fleet, whose layout the instance tells
            if not (request.adapter is None and lookup.has(request.model) and queue.is_first(request.model)):
                return NoRestore(current_time())
            key = request.model.encode()
            return Restore(self._context, active, instance, key, span, queue, self._lifetime)
        prefix = lookup.prefix(layout, request.tokens[:-1])
        with logged("looked up", request.id):
            num_tokens = lookup.find(prefix)
        if not num_tokens or not self._is_sooner_copied(num_tokens, layout):
            return NoRestore(current_time())
        key = prefix.key(num_tokens // layout.block_tokens // 2)
        return Restore(self._context, active, instance, key, span, queue, self._lifetime)

    def learn_first(self, active: ActiveRequest, num_reused: int, restored: Restore | NoRestore) -> None:
        """Learn from the first token of a stay what was kept, or what computing takes without a restore."""
        times, request = self._context.state.times, active.remaining
        if active.num_evicted:
            times.learn_return(request.num_tokens, num_reused)
        if isinstance(restored, NoRestore):
            seconds = current_time() - restored.since_s
            times.learn_first(request.model, request.num_tokens - num_reused, seconds)

    def _is_sooner_copied(self, num_tokens: int, layout: KVLayout) -> bool:
        """Whether restoring is expected to take less time than computing; a few are tried in any case."""
        times = self._context.state.times
        size_bytes = num_tokens * layout.block_bytes // layout.block_tokens + layout.state_bytes
        if times.restore_s(size_bytes) < times.compute_s(layout.model, num_tokens):
            return True
        self._num_not_copied += 1
        return self._num_not_copied % ONE_IN == 0


@asynccontextmanager
async def beside(
    offload: Offload | None, instance: Instance, saved: Saved, span: Span
) -> AsyncGenerator[None]:
    """Save full blocks of an instance while a block runs, whose errors are raised as they are."""
    async with tasks_beside() as tasks:
        if offload is not None:
            tasks.start_soon(offload.save_ahead, instance, saved, span)
        yield
