"""The fleet: where engines, a store, a router and a scheduler become one thing that serves models."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence, Set
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import anyio
from anyio import AsyncContextManagerMixin

from hotswap.action import DrainRecord, Migrate, MigrationRecord, MigrationWay, PinAdapters, SwapRecord
from hotswap.engine import Engine
from hotswap.errors import (
    ConfigError,
    FleetClosed,
    HotswapError,
    InvalidRequest,
    SwapRefused,
)
from hotswap.migration import Mover
from hotswap.model import Adapter, Model
from hotswap.request import AdapterId, FinishReason, ModelId, Request, RequestId, Sampling, Token
from hotswap.router import Router
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.admission import Seat, WaitingRoom
from hotswap.runtime.control import Control
from hotswap.runtime.dispatch import Dispatcher
from hotswap.runtime.drain import Drainer
from hotswap.runtime.flight import FleetStream, Flight, fly
from hotswap.runtime.houses import Houses
from hotswap.runtime.instance import Instance
from hotswap.runtime.metrics import LastView, observe_fleet
from hotswap.runtime.migrate import Migrator
from hotswap.runtime.move import MigrationLimits
from hotswap.runtime.observe import Observer
from hotswap.runtime.registry import Registry, check_servable, unique
from hotswap.runtime.roll import Roller, Streams
from hotswap.runtime.swap import SwapLimits
from hotswap.runtime.swapper import Swapper
from hotswap.scheduler import Scheduler
from hotswap.store import WeightStore
from hotswap.telemetry import Telemetry
from hotswap.view import FleetView, InstanceId, InstanceState

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from opentelemetry import metrics, trace

__all__ = ["Completion", "Fleet"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole generation: its text (empty without a tokenizer), its tokens, and why it ended."""

    text: str
    tokens: tuple[Token, ...]
    finish_reason: FinishReason


class Fleet(AsyncContextManagerMixin):
    """Serves `models` on `engines`, swapping them as `scheduler` says and routing as `router` says.

    `async with Fleet(...) as fleet` opens the store, starts the engines, imports models that the store
    lacks, and starts the control loop; leaving it ends the streams that are open by `FleetClosed` and gives
    everything back.

    Args:
        engines: the instances, each with an id of its own.
        store: where weights lie.
        models: what may be asked for.
        adapters: what requests for a model may name beside it; instances load them when they are asked for.
        router: chooses an instance for each request.
        scheduler: chooses models for instances, every `interval_s` and when a request waits for an unserved
            model.
        interval_s: seconds between plans.
        max_waiting: how many requests may wait at once before new ones that would have to are refused by
            `QueueFull`.
        max_load_attempts: failed loads in a row after which a model's waiting requests are told so.
        limits: seconds that each phase of a swap may take.
        on_swap: called with every `SwapRecord`, synchronously.
        mover: chooses how a request moves from one instance to another where nobody says it; without one KV
            blocks go along wherever both engines can move them.
        migration_limits: when a move is given up, and how many an instance may take part in.
        on_migration: called with every `MigrationRecord`, synchronously.
        tracer_provider: for spans; OpenTelemetry's global one by default.
        meter_provider: for metrics; likewise.
    """

    def __init__(
        self,
        *,
        engines: Iterable[Engine],
        store: WeightStore,
        models: Iterable[Model],
        adapters: Iterable[Adapter] = (),
        router: Router,
        scheduler: Scheduler,
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
    ) -> None:
        if not interval_s > 0:
            raise ConfigError(f"interval_s is {interval_s!r}; give seconds over 0.")
        self._registry = Registry(models, store)
        self._store = store
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._telemetry = Telemetry(tracer_provider, meter_provider)
        self._instances = unique(map(Instance, engines), lambda instance: instance.id, "engine")
        self._aliases: dict[ModelId, ModelId] = {}
        self._adapters = Adapters(
            adapters,
            models=lambda: self._registry.models,
            instances=self._instances,
            aliases=self._aliases,
            num_running=self._num_adapted,
            num_waiting=self._num_waiting,
            telemetry=self._telemetry,
        )
        self._flights: dict[RequestId, Flight] = {}
        self._num_flights = self._num_requests = 0
        self._name = uuid.uuid4().hex[:8]
        self._dispatcher = Dispatcher(
            router,
            self._instances,
            served=self._served,
            observe=lambda: self._observer.brief(),
            look=lambda instance: self._observer.counted(instance),
            on_release=lambda: self._room.wake(),
        )
        self._room = WaitingRoom(
            max_waiting=max_waiting,
            served=self._served,
            route=self._dispatcher.route,
            release=self._dispatcher.release,
            on_wait=self._ask_if_unserved,
        )
        self._swapper = Swapper(
            cards=self._registry.cards,
            store=store,
            instances=self._instances,
            room=self._room,
            limits=limits or SwapLimits(),
            max_load_attempts=max_load_attempts,
            telemetry=self._telemetry,
            on_change=self._changed,
            on_record=on_swap,
        )
        self._migrator = Migrator(
            limits=migration_limits or MigrationLimits(),
            mover=mover,
            card=self._registry.card,
            shelves=self._adapters.shelves,
            charge=self._dispatcher.charge,
            release=self._dispatcher.release,
            telemetry=self._telemetry,
            on_record=on_migration,
        )
        self._observer = Observer(
            instances=self._instances,
            cards=self._registry.cards,
            flights=self._flights,
            room=self._room,
            store=store,
            num_running=self._dispatcher.num_running,
            num_failed_loads=self._swapper.num_failed_loads,
            last_evicted_s=self._swapper.last_evicted_s,
            adapters=self._adapters.views,
        )
        self._drainer = Drainer(self._migrator, self._flights.values, self._would_route)
        self._houses = Houses()
        self._change = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._control: Control | None = None

    # -- life

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        error: Exception | None = None
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._store)
                for instance in self._instances.values():
                    await stack.enter_async_context(instance.engine)
                await stack.enter_async_context(self._houses)
                await self._registry.open()
                last_view = LastView(self._observer.brief, wanted=self._telemetry.measures)
                stack.callback(last_view.close)
                observe_fleet(self._telemetry, last_view)
                async with anyio.create_task_group() as tasks:
                    self._start(tasks, last_view)
                    try:
                        yield self
                    except Exception as exc:
                        error = exc
                    finally:
                        self._stop(tasks)
            except Exception as exc:  # engines' task groups would wrap what passes through them
                error = exc
        if error is not None:
            raise error

    def _start(self, tasks: TaskGroup, last_view: LastView) -> None:
        self._tasks = tasks
        self._control = Control(
            scheduler=self._scheduler,
            observe=self._observer.view,
            on_turn=last_view.keep,
            unsettled=self._observer.unsettled,
            instances=self._instances,
            store=self._store,
            swapper=self._swapper,
            migrate=self._migrate,
            hold=self._hold,
            tasks=tasks,
            telemetry=self._telemetry,
            interval_s=self._interval_s,
        )
        tasks.start_soon(self._control.run, name="hotswap control")

    def _stop(self, tasks: TaskGroup) -> None:
        self._tasks = self._control = None
        self._change.set()
        tasks.cancel_scope.cancel()
        for instance in self._instances.values():
            instance.settle_first_token(self._telemetry)

    # -- requests

    @asynccontextmanager
    async def stream(
        self,
        model: str,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[FleetStream]:
        """Ask a model to continue `prompt` and lend its stream; leaving the block ends the request.

        A text prompt needs a tokenizer beside the model's weights; token ids work always. A higher
        `priority` leaves the waiting room earlier. After `deadline_s` seconds the stream ends by
        `DeadlineExceeded`.

        Raises:
            UnknownModel: the model is not registered.
            UnknownAdapter: the model has no such adapter.
            InvalidRequest: the prompt is empty, or text without a tokenizer.
            PromptTooLong: the prompt leaves no room in the model's context.
            ModelTooLarge: no engine could ever hold the model.
            QueueFull: it would have to wait and too many do; it says when to come back.
            FleetClosed: the fleet is not open.
        """
        self._open_tasks()
        flight = await self._prepare(
            ModelId(model), prompt, sampling or Sampling(), adapter, priority, deadline_s
        )
        try:
            tasks = self._open_tasks()  # it may have closed while a text was encoded
            seat = self._room.enter(flight.request, refusable=True)
        except HotswapError as exc:
            flight.fail(exc)
            flight.end()
            raise
        tasks.start_soon(self._fly, flight, seat, name=f"flight {flight.request.id}")
        try:
            yield FleetStream(flight)
        finally:
            flight.scope.cancel()
            with anyio.CancelScope(shield=True):
                await flight.ended.wait()

    async def generate(
        self,
        model: str,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        adapter: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Completion:
        """Return the whole generation at once; arguments and errors are those of `stream`."""
        async with self.stream(
            model, prompt, sampling, adapter=adapter, priority=priority, deadline_s=deadline_s
        ) as stream:
            tokens = await stream.collect()
        reason = tokens[-1].finish_reason
        assert reason is not None
        return Completion(text="".join(t.text for t in tokens), tokens=tuple(tokens), finish_reason=reason)

    async def _prepare(
        self,
        model: ModelId,
        prompt: str | Sequence[int],
        sampling: Sampling,
        adapter: str | None,
        priority: int,
        deadline_s: float | None,
    ) -> Flight:
        model = self._aliases.get(model, model)
        card = self._registry.card(model)
        named = None if adapter is None else self._adapters.named(model, adapter)
        request = Request(
            id=self._next_id(),
            model=model,
            prompt=await self._registry.encode(model, prompt),
            sampling=sampling,
            adapter=None if named is None else named.version,
            priority=priority,
            arrived_s=anyio.current_time(),
        )
        check_servable(request, card, self._observer.memory_bytes)
        if named is not None:
            self._adapters.demand.ask(named)
        text = self._registry.text_stream(request)
        return Flight(request, adapter=named, telemetry=self._telemetry, text=text, deadline_s=deadline_s)

    def _next_id(self) -> RequestId:
        """Return an id that sorts as requests came, and that no other fleet gives."""
        self._num_requests += 1
        return RequestId(f"{self._name}-{self._num_requests:07d}")

    async def _fly(self, flight: Flight, seat: Seat) -> None:
        self._num_flights += 1
        flight.number = self._num_flights
        self._flights[flight.request.id] = flight
        try:
            await fly(
                flight,
                seat,
                room=self._room,
                shelves=self._adapters.shelves,
                release=self._dispatcher.release,
                on_lost=self._changed,
                telemetry=self._telemetry,
            )
        finally:
            del self._flights[flight.request.id]

    # -- routing

    def _served(self) -> Set[ModelId]:
        return self._observer.served()

    def _num_adapted(self, model: ModelId, adapter: AdapterId) -> int:
        return self._dispatcher.num_adapted[model, adapter]

    def _num_waiting(self, model: ModelId, adapter: AdapterId) -> int:
        return self._room.num_waiting(model, adapter)

    def _would_route(self, request: Request) -> Instance | None:
        return self._dispatcher.choose(request)

    def _ask_if_unserved(self, model: ModelId) -> None:
        """Wake the scheduler when somebody waits for a model that no instance serves or is turning to."""
        if self._control is not None and not self._observer.replicas(model):
            self._control.ask()

    def _changed(self) -> None:
        """An instance changed state: those who wait may go, and the scheduler may see it otherwise now."""
        self._change.set()
        self._change = anyio.Event()
        self._room.wake()
        if self._control is not None:
            self._control.ask()

    # -- by hand

    async def swap(
        self, instance: str, *, to: str, deadline_s: float = 0.0, reason: str = "by hand"
    ) -> SwapRecord:
        """Turn an instance to a model now; what runs on it gets `deadline_s` seconds, then moves on.

        Cancelling it leaves the instance SERVING the old model, EMPTY, or SERVING the new.

        Raises:
            UnknownModel, ConfigError: no such model, no such instance.
            SwapRefused: another swap has the instance, or it serves the model already.
            SwapFailed: a phase failed; the message says what the instance serves now.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        self._open_tasks()
        model = self._registry.card(ModelId(to)).id
        chosen = self._instance(instance)
        if chosen.view().model == model and chosen.view().state is InstanceState.SERVING:
            raise SwapRefused(f"Instance {instance!r} serves {to!r} already; nothing was done.")
        return await self._swap(chosen, model, deadline_s, reason)

    async def unload(self, instance: str, *, deadline_s: float = 0.0, reason: str = "by hand") -> SwapRecord:
        """Evict what runs on an instance within `deadline_s` and free its weights; errors as for `swap`."""
        return await self._swap(self._instance(instance), None, deadline_s, reason)

    async def _swap(
        self, instance: Instance, target: ModelId | None, deadline_s: float, reason: str
    ) -> SwapRecord:
        self._open_tasks()
        instance.claim(target)
        swap = self._swapper.run(instance, target, deadline_s=deadline_s, reason=reason)
        return await self._while_open(swap, f"the swap of instance {instance.id!r}")

    async def _while_open(self, work: Coroutine[object, object, _T], what: str) -> _T:
        """Return what `work` returns; a closing fleet cancels it and waits for it to end."""
        ended = anyio.Event()
        with anyio.CancelScope() as scope:
            self._open_tasks().start_soon(_end_with_fleet, scope, ended, name=what)
            try:
                return await work
            finally:
                ended.set()
        raise FleetClosed(f"The fleet closed before {what} ended; nothing is lost.")

    async def migrate(
        self, request: str, *, to: str, way: MigrationWay | None = None, reason: str = "by hand"
    ) -> MigrationRecord:
        """Move a request that runs to another instance of its model; its client notices a pause at most.

        Returns what became of it, which need not be a move: the request may end meanwhile, or stay where it
        is for a reason that the record gives. `way="kv"` takes its KV blocks along, `"tokens"` has them
        computed anew while it goes on; left out, the fleet's `mover` chooses. A cancellation leaves the
        request where it is, or lets it arrive.

        Args:
            request: its id, `stream.request.id`.
            to: an instance that serves its model.
            way: how.
            reason: for people.

        Raises:
            InvalidRequest, ConfigError: there is no such request, no such instance.
            MigrationAborted: nothing was begun, because it runs nowhere at this moment, or there already, or
                one of the instances takes part in another move, or the other is not open for it.
            FleetClosed: the fleet is not open.
        """
        self._open_tasks()
        flight = self._flights.get(RequestId(request))
        if flight is None:
            raise InvalidRequest(f"There is no request {request!r} under way; it may have ended.")
        move = self._migrator.run(flight, self._instance(to), way=way, reason=reason)
        return await self._while_open(move, f"the move of request {request!r}")

    def _migrate(self, action: Migrate) -> None:
        """As a plan asks for it; what has gone meanwhile is dropped."""
        flight, destination = self._flights.get(action.request), self._instances.get(action.destination)
        if flight is not None and destination is not None:
            move = partial(self._migrator.run_planned, way=action.way, reason=action.reason)
            self._open_tasks().start_soon(move, flight, destination, name=f"move {action.request}")

    def _hold(self, action: PinAdapters) -> None:
        self._open_tasks().start_soon(self._adapters.hold, action, name=f"adapters of {action.instance}")

    async def drain(
        self,
        instance: str,
        *,
        deadline_s: float | None = None,
        way: MigrationWay | None = None,
        reason: str = "by hand",
    ) -> DrainRecord:
        """Empty an instance of requests: no new ones come, and those that run move elsewhere, one by one.

        One for which no other instance has a place stays until one has or it ends; after `deadline_s` seconds
        those that are left wait for a place like others, their tokens with them. No request is refused or
        loses a token. The instance keeps its model and stays closed: `reopen` it, `swap` it, or `replace` it.
        A cancellation reopens it.

        Raises:
            ConfigError: there is no such instance.
            SwapRefused: it is drained already, or a swap has it.
            FleetClosed: the fleet is not open.
        """
        self._open_tasks()
        chosen = self._instance(instance)
        if chosen.draining or chosen.view().swapping:
            raise SwapRefused(f"Instance {instance!r} is drained or swapped already; wait for that to end.")
        chosen.draining = True
        try:
            drain = self._drainer.run(chosen, deadline_s=deadline_s, way=way, reason=reason)
            return await self._while_open(drain, f"the drain of instance {instance!r}")
        except BaseException:
            self.reopen(instance)
            raise

    def reopen(self, instance: str) -> None:
        """Let requests come to an instance again that was drained; nothing happens if it was not."""
        self._instance(instance).draining = False
        self._changed()

    async def add(self, engine: Engine) -> None:
        """Start an engine and take it in, EMPTY: schedulers see it from now on, `swap` gives it a model.

        Raises:
            ConfigError: the fleet has an instance of its name.
            FleetClosed: the fleet is not open.
        """
        self._open_tasks()
        if engine.id in self._instances:
            raise ConfigError(f"There is an instance {engine.id!r} already; give the engine another id.")
        instance = Instance(engine)
        await self._houses.move_in(instance)
        self._instances[instance.id] = instance
        self._observer.join(instance)
        self._changed()

    async def remove(
        self, instance: str, *, deadline_s: float | None = None, reason: str = "by hand"
    ) -> DrainRecord:
        """Drain an instance, unload it and let it go; an engine that came by `add` is stopped.

        One that the fleet was made with is left EMPTY and stops with the fleet. Errors and cancellation are
        those of `drain` and `unload`; the instance stays if one of them fails.
        """
        chosen = self._instance(instance)
        record = await self.drain(instance, deadline_s=deadline_s, reason=reason)
        try:
            if chosen.view().state is not InstanceState.EMPTY:
                await self._swap(chosen, None, 0.0, reason)
        except BaseException:
            self.reopen(instance)
            raise
        with anyio.CancelScope(shield=True):
            del self._instances[chosen.id]
            self._observer.leave(chosen)
            self._adapters.shelves.forget(chosen.id)
            await self._houses.move_out(chosen)
        self._changed()
        return record

    async def replace(
        self, instance: str, by: Engine, *, deadline_s: float | None = None, reason: str = "by hand"
    ) -> DrainRecord:
        """Put another engine in an instance's place: it loads the same model, then the requests move there.

        The new engine has a name of its own. If it cannot load, it goes again and nothing has changed; errors
        are those of `add`, `swap` and `remove`.
        """
        model = self._instance(instance).view().model
        await self.add(by)
        try:
            if model is not None:
                await self.swap(by.id, to=model, reason=reason)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.remove(by.id, deadline_s=0.0, reason=reason)
            raise
        return await self.remove(instance, deadline_s=deadline_s, reason=reason)

    async def roll(
        self, model: str, *, to: str, streams: Streams = "pinned", reason: str = "rolled"
    ) -> tuple[InstanceId, ...]:
        """Give a model new weights, one replica after the other; return the instances that turned.

        The new weights are a model of their own, `to`. As soon as one replica has them, new requests for
        `model` are served by `to`. Streams that run are `"pinned"` to the weights they began with: they move
        among the replicas that are left, and the last of these waits for its streams to end. Or they are
        `"moved"`: they go on with the new weights, what they have so far as their prompt. No request is
        refused. The least number of replicas goes over with the last.

        Cancelling it, or an error, leaves replicas of both: call it again to go on.

        Raises:
            UnknownModel: either is not registered.
            UnknownAdapter: `to` lacks an adapter that `model` has; requests name adapters by the same names.
            SwapFailed, SwapRefused: a replica could not turn; it serves, or is EMPTY, as the message says.
            FleetClosed: the fleet is not open, or closed meanwhile.
        """
        self._open_tasks()
        old, new = self._registry.card(ModelId(model)).id, self._registry.card(ModelId(to)).id

        self._adapters.check_roll(old, new)

        async def turn(instance: Instance, target: ModelId) -> None:
            try:
                await self._swap(instance, target, 0.0, reason)
            finally:
                self.reopen(instance.id)

        roller = Roller(
            lambda wanted: [i for i in self._instances.values() if _serves(i, wanted)],
            self._flights.values,
            lambda instance: self.drain(instance.id, reason=reason),
            turn,
            self._alias,
            lambda adapter: self._adapters.counterpart(adapter, new),
        )
        turned = await roller.run(old, new, streams)
        self._registry.hand_floor(old, new)
        return turned

    def _alias(self, old: ModelId, new: ModelId) -> None:
        """Have requests for `old`, and for what it serves, served by `new`, itself from now on."""
        others = {name: new if target == old else target for name, target in self._aliases.items()}
        self._aliases.clear()
        self._aliases.update({**others, old: new})
        self._aliases.pop(new, None)

    async def ready(self) -> None:
        """Return once every model has its `min_replicas` serving; at once if none asks for any.

        Waits for ever if the scheduler keeps no floors: bound it by `anyio.fail_after`.

        Raises:
            FleetClosed: the fleet is not open, or closes meanwhile.
        """
        self._open_tasks()
        while not self._observer.floors_hold():
            await self._change.wait()
            self._open_tasks()

    # -- what can be seen

    def view(self) -> FleetView:
        """The fleet at this moment, as schedulers see it; routers do not see what runs."""
        view = self._observer.view()
        view.settle()
        return view

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may name: add, update and remove them here while the fleet serves."""
        return self._adapters

    @property
    def migrations(self) -> tuple[MigrationRecord, ...]:
        """Records of the moves that ended, oldest first; the last 10,000 are kept."""
        return tuple(self._migrator.records)

    @property
    def swaps(self) -> tuple[SwapRecord, ...]:
        """Records of the swaps that ended, oldest first; the last 10,000 are kept."""
        return tuple(self._swapper.records)

    def _open_tasks(self) -> TaskGroup:
        if self._tasks is None:
            raise FleetClosed("The fleet is not open; use it inside `async with Fleet(...) as fleet`.")
        return self._tasks

    def _instance(self, instance: str) -> Instance:
        found = self._instances.get(InstanceId(instance))
        if found is None:
            known = ", ".join(map(repr, self._instances)) or "none"
            raise ConfigError(f"There is no instance {instance!r}; this fleet has {known}.")
        return found

    def __repr__(self) -> str:
        return f"<Fleet {self._observer}>"


def _serves(instance: Instance, model: ModelId) -> bool:
    view = instance.view()
    return view.state is InstanceState.SERVING and view.model == model and not view.swapping


async def _end_with_fleet(scope: anyio.CancelScope, ended: anyio.Event) -> None:
    """As a task of the fleet: cancel what runs outside of it when the fleet closes, and let it end first."""
    try:
        await ended.wait()
    finally:
        scope.cancel()
        with anyio.CancelScope(shield=True):
            await ended.wait()
