"""A fleet on simulated engines, driven by a trace in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import anyio

from hotswap.action import MigrationRecord, SwapRecord
from hotswap.backends.sim import SimEngine, SimStore, sim_manifest
from hotswap.errors import ConfigError, HotswapError
from hotswap.migration import Mover
from hotswap.model import Adapter, Model
from hotswap.request import Sampling
from hotswap.router import Router
from hotswap.runtime import Fleet
from hotswap.scheduler import Scheduler
from hotswap.simulation.outcome import Outcome, Sample, Served
from hotswap.simulation.profiles import PROFILES, Profile
from hotswap.simulation.trace import Trace, TraceRequest
from hotswap.testing.virtual_time import run
from hotswap.view import InstanceState, TierView

__all__ = ["Cluster", "simulate"]

Progress = Callable[[int, int], None]

# Of simulated reads, whose content is real and takes memory.
_CHUNK_BYTES = 64 << 20
# Seconds between two samples of what instances hold, at least; over a long trace there are this many of them.
_LEAST_SAMPLE_S, _MOST_SAMPLES = 0.5, 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What is simulated: so many engines of one profile, and a store behind them.

    Attributes:
        num_engines: Instances, `e0` and so on.
        profile: Their device and the size of every model; a name of `PROFILES` will do.
        host_bytes: Room of the host tier for weights; `None` is without bound, 0 none.
        host_bytes_per_s: What the host tier reads at.
        disk_bytes_per_s: What the disk that holds every model reads at.
        token_budget: Tokens of a step.
        max_requests: Sequences of a batch.
        max_adapters: Adapters that an engine holds at once.
        min_replicas: The floor of every model.
        max_context_tokens: The longest request.
        losses: When which engine is lost: pairs of seconds and its id. A fleet brings it back.
    """

    num_engines: int = 4
    profile: Profile | str = "h100-llama-3.1-8b"
    host_bytes: int | None = None
    host_bytes_per_s: float = 50e9
    disk_bytes_per_s: float = 5e9
    token_budget: int = 2048
    max_requests: int = 256
    max_adapters: int = 8
    min_replicas: int = 0
    max_context_tokens: int = 131_072
    losses: tuple[tuple[float, str], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ConfigError(f"num_engines is {self.num_engines!r}; give 1 or more.")
        if isinstance(self.profile, str) and self.profile not in PROFILES:
            raise ConfigError(f"There is no profile {self.profile!r}; there are {', '.join(PROFILES)}.")
        engines = {f"e{number}" for number in range(self.num_engines)}
        if unknown := sorted({engine for _, engine in self.losses} - engines):
            raise ConfigError(
                f"losses name {', '.join(unknown)}; the engines are e0 to e{self.num_engines - 1}."
            )

    @property
    def measured(self) -> Profile:
        """The profile itself."""
        return PROFILES[self.profile] if isinstance(self.profile, str) else self.profile

    def engines(self) -> list[SimEngine]:
        """Return new engines."""
        profile = self.measured
        return [
            SimEngine(
                f"e{number}",
                profile.device,
                kv_blocks=profile.kv_blocks,
                max_requests=self.max_requests,
                token_budget=self.token_budget,
                max_adapters=self.max_adapters,
            )
            for number in range(self.num_engines)
        ]

    def store(self, models: Sequence[str]) -> SimStore:
        """Return a new store that holds the models on its disk, and none in host memory."""
        profile = self.measured
        facts = {
            "max_context_tokens": self.max_context_tokens,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
        }
        host = TierView(name="host", bytes_per_s=self.host_bytes_per_s, capacity_bytes=self.host_bytes)
        return SimStore(
            [sim_manifest(model, profile.weight_bytes, **facts) for model in models],
            home=TierView(name="disk", bytes_per_s=self.disk_bytes_per_s),
            cache=None if self.host_bytes == 0 else host,
            chunk_bytes=_CHUNK_BYTES,
        )


def simulate(
    trace: Trace,
    cluster: Cluster,
    *,
    router: Router,
    scheduler: Scheduler,
    mover: Mover | None = None,
    interval_s: float = 1.0,
    name: str = "",
    progress: Progress | None = None,
) -> Outcome:
    """Play a trace to a fleet of the cluster until its last request has ended, and return what became of it.

    The fleet is the one of production, and knows nothing of it. Requests that fail are part of the outcome.
    Prompts are made when they arrive and forgotten when they end. `progress` is told how many requests have
    ended, of how many. An hour of 100 engines takes minutes: a token is a few turns of the event loop.

    Raises:
        ConfigError: the trace is empty, or the fleet refuses the cluster.
        VirtualTimeDeadlock: nothing could go on, which a policy that awaits something real would do.
    """
    if not trace.requests:
        raise ConfigError(f"{trace.name!r} has no requests; nothing would happen.")
    course = _Course(trace, cluster, progress)
    fleet = partial(
        Fleet,
        router=router,
        scheduler=scheduler,
        mover=mover,
        interval_s=interval_s,
        max_waiting=len(trace.requests),
        on_swap=course.swaps.append,
        on_migration=course.moves.append,
    )
    run(course.play, fleet)
    return Outcome(
        name=name or repr(scheduler),
        trace=trace.name,
        settings={
            "router": repr(router),
            "scheduler": repr(scheduler),
            "interval_s": interval_s,
            "num_engines": cluster.num_engines,
            "device": cluster.measured.device.name,
        },
        requests=tuple(course.served),
        swaps=tuple(course.swaps),
        migrations=tuple(course.moves),
        samples=tuple(course.samples),
    )


class _Course:
    """One run: who sends requests, who looks at instances, and what they have seen."""

    def __init__(self, trace: Trace, cluster: Cluster, progress: Progress | None) -> None:
        self._trace, self._cluster, self._progress = trace, cluster, progress
        self.served: list[Served] = []
        self.swaps: list[SwapRecord] = []
        self.moves: list[MigrationRecord] = []
        self.samples: list[Sample] = []

    async def play(self, make_fleet: Callable[..., Fleet]) -> None:
        models = sorted(self._trace.models)
        adapters = sorted({(r.adapter, r.model) for r in self._trace.requests if r.adapter})
        engines = self._cluster.engines()
        fleet = make_fleet(
            engines=engines,
            store=self._cluster.store(models),
            models=[Model(model, min_replicas=self._cluster.min_replicas) for model in models],
            adapters=itertools.starmap(Adapter, adapters),
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(fleet)
            beside = await stack.enter_async_context(anyio.create_task_group())
            beside.start_soon(self._look, engines)
            beside.start_soon(self._lose, {str(engine.id): engine for engine in engines})
            async with anyio.create_task_group() as clients:
                for number, request in enumerate(self._trace.requests):
                    await anyio.sleep_until(request.arrive_s)
                    clients.start_soon(self._ask, fleet, number, request)
            beside.cancel_scope.cancel()
        self.served.sort(key=lambda served: served.number)

    async def _ask(self, fleet: Fleet, number: int, request: TraceRequest) -> None:
        arrived_s = anyio.current_time()
        first_s, num_tokens, num_hops, error = None, 0, 0, ""
        sampling = Sampling(max_tokens=request.output_tokens, ignore_eos=True)
        try:
            async with fleet.stream(
                request.model,
                request.prompt(number),
                sampling,
                adapter=request.adapter or None,
                priority=request.priority,
            ) as stream:
                async for _ in stream:
                    num_tokens += 1
                    first_s = anyio.current_time() if first_s is None else first_s
                num_hops = stream.num_hops
        except HotswapError as exc:
            error = type(exc).__name__
        self.served.append(
            Served(
                number=number,
                model=request.model,
                adapter=request.adapter,
                priority=request.priority,
                prompt_tokens=request.prompt_tokens,
                output_tokens=num_tokens,
                arrived_s=arrived_s,
                first_s=first_s,
                ended_s=anyio.current_time(),
                num_hops=num_hops,
                error=error,
            )
        )
        if self._progress is not None:
            self._progress(len(self.served), len(self._trace.requests))

    async def _look(self, engines: Sequence[SimEngine]) -> None:
        every_s = max(_LEAST_SAMPLE_S, self._trace.seconds / _MOST_SAMPLES)
        for number in itertools.count():
            await anyio.sleep_until(number * every_s)
            for engine in engines:
                view = engine.view()
                lost = view.state is InstanceState.LOST
                self.samples.append(
                    Sample(
                        at_s=anyio.current_time(),
                        instance=view.id,
                        model="" if lost else view.model or "",
                        num_requests=view.num_running + view.num_waiting,
                        kv_used=1 - view.num_free_kv_blocks / view.num_kv_blocks
                        if view.num_kv_blocks
                        else 0.0,
                        memory_bytes=view.weight_bytes,
                    )
                )

    async def _lose(self, engines: Mapping[str, SimEngine]) -> None:
        for at_s, engine in sorted(self._cluster.losses):
            await anyio.sleep_until(at_s)
            engines[engine].lose()
