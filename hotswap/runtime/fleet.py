"""The fleet: engines, a store, a router and a scheduler as one thing that serves models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from anyio import AsyncContextManagerMixin

from hotswap.action import DrainRecord, MigrationMethod, MigrationRecord, SwapRecord
from hotswap.engine import Engine
from hotswap.kv_store import KVStore
from hotswap.loop_time import current_time
from hotswap.migration import Mover
from hotswap.model import Adapter, Model
from hotswap.request import ModelId
from hotswap.router import Router
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.core import Core
from hotswap.runtime.events import EventStream
from hotswap.runtime.models import Models
from hotswap.runtime.move import MigrationLimits
from hotswap.runtime.operations import RollStreams
from hotswap.runtime.requests import Requests
from hotswap.runtime.swap import SwapLimits
from hotswap.runtime.views import LiveView
from hotswap.scheduler import Scheduler
from hotswap.store import WeightStore
from hotswap.view import FleetView, InstanceId

if TYPE_CHECKING:
    from opentelemetry import metrics, trace

__all__ = ["Fleet"]


class Fleet(Requests, AsyncContextManagerMixin):
    """Serves `models` on `engines`, swapping them as `scheduler` says and routing as `router` says.

    `async with Fleet(...) as fleet` opens the store, starts the engines, imports models that the store
    lacks, and starts the control loop; leaving it ends the streams that are open by `FleetClosed` and gives
    everything back.

    Args:
        engines: the instances, each with an id of its own.
        store: where weights lie.
        models: what may be asked for.
        adapters: what requests for a model may name beside it; instances load them when they are asked for.
        router: chooses an instance for each request; by default the one with the least expected time to its
            first token (`LeastTimeRouter`).
        scheduler: chooses models for instances, every `interval_s` and when a request waits for an unserved
            model; by default a swap is made once waiting costs more (`CostSwap`).
        interval_s: seconds between plans.
        max_waiting: how many requests may wait at once before new ones that would have to are refused by
            `QueueFull`.
        max_load_attempts: failed loads in a row after which a model's waiting requests fail.
        limits: seconds that each phase of a swap may take.
        on_swap: called with every `SwapRecord`, synchronously.
        mover: chooses the method of a move for which no method is given; without a mover, requests move with
            their KV blocks if both engines support that.
        migration_limits: when a move is given up, and how many an instance may take part in.
        on_migration: called with every `MigrationRecord`, synchronously.
        tracer_provider, meter_provider: for spans and for metrics; OpenTelemetry's global ones by default.
        kv_store: keeps KV blocks of evicted and ended requests across swaps, so that they are copied in place
            of being computed again; the fleet opens and closes it. Without one they are lost.
        kv_write_through_s: every so many seconds full KV blocks of requests that run are saved, so that a
            request whose engine is lost computes only what came later; by default they are saved when a swap
            or a drain is to come.
        random: draws the seeds of requests that name none; by default each is another in every process.

    Raises `ConfigError` if an argument is wrong, by its name; the verbs do so before they do anything else,
    and `async with` on another event loop than asyncio's, as trio's.
    """

    def __init__(
        self,
        *,
        engines: Iterable[Engine],
        store: WeightStore,
        models: Iterable[Model],
        adapters: Iterable[Adapter] = (),
        router: Router | None = None,
        scheduler: Scheduler | None = None,
        interval_s: float = 1.0,
        max_waiting: int = 1024,
        max_load_attempts: int = 3,
        limits: SwapLimits | None = None,
        on_swap: Callable[[SwapRecord], None] | None = None,
        mover: Mover | None = None,
        migration_limits: MigrationLimits | None = None,
        on_migration: Callable[[MigrationRecord], None] | None = None,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
        kv_store: KVStore | None = None,
        kv_write_through_s: float | None = None,
        random: Random | None = None,
    ) -> None:
        from hotswap.policies.defaults import default_router, default_scheduler  # not by `import hotswap`

        self._core = Core(
            engines=engines,
            store=store,
            models=models,
            adapters=adapters,
            router=default_router() if router is None else router,
            scheduler=default_scheduler() if scheduler is None else scheduler,
            interval_s=interval_s,
            max_waiting=max_waiting,
            max_load_attempts=max_load_attempts,
            limits=limits,
            on_swap=on_swap,
            mover=mover,
            migration_limits=migration_limits,
            on_migration=on_migration,
            tracer_provider=tracer_provider,
            meter_provider=meter_provider,
            kv_store=kv_store,
            kv_write_through_s=kv_write_through_s,
            random=random,
        )

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        async with self._core:
            yield self

    # -- by hand

    async def swap(
        self, instance: str, *, to: str, deadline_s: float = 0.0, reason: str = "by hand"
    ) -> SwapRecord:
        """Turn an instance to a model now; what runs on it gets `deadline_s` seconds, then moves on.

        Cancelling it leaves the instance SERVING the old model, EMPTY, or SERVING the new.

        Raises:
            UnknownModel, ConfigError: no such model, no such instance, or an argument is wrong.
            SwapRefused: another swap has the instance, or it serves the model already.
            SwapFailed: a phase failed; the message says what the instance serves now.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        work = self._core.operations.swap(instance, to, deadline_s=deadline_s, reason=reason)
        return await self._core.lifetime.run(work, f"the swap of instance {instance!r}")

    async def unload(self, instance: str, *, deadline_s: float = 0.0, reason: str = "by hand") -> SwapRecord:
        """Evict what runs on an instance within `deadline_s` and free its weights; errors as for `swap`."""
        work = self._core.operations.unload(instance, deadline_s=deadline_s, reason=reason)
        return await self._core.lifetime.run(work, f"the unload of instance {instance!r}")

    async def resize(self, instance: str, *, kv_blocks: int, reason: str = "by hand") -> int:
        """Bring the KV pool of an instance as near to so many blocks as is possible; return those reached.

        For engines that share a `DeviceBudget`, or resize their pools themselves (`SupportsResize`, which
        says what is given first, and when the pool changes again). No request loses a token. A cancellation
        may leave the pool resized.

        Raises:
            ConfigError: there is no such instance, its engine cannot resize its pool, or `kv_blocks` is less
                than 1.
            InstanceError: the instance serves no model, a swap or a drain has it, or its engine failed or
                took longer than ten seconds.
            FleetClosed: the fleet is not open.
        """
        work = self._core.operations.resize(instance, kv_blocks, reason=reason)
        return await self._core.lifetime.run(work, f"the resize of instance {instance!r}")

    def cancel(self, request: str) -> None:
        """End a request wherever it is; its client gets `RequestCancelled`, and what it held is free.

        Args:
            request: its id, `stream.request.id`, or the `request_id` that was given; of several samples that
                of one, or that of the request, which ends all.

        Raises:
            InvalidRequest: there is no such request under way.
            FleetClosed: the fleet is not open.
        """
        self._core.lifetime.check_open()
        self._core.operations.cancel(request)

    async def migrate(
        self, request: str, *, to: str, method: MigrationMethod | None = None, reason: str = "by hand"
    ) -> MigrationRecord:
        """Move a request that runs to another instance of its model; its client notices a pause at most.

        Returns what became of it, which need not be a move: the request may end meanwhile, or stay where it
        is for a reason that the record gives. `method="kv"` takes its KV blocks along, `"tokens"` has them
        computed anew while it goes on; left out, the fleet's `mover` chooses. A cancellation leaves the
        request where it is, or lets it arrive.

        Args:
            request: its id, `stream.request.id`.
            to: an instance that serves its model.
            method: How the request moves; `None` leaves the choice to the fleet.
            reason: for people.

        Raises:
            InvalidRequest, ConfigError: there is no such request, no such instance.
            MigrationAborted: nothing was begun, because it runs nowhere at this moment, or there already, or
                one of the instances takes part in another move, or the other is not open for it.
            FleetClosed: the fleet is not open.
        """
        work = self._core.operations.migrate(request, to=to, method=method, reason=reason)
        return await self._core.lifetime.run(work, f"the move of request {request!r}")

    async def drain(
        self,
        instance: str,
        *,
        deadline_s: float | None = None,
        method: MigrationMethod | None = None,
        reason: str = "by hand",
    ) -> DrainRecord:
        """Empty an instance of requests: no new ones come, and those that run move elsewhere.

        As many move at a time as `MigrationLimits.per_instance` allows. One for which no other instance has a
        place stays until one has or it ends; after `deadline_s` seconds those that are left wait for a place
        like others, their tokens with them. No request is refused or loses a token. The instance keeps its
        model and stays closed: `reopen`, `swap`, `replace` or `remove` it. The first two end a drain that
        is under way as well, and leave the instance open; a cancellation reopens it.

        Raises:
            ConfigError: there is no such instance.
            SwapRefused: it is drained already, or a swap has it.
            FleetClosed: the fleet is not open.
        """
        work = self._core.operations.drain(instance, deadline_s=deadline_s, method=method, reason=reason)
        return await self._core.lifetime.run(work, f"the drain of instance {instance!r}")

    def reopen(self, instance: str) -> None:
        """Let requests come to an instance again that was drained; nothing happens if it was not."""
        self._core.lifetime.check_loop()
        self._core.operations.reopen(self._core.state.instance(instance))

    async def add(self, engine: Engine) -> None:
        """Start an engine and take it in, EMPTY: schedulers see it from now on, `swap` gives it a model.

        Raises:
            ConfigError: the fleet has an instance of its name, or the engine is in use already.
            FleetClosed: the fleet is not open.
        """
        await self._core.lifetime.run(self._core.operations.add(engine), "the start of an engine")

    async def remove(
        self, instance: str, *, deadline_s: float | None = None, reason: str = "by hand"
    ) -> DrainRecord:
        """Drain an instance, unload it, let it go and stop its engine.

        Errors and cancellation are those of `drain` and `unload`; the instance stays if one of them fails.
        `SwapRefused` ends it when the instance is swapped or reopened meanwhile, which stays then.
        An engine that fails as it stops has left all the same, and its error is raised as an
        `InstanceError`.
        """
        work = self._core.operations.remove(instance, deadline_s=deadline_s, reason=reason)
        return await self._core.lifetime.run(work, f"the removal of instance {instance!r}")

    async def replace(
        self, instance: str, by: Engine, *, deadline_s: float | None = None, reason: str = "by hand"
    ) -> DrainRecord:
        """Put another engine in an instance's place: it loads the same model, then the requests move there.

        The new engine has a name of its own. If it cannot load, it goes again and nothing has changed; errors
        are those of `add`, `swap` and `remove`.
        """
        work = self._core.operations.replace(instance, by, deadline_s=deadline_s, reason=reason)
        return await self._core.lifetime.run(work, f"the replacement of instance {instance!r}")

    async def roll(
        self, model: str, *, to: str, streams: RollStreams = "pinned", reason: str = "rolled"
    ) -> tuple[InstanceId, ...]:
        """Give a model new weights, one replica after the other; return the instances that have them.

        The new weights are a model of their own, `to`. As soon as one replica has them, new requests for
        `model`, and those that wait without a token, are served by `to`. Streams that have one are `"pinned"`
        to the weights they began with: they move among the replicas that are left, and the last waits for
        them. Or they are `"moved"`: they go on with the new weights, what they have so far as their prompt.
        No request is refused. The least number of replicas goes over with the last.

        Cancelling it, or an error, leaves replicas of both: call it again to go on.

        Raises:
            UnknownModel, ConfigError: either is not registered, or they are one.
            UnknownAdapter: `to` lacks an adapter that `model` has; requests name adapters by the same names.
            SwapFailed, SwapRefused: a replica was not swapped; it serves, or is EMPTY, as the message says.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        work = self._core.operations.roll(model, to=to, streams=streams, reason=reason)
        return await self._core.lifetime.run(work, f"the roll of model {model!r}")

    async def ready(self) -> None:
        """Return once every model has its `min_replicas` serving; at once if none asks for any.

        Waits for ever if the scheduler keeps no `min_replicas`: bound it by `anyio.fail_after`.

        Raises:
            FleetClosed: the fleet is not open, or closes meanwhile.
        """
        await self._core.lifetime.run(
            self._core.operations.min_replicas_served(), "the wait for min_replicas"
        )

    async def close_gracefully(self, deadline_s: float | None = None) -> int:
        """Admit no new request, and return once those that run or wait have ended; then leave the block.

        New requests end by `FleetClosed` at once; those left after `deadline_s` seconds do then, and their
        number is returned. Everything else works as before. A second call waits as well, and its deadline
        counts too. A cancellation has requests admitted again, unless another call still waits or has
        returned.

        Raises:
            ConfigError: `deadline_s` is no number of seconds.
            FleetClosed: the fleet is not open, or its block was left meanwhile.
        """
        return await self._core.lifetime.run(self._core.closing.run(deadline_s), "its graceful close")

    # -- what can be seen

    @property
    def is_open(self) -> bool:
        """Whether new requests are admitted: the block was entered, and is neither left nor closing."""
        return self._core.closing.admits

    def seconds_since_plan(self) -> float:
        """Seconds since the scheduler was asked last; far more than `interval_s` if the fleet hangs."""
        planned_s = self._core.control.planned_s
        return 0.0 if planned_s is None else current_time() - planned_s

    def events(self, after: int | None = None) -> EventStream:
        """Return what happens in the fleet as it happens: swaps, moves, losses, models that come and go.

        Args:
            after: The number of the last event that is known, which the stream begins after; 0 for all that
                are kept, `None` for those from now on.

        Raises:
            ConfigError: `after` is no number of an event.
            FleetClosed: the fleet is not open.
        """
        self._core.lifetime.check_open()
        return EventStream(self._core.state.events, self._core.lifetime, after)

    def view(self, *, running: bool = True) -> FleetView:
        """The fleet at this moment, as schedulers see it, or without the requests that run, as routers do."""
        self._core.lifetime.check_loop()
        self._core.state.refresh(progress=True)
        return LiveView.of(self._core.state, running=running).complete()

    @property
    def num_tokens(self) -> Mapping[ModelId, int]:
        """How many tokens the requests of each model have been given so far; other models have 0."""
        return MappingProxyType(self._core.state.num_tokens)

    @property
    def models(self) -> Models:
        """The models that requests may ask for: add and remove them here while the fleet serves."""
        return self._core.models

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may name: add, update and remove them here while the fleet serves."""
        return self._core.adapters

    @property
    def migrations(self) -> tuple[MigrationRecord, ...]:
        """Records of the moves that ended, oldest first; the last 10,000 are kept."""
        return tuple(self._core.moves.records)

    @property
    def swaps(self) -> tuple[SwapRecord, ...]:
        """Records of the swaps that ended, oldest first; the last 10,000 are kept."""
        return tuple(self._core.swaps.records)

    def __repr__(self) -> str:
        return f"<Fleet {self._core.state}>"
