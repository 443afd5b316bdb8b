"""The parts of a fleet, put together: what `Fleet` and the event simulation are made of."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Self

import anyio
from anyio import AsyncContextManagerMixin
from opentelemetry import metrics, trace

from hotswap import telemetry as tm
from hotswap.action import MigrationRecord, SwapRecord
from hotswap.chat import Chat
from hotswap.checks import (
    check_callables,
    check_kind,
    check_positive_seconds,
    check_priority,
    check_seconds,
    check_strings,
    shown,
    to_flag,
    to_objects,
)
from hotswap.engine import Engine
from hotswap.errors import ConfigError, HotswapError, InvalidRequest
from hotswap.kv_store import KVStore
from hotswap.loop_time import asyncio_loop, current_time
from hotswap.migration import Mover
from hotswap.model import Adapter, Model, ModelCard
from hotswap.request import ModelId, Request, RequestId
from hotswap.router import Router
from hotswap.runtime.adapter_cache import AdapterCaches
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.admission import Admission
from hotswap.runtime.closing import Closing
from hotswap.runtime.control import Control
from hotswap.runtime.entering import EnteringRequest
from hotswap.runtime.flow import ClientRequest, Flow
from hotswap.runtime.lifetime import Lifetime
from hotswap.runtime.losses import Losses
from hotswap.runtime.metrics import LastView, observe_fleet
from hotswap.runtime.models import Models
from hotswap.runtime.move import MigrationLimits
from hotswap.runtime.moves import Moves
from hotswap.runtime.offload import Offload
from hotswap.runtime.operations import Operations
from hotswap.runtime.queue import Standing
from hotswap.runtime.resizes import Resizes
from hotswap.runtime.samples import SampleGroup, samples_of
from hotswap.runtime.state import FleetState
from hotswap.runtime.supervisor import enter
from hotswap.runtime.swap import SwapLimits
from hotswap.runtime.swaps import Swaps
from hotswap.runtime.texts import ModelText, Texts
from hotswap.sampling import AS_MANY_AS_FIT, Sampling, to_sampling, with_checked
from hotswap.scheduler import Scheduler
from hotswap.store import WeightStore
from hotswap.telemetry import Telemetry

__all__ = ["Core", "NewRequest"]

_MAX_ID_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that has been checked, with the version of its adapter and the number of its arrival."""

    request: Request
    adapter: Adapter | None
    arrival: int


class Core(AsyncContextManagerMixin):
    """One fleet: its state, and the parts that act on it.

    Entering it opens the store, starts the engines, reads the models and starts the control loop; leaving it
    ends what is under way and gives everything back. The arguments are those of `Fleet`.
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
        kv_store: KVStore | None = None,
        kv_write_through_s: float | None = None,
        random: Random | None = None,
    ) -> None:
        check_positive_seconds(ConfigError, interval_s=interval_s)
        check_kind(ConfigError, "store", store, WeightStore)
        check_kind(ConfigError, "router", router, Router)
        check_kind(ConfigError, "scheduler", scheduler, Scheduler)
        check_callables(ConfigError, on_swap=on_swap, on_migration=on_migration)
        optional: dict[str, tuple[object, type]] = {
            "limits": (limits, SwapLimits),
            "mover": (mover, Mover),
            "migration_limits": (migration_limits, MigrationLimits),
            "tracer_provider": (tracer_provider, trace.TracerProvider),
            "meter_provider": (meter_provider, metrics.MeterProvider),
            "kv_store": (kv_store, KVStore),
            "random": (random, Random),
        }
        for name, (part, kind) in optional.items():
            if part is not None:
                check_kind(ConfigError, name, part, kind)
        engines = to_objects(ConfigError, "engines", engines, Engine)
        models = to_objects(ConfigError, "models", models, Model)
        adapters = to_objects(ConfigError, "adapters", adapters, Adapter)
        self._name = uuid.uuid4().hex[:8]
        self.telemetry = telemetry = Telemetry(tracer_provider, meter_provider, fleet=self._name)
        self.state = state = FleetState(store, kv_store, fleet=self._name)
        self.lifetime = Lifetime()
        limits = limits or SwapLimits()
        self.offload = Offload.of(state, self.lifetime, telemetry, limits.evict_s / 2, kv_write_through_s)
        self.closing = Closing(state, self.lifetime, self.offload)
        self.admission = Admission(state, router, max_waiting=max_waiting)
        self.caches = AdapterCaches(state, telemetry)
        self.texts = Texts(state.store, self.lifetime)
        self.adapters = Adapters(state, self.caches, self.lifetime, telemetry, self.texts)
        losses = Losses(state, telemetry)
        self.swaps = Swaps(
            state,
            self.admission,
            losses,
            limits=limits,
            max_load_attempts=max_load_attempts,
            telemetry=telemetry,
            offload=self.offload,
            on_record=on_swap,
        )
        self.moves = Moves(
            state,
            self.caches,
            limits=migration_limits or MigrationLimits(),
            mover=mover,
            telemetry=telemetry,
            on_record=on_migration,
        )
        self.models = Models(state, self.texts, self.swaps, self.adapters, self.lifetime)
        resizes = Resizes(state, telemetry)
        self.operations = Operations(
            state, self.admission, self.swaps, self.moves, self.adapters, self.caches, resizes, self.offload
        )
        self.flow = Flow(state, self.admission, self.caches, losses, telemetry, self.offload)
        self.control = Control(
            state,
            scheduler,
            self.swaps,
            self.moves,
            self.adapters,
            losses,
            resizes,
            interval_s=interval_s,
            telemetry=telemetry,
        )
        self._random = random or Random()
        for engine in engines:
            state.add(engine)
        self.models.register(models)
        for adapter in adapters:
            self.adapters.add(adapter)

    @asynccontextmanager
    async def __asynccontextmanager__(self) -> AsyncGenerator[Self]:
        asyncio_loop("A fleet")
        # Task groups, also those of engines, would wrap what passes through them: it is raised outside.
        error: BaseException | None = None
        async with AsyncExitStack() as stack:
            try:
                await enter(stack, self.state.store, "The store")
                if self.state.kv_store is not None:
                    await enter(stack, self.state.kv_store, "The KV store")
                await stack.enter_async_context(self.operations.supervisor)
                await self.operations.supervisor.start(*(one.engine for one in self.state.instances.values()))
                await self.models.open()
                last_view = LastView(self.state, wanted=self.telemetry.measures)
                stack.callback(last_view.close)
                observe_fleet(self.telemetry, last_view)
                async with anyio.create_task_group() as tasks:
                    self.lifetime.begin(tasks)
                    self.closing.begin()
                    self.state.events.open()
                    tasks.start_soon(self.control.run, tasks, last_view, name="hotswap control")
                    try:
                        yield self
                    except (anyio.get_cancelled_exc_class(), GeneratorExit):
                        raise
                    except BaseException as exc:
                        error = exc
                    finally:
                        self._stop(tasks)
                await self.closing.save()
            except Exception as exc:
                error = exc
        if error is not None:
            try:
                raise error
            finally:
                error = None  # or it and this frame keep each other, and with them the fleet

    def _stop(self, tasks: anyio.abc.TaskGroup) -> None:
        self.lifetime.end()
        self.state.events.close()
        self.state.wake()
        tasks.cancel_scope.cancel()
        for instance in self.state.instances.values():
            instance.end_first_token(self.telemetry)

    @asynccontextmanager
    async def running(
        self,
        model: str,
        prompt: str | Sequence[int] | Chat,
        sampling: Sampling | None,
        *,
        adapter: str | None,
        priority: int,
        deadline_s: float | None,
        add_special_tokens: bool | None,
        request_id: str | None,
        most_samples: int | None = None,
    ) -> AsyncGenerator[tuple[ClientRequest, ...]]:
        """Make a request of each sample that is asked for, and carry them until they end or the block does.

        Arguments and errors are those of `Fleet.samples`. More than `most_samples` are refused.
        """
        operation = tm.CHAT if isinstance(prompt, Chat) else tm.COMPLETION
        try:
            self.closing.check_admits()
            arrived_s = current_time()
            check_priority(InvalidRequest, priority)
            check_seconds(InvalidRequest, deadline_s=deadline_s)
            check_strings(InvalidRequest, model=model, adapter="" if adapter is None else adapter)
            to_flag("add_special_tokens", add_special_tokens, True)
            given = self._free_id(request_id)
            sampling = to_sampling(sampling)
            if most_samples is not None and sampling.n > most_samples:
                raise InvalidRequest(
                    f"n is {sampling.n}, but a stream is one sample; ask `samples` for a stream of each, or "
                    "`generate`."
                )
            name = self._served(model)
            self.state.card(name)
            at_s = arrived_s + (math.inf if deadline_s is None else deadline_s)
            entering = EnteringRequest(name, at_s, given)
            with self._under_way(entering):
                tokens, sampling, text = await self._read(
                    entering, model, prompt, sampling, adapter=adapter, add_special_tokens=add_special_tokens
                )
            new = self.new_request(
                entering.model,
                tokens,
                sampling,
                adapter=adapter,
                priority=priority,
                arrived_s=arrived_s,
                given_id=given,
            )
            self.lifetime.check_open()  # it may have closed meanwhile
        except Exception as exc:
            self.telemetry.refused(operation, self._registered(model), exc)
            raise
        requests = self._begin(new, text, operation=operation, deadline_s=deadline_s)
        try:
            yield requests
        finally:
            self.lifetime.check_loop()  # elsewhere the requests go on to their end
            for request in requests:
                request.scope.cancel()
            with anyio.CancelScope(shield=True):
                for request in requests:
                    await request.ended.wait()

    async def _read(
        self,
        entering: EnteringRequest,
        model: str,
        prompt: str | Sequence[int] | Chat,
        sampling: Sampling,
        *,
        adapter: str | None,
        add_special_tokens: bool | None,
    ) -> tuple[tuple[int, ...], Sampling, ModelText]:
        """Return a prompt and what is asked for in token ids, and how their texts are read."""
        while True:
            entering.model, named = self._named(model, adapter)
            text = self.texts.of(entering.model) if named is None else await self.texts.of_adapter(named)
            most = self.state.card(entering.model, closed=True).max_context_tokens - 1  # one has to follow
            tokens = await text.encode(
                prompt, sampling, add_special_tokens=add_special_tokens, most_tokens=most
            )
            resolved = await text.resolve(sampling)
            await text.check_grammar(sampling, [one.engine for one in self.state.instances.values()])
            # Meanwhile the model may have been rolled to another, or the adapter may have a new version.
            if (entering.model, named) == self._named(model, adapter):
                return tokens, resolved, text

    @contextmanager
    def _under_way(self, entering: EnteringRequest) -> Generator[None]:
        """Have a request be under way while its prompt is read, and end like others."""
        self.state.entering[entering] = None
        try:
            with entering.reading():
                yield
        finally:
            del self.state.entering[entering]
            self.state.wake()

    def _begin(
        self, new: NewRequest, text: ModelText, *, operation: str, deadline_s: float | None
    ) -> tuple[ClientRequest, ...]:
        """Queue the samples of a request, all or none, and start their tasks."""
        leader, *followers = samples_of(new.request)
        if taken := [sample.id for sample in (leader, *followers) if sample.id in self.state.requests]:
            raise _taken(taken[0])
        group = SampleGroup(new.request.id, leader.id) if followers else None
        make = partial(
            ClientRequest,
            adapter=new.adapter,
            arrival=new.arrival,
            operation=operation,
            telemetry=self.telemetry,
            text=text,
            deadline_s=deadline_s,
            samples=group,
        )
        first = make(leader)
        try:
            ticket = self.admission.enter(
                first.request, first.arrival, refusable=True, num_behind=len(followers)
            )
        except HotswapError as exc:
            first.fail(exc)
            first.end()
            raise
        others = [make(sample, index=index) for index, sample in enumerate(followers, 1)]
        standing = Standing(follows=group)
        tickets = [self.admission.enter(one.request, one.arrival, standing=standing) for one in others]
        for request, answer in zip((first, *others), (ticket, *tickets), strict=True):
            self.state.begin(request)
            name = f"request {request.request.id}"
            self.lifetime.tasks.start_soon(self.flow.run, request, answer, name=name)
        return (first, *others)

    def new_request(
        self,
        model: ModelId,
        prompt: tuple[int, ...],
        sampling: Sampling,
        *,
        adapter: str | None,
        priority: int,
        arrived_s: float,
        given_id: RequestId | None = None,
    ) -> NewRequest:
        """Check a request that has just come; an id that the fleet gives it sorts as requests came.

        It gets a seed if it needs one and has none, which it keeps for its whole life.

        Raises:
            UnknownModel, UnknownAdapter: the fleet has none of that name.
            InvalidRequest, PromptTooLong, ModelTooLarge: it could never be served.
        """
        model, named = self._named(model, adapter)
        card = self.state.card(model, closed=True)
        arrival = self.state.next_arrival()
        request = Request(
            id=given_id or RequestId(f"{self._name}-{arrival:07d}"),
            model=model,
            prompt=prompt,
            sampling=self._settled(sampling, card, len(prompt)),
            adapter=None if named is None else named.version,
            priority=priority,
            arrived_s=arrived_s,
        )
        self.models.check_servable(request)
        if named is not None:
            self.state.demand.ask(named)
        return NewRequest(request, named, arrival)

    def _free_id(self, id: str | None) -> RequestId | None:
        """Return the id that a client gives its request.

        Raises:
            InvalidRequest: it is none, or another request under way has it.
        """
        if id is None:
            return None
        check_strings(InvalidRequest, request_id=id)
        if not (0 < len(id) <= _MAX_ID_CHARACTERS and id.isascii() and id.isprintable()):
            raise InvalidRequest(
                f"request_id is {shown(id)}; give 1 to {_MAX_ID_CHARACTERS} printable characters of ASCII."
            )
        if self.state.under_way(RequestId(id)):
            raise _taken(id)
        return RequestId(id)

    def _registered(self, model: object) -> ModelId | None:
        """Return the id that a client gave, which may be of any type, if a model is called so."""
        return ModelId(model) if isinstance(model, str) and model in self.state.registered else None

    def _named(self, model: str, adapter: str | None) -> tuple[ModelId, Adapter | None]:
        """Return the model and the adapter that serve requests for these names now."""
        name = self._served(model)
        self.state.card(name, closed=True)
        return name, None if adapter is None else self.adapters.named(name, adapter)

    def _served(self, model: str) -> ModelId:
        """Return the model that serves requests for this name now."""
        return self.state.aliases.get(ModelId(model), ModelId(model))

    def _settled(self, sampling: Sampling, card: ModelCard, num_prompt_tokens: int) -> Sampling:
        """Return what is asked for with nothing left open."""
        if sampling.max_tokens == AS_MANY_AS_FIT:
            fitting = self.models.fitting(card, card.max_context_tokens - 1) + 1  # the last takes no KV block
            if (most := min(fitting - num_prompt_tokens, AS_MANY_AS_FIT)) > 0:
                most = max(most, sampling.min_tokens)
                least = min(sampling.min_tokens, most - bool(sampling.forced_end_tokens))
                sampling = with_checked(sampling, max_tokens=most, min_tokens=least)
        if sampling.seed is None and sampling.is_random:
            sampling = with_checked(sampling, seed=self._random.getrandbits(63))
        return sampling


def _taken(id: str) -> InvalidRequest:
    return InvalidRequest(f"request_id is {id!r}, and a request under way has it; give another.")
