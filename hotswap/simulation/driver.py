"""Plays one trace to a fleet: sends its requests, samples its instances, and keeps the outcome."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import anyio
from opentelemetry.metrics import NoOpMeterProvider

from hotswap.action import MigrationRecord, SwapRecord
from hotswap.backends.sim import SimEngine
from hotswap.errors import HotswapError, RequestCancelled
from hotswap.kv_store import KVStore
from hotswap.loop_time import current_time, sleep_until
from hotswap.migration import Mover
from hotswap.model import Adapter, Model
from hotswap.request import RequestId
from hotswap.router import Router
from hotswap.runtime import Fleet
from hotswap.runtime.move import MigrationLimits
from hotswap.sampling import Sampling
from hotswap.scheduler import Scheduler
from hotswap.simulation.cluster import Cluster
from hotswap.simulation.events import EventEngine, EventFleet, SimulatedRequest
from hotswap.simulation.outcome import Sample, Served
from hotswap.simulation.trace import Trace, TraceRequest
from hotswap.view import InstanceState

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["ClientDriver", "EventDriver", "Progress", "Scenario", "TraceDriver"]

Progress: TypeAlias = Callable[[int, int], None]
AnyFleet: TypeAlias = Fleet | EventFleet

# Samples of what instances hold are so many seconds apart at least, and further for more than so many
# engines; over a long trace there are so many of each.
_LEAST_SAMPLE_S, _FEW_ENGINES, _MOST_SAMPLES = 0.5, 1000, 1000

# What nothing serves for so long after the last arrival waits for ever; looked at so often.
UNSERVED_S, _LOOK_S = 3600.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is played: a trace, on a cluster, by these policies; arguments of `simulate`, which says more."""

    trace: Trace
    cluster: Cluster
    router: Router
    scheduler: Scheduler
    mover: Mover | None
    migration_limits: MigrationLimits | None
    kv_store: KVStore | None
    interval_s: float
    progress: Progress | None


class TraceDriver(ABC):
    """Plays a trace to a fleet, and keeps what became of it.

    Attributes:
        fleet: The kind of fleet.
        engine: The kind of its engines.
    """

    fleet: ClassVar[type[Fleet] | type[EventFleet]] = Fleet
    engine: ClassVar[type[SimEngine]] = SimEngine

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._trace = scenario, scenario.trace
        self.served: list[Served] = []
        self.swaps: list[SwapRecord] = []
        self.moves: list[MigrationRecord] = []
        self.samples: list[Sample] = []
        self.num_reused_tokens = 0
        self._numbers: dict[RequestId, int] = {}
        self._lost_s: defaultdict[int, float] = defaultdict(float)

    async def play(self) -> None:
        """Return when the last request has ended."""
        engines = self._scenario.cluster.engines(self.engine)
        for engine in engines:
            engine.watch_recoveries(self._recovered)
        fleet = self._make_fleet(engines)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fleet)
            beside = await stack.enter_async_context(anyio.create_task_group())
            beside.start_soon(self._look, engines)
            beside.start_soon(self._lose, {str(engine.id): engine for engine in engines})
            async with anyio.create_task_group() as clients:
                for number, request in enumerate(self._trace.requests):
                    await sleep_until(request.arrive_s)
                    self._send(fleet, number, request, clients)
                beside.start_soon(self._cut_off_unserved, engines, clients.cancel_scope)
                await self._ended()
            beside.cancel_scope.cancel()
        self.num_reused_tokens = sum(engine.num_reused_tokens for engine in engines)
        self.served.sort(key=lambda served: served.number)
        for number, lost_s in self._lost_s.items():
            self.served[number] = replace(self.served[number], preempted_s=lost_s)

    def _make_fleet(self, engines: Sequence[SimEngine]) -> AnyFleet:
        scenario, models = self._scenario, sorted(self._trace.models)
        adapters = sorted({(r.adapter, r.model) for r in self._trace.requests if r.adapter})
        return self.fleet(
            engines=engines,
            store=scenario.cluster.store(models),
            models=[Model(model, min_replicas=scenario.cluster.min_replicas) for model in models],
            adapters=itertools.starmap(Adapter, adapters),
            router=scenario.router,
            scheduler=scenario.scheduler,
            mover=scenario.mover,
            migration_limits=scenario.migration_limits,
            kv_store=scenario.kv_store,
            interval_s=scenario.interval_s,
            max_waiting=len(self._trace.requests),
            on_swap=self.swaps.append,
            on_migration=self.moves.append,
            meter_provider=NoOpMeterProvider(),  # without a reader no view has to be kept each turn
        )

    @abstractmethod
    def _send(self, fleet: AnyFleet, number: int, request: TraceRequest, clients: TaskGroup) -> None:
        """Have a request served."""

    async def _ended(self) -> None:  # noqa: B027  # clients are waited for already
        """Wait for requests that no task waits for."""

    async def _cut_off_unserved(self, engines: Sequence[SimEngine], requests: anyio.CancelScope) -> None:
        """End the requests once, for `UNSERVED_S`, none has run or ended."""
        idle_s, before = 0.0, 0
        while idle_s < UNSERVED_S:
            await sleep_until(current_time() + _LOOK_S)
            now = len(self.served)
            idle_s = idle_s + _LOOK_S if now == before and not any(map(_is_busy, engines)) else 0.0
            before = now
        requests.cancel()

    def _keep(
        self,
        number: int,
        *,
        num_tokens: int = 0,
        first_s: float | None = None,
        num_hops: int = 0,
        num_stalls: int = 0,
        error: Exception | None,
    ) -> None:
        request = self._trace.requests[number]
        self.served.append(
            Served(
                number=number,
                model=request.model,
                adapter=request.adapter,
                priority=request.priority,
                prompt_tokens=request.prompt_tokens,
                output_tokens=num_tokens,
                arrived_s=request.arrive_s,
                first_s=first_s,
                ended_s=current_time(),
                num_hops=num_hops,
                num_stalls=num_stalls,
                error="" if error is None else type(error).__name__,
            )
        )
        if self._scenario.progress is not None:
            self._scenario.progress(len(self.served), len(self._trace.requests))

    def _recovered(self, request: RequestId, seconds: float) -> None:
        if (number := self._numbers.get(request)) is not None:  # else of a move, in rounds
            self._lost_s[number] += seconds

    async def _look(self, engines: Sequence[SimEngine]) -> None:
        least_s = _LEAST_SAMPLE_S * max(1, len(engines) / _FEW_ENGINES)
        every_s = max(least_s, self._trace.seconds / _MOST_SAMPLES)
        for number in itertools.count():
            await sleep_until(number * every_s)
            now_s = current_time()
            self.samples += [_sample(engine, now_s) for engine in engines]

    async def _lose(self, engines: Mapping[str, SimEngine]) -> None:
        for at_s, engine in sorted(self._scenario.cluster.losses):
            await sleep_until(at_s)
            engines[engine].lose()


class ClientDriver(TraceDriver):
    """Every request has a client, a task that reads its stream."""

    def _send(self, fleet: AnyFleet, number: int, request: TraceRequest, clients: TaskGroup) -> None:
        assert isinstance(fleet, Fleet)
        clients.start_soon(self._ask, fleet, number, request)

    async def _ask(self, fleet: Fleet, number: int, request: TraceRequest) -> None:
        first_s: float | None = None
        num_tokens = num_hops = num_stalls = 0
        failed: Exception | None = RequestCancelled("No instance served it.")
        try:
            async with fleet.stream(
                request.model,
                request.prompt(number),
                _sampling(request.output_tokens),
                adapter=request.adapter or None,
                priority=request.priority,
            ) as stream:
                self._numbers[stream.request.id] = number
                async for _ in stream:
                    num_tokens += 1
                    first_s = current_time() if first_s is None else first_s
                num_hops, num_stalls = stream.num_hops, stream.num_stalls
            failed = None
        except HotswapError as exc:
            failed = exc
        finally:
            told = {"num_tokens": num_tokens, "num_hops": num_hops, "num_stalls": num_stalls}
            self._keep(number, **told, first_s=first_s, error=failed)


class EventDriver(TraceDriver):
    """Requests are counted by events: no client reads a token."""

    fleet = EventFleet
    engine = EventEngine

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._change = anyio.Event()
        self._fault: BaseException | None = None
        self._under_way: dict[int, SimulatedRequest] = {}

    async def play(self) -> None:
        # An error in a callback of the loop has no task to be raised in.
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self._fail(context))
        await super().play()

    def _fail(self, context: Mapping[str, object]) -> None:
        error = context.get("exception")
        self._fault = error if isinstance(error, BaseException) else RuntimeError(str(context.get("message")))
        self._change.set()

    def _send(self, fleet: AnyFleet, number: int, request: TraceRequest, clients: TaskGroup) -> None:
        assert isinstance(fleet, EventFleet)
        self._raise_fault()
        try:
            simulated = fleet.submit(
                request.model,
                request.prompt(number),
                _sampling(request.output_tokens),
                adapter=request.adapter or None,
                priority=request.priority,
                number=number,
                listener=self,
            )
            self._numbers[simulated.request.id] = number
            self._under_way[number] = simulated
        except HotswapError as exc:
            self._keep(number, error=exc)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def request_ended(self, request: SimulatedRequest) -> None:
        """Keep what became of a request; a fault that is none of hotswap's errors ends the simulation."""
        if request.error is not None and not isinstance(request.error, HotswapError):
            raise request.error
        stays = {} if request.error else {"num_hops": request.num_hops, "num_stalls": request.most_stalls}
        num_tokens, first_s = request.num_generated, request.first_s
        self._keep(request.number, num_tokens=num_tokens, first_s=first_s, **stays, error=request.error)
        del self._under_way[request.number]
        self._change.set()

    async def _ended(self) -> None:
        try:
            while len(self.served) < len(self._trace.requests):
                self._raise_fault()
                self._change = anyio.Event()
                await self._change.wait()
        finally:
            for request in tuple(self._under_way.values()):
                request.error = RequestCancelled("No instance served it.")
                self.request_ended(request)


def _is_busy(engine: SimEngine) -> bool:
    status = engine.status()
    return status.num_running + status.num_waiting > 0


@lru_cache(maxsize=4096)
def _sampling(output_tokens: int) -> Sampling:
    return Sampling(max_tokens=output_tokens, ignore_eos=True)


def _sample(engine: SimEngine, at_s: float) -> Sample:
    view = engine.status()
    held = view.num_kv_blocks - view.num_free_kv_blocks
    return Sample(
        at_s=at_s,
        instance=view.id,
        model="" if view.state is InstanceState.LOST else view.model or "",
        num_requests=view.num_running + view.num_waiting,
        kv_used=held / view.num_kv_blocks if view.num_kv_blocks else 0.0,
        memory_bytes=view.weight_bytes,
    )
