"""For any events of instances, clients read what an undisturbed run gives, and all resources are released."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import anyio
from anyio.abc import TaskGroup
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotswap import Fleet, InstanceState, MigrationMethod, Model, Request, Sampling, Token
from hotswap.backends.sim import SimEngine
from hotswap.errors import InvalidRequest, MigrationAborted, SwapFailed, SwapRefused
from hotswap.offline.virtual_time import VirtualTimeLoop, virtual_time
from tests.runtime.support import engine_of, expected, idle, sim_fleet, until

MODELS = ("a", "b", "c", "d")
METHODS: tuple[MigrationMethod | None, ...] = (None, "kv", "tokens")


@dataclass(eq=False)
class Client:
    """Reads one stream and keeps what it read; may leave before the end."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    leaves_after: int | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    tokens: list[Token] = field(default_factory=list)
    request: Request | None = None
    num_hops: int = 0
    done: bool = False

    async def run(self, fleet: Fleet) -> None:
        with self.scope:
            async with fleet.stream(self.model, self.prompt, self.sampling) as stream:
                self.request = stream.request
                async for token in stream:
                    self.tokens.append(token)
                    self.num_hops = stream.num_hops
                    if len(self.tokens) == self.leaves_after:
                        return
        self.done = not self.scope.cancelled_caught

    def check(self) -> None:
        """What was read so far is the beginning of an undisturbed run, and all of it for one that is done."""
        if self.request is None:
            return
        whole = expected(self.request)
        read = [token.id for token in self.tokens]
        assert read == (whole if self.done else whole[: len(read)])
        assert [token.index for token in self.tokens] == list(range(len(read)))
        finished = [token.finish_reason for token in self.tokens if token.finish_reason]
        assert len(finished) == int(self.done) or len(read) == len(whole)


async def swap(fleet: Fleet, instance: str, model: str, deadline_s: float) -> None:
    try:
        await fleet.swap(instance, to=model, deadline_s=deadline_s)
    except (SwapRefused, SwapFailed):
        return


def random_client(random: Random) -> Client:
    sampled = random.random() < 0.5
    max_tokens = random.randrange(1, 120)
    return Client(
        model=random.choice(MODELS),
        prompt=tuple(random.randrange(1, 99) for _ in range(random.randrange(1, 80))),
        sampling=Sampling(
            max_tokens=max_tokens,
            min_tokens=random.randrange(max_tokens + 1),
            temperature=0.8 if sampled else 0.0,
            seed=random.randrange(9),
        ),
        leaves_after=random.randrange(1, 30) if random.random() < 0.15 else None,
    )


async def move(fleet: Fleet, request: Request | None, to: str, method: MigrationMethod | None) -> None:
    """Move a request, if it can begin to."""
    if request is not None:
        with suppress(MigrationAborted, InvalidRequest):
            await fleet.migrate(request.id, to=to, method=method)


async def drain(fleet: Fleet, instance: str, deadline_s: float | None) -> None:
    """Drain an instance and reopen it, unless another operation has it."""
    with suppress(SwapRefused):
        await fleet.drain(instance, deadline_s=deadline_s)
        fleet.reopen(instance)


async def disturb(
    fleet: Fleet, engines: list[SimEngine], random: Random, times: int, names: tuple[str, ...] = MODELS
) -> None:
    """Swap, cancel swaps half way, and lose instances, at random."""
    for _ in range(times):
        await anyio.sleep(random.expovariate(8))
        engine = random.choice(engines)
        if random.random() < 0.25:
            if engine.status().state is not InstanceState.LOST:
                engine.lose("chaos")
        elif random.random() < 0.25:
            with anyio.move_on_after(random.random() * 0.3):
                await swap(fleet, engine.id, random.choice(names), random.choice([0, 0, 0.2]))
        else:
            await swap(fleet, engine.id, random.choice(names), random.choice([0, 0, 0.2]))


@virtual_time
async def test_a_thousand_random_swaps_cancellations_and_losses() -> None:
    random = Random(20)
    engines = [engine_of(f"e{n}", kv_blocks=40, kv_block_tokens=8) for n in range(4)]
    clients = [random_client(random) for _ in range(1500)]
    registered = [Model(name, min_replicas=int(name == "a")) for name in MODELS]
    async with sim_fleet(*MODELS, engines=engines, models=registered) as fleet:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb, fleet, engines, random, 1000)
            for client in clients:
                await anyio.sleep(random.expovariate(12))
                tasks.start_soon(client.run, fleet)
        for client in clients:
            client.check()
        assert all(client.done or client.leaves_after for client in clients)
        idle(fleet)
        assert sum(client.num_hops > 1 for client in clients) > 500
        assert {record.outcome for record in fleet.swaps} == {"done", "failed", "cancelled"}
        assert sum(record.num_evicted for record in fleet.swaps) > 500


async def move_about(fleet: Fleet, random: Random, times: int) -> None:
    """Move requests to other instances of their models, drain some, and break off half way, at random."""
    for _ in range(times):
        await anyio.sleep(random.expovariate(20))
        view = fleet.view()
        places = [
            (running, there)
            for running in view.running
            for there in view.serving(running.model)
            if there.id != running.instance
        ]
        with anyio.move_on_after(random.choice([10.0, random.random() * 0.05])):
            if random.random() < 0.1:
                await drain(fleet, random.choice(view.instances).id, random.choice([0.0, 0.1, 1.0]))
            elif places:
                running, there = random.choice(places)
                with suppress(MigrationAborted, InvalidRequest):
                    await fleet.migrate(running.id, to=there.id, method=random.choice(METHODS))


@virtual_time
async def test_a_thousand_random_moves_among_swaps_and_losses() -> None:
    random = Random(21)
    engines = [engine_of(f"e{n}", kv_blocks=40, kv_block_tokens=8) for n in range(5)]
    clients = [replace(random_client(random), model=random.choice(MODELS[:2])) for _ in range(1500)]
    async with sim_fleet(*MODELS[:2], engines=engines) as fleet:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb, fleet, engines, random, 200, MODELS[:2])
            for _ in range(3):
                tasks.start_soon(move_about, fleet, random, 1000)
            for client in clients:
                await anyio.sleep(random.expovariate(12))
                tasks.start_soon(client.run, fleet)
        for client in clients:
            client.check()
        assert all(client.done or client.leaves_after for client in clients)
        await until(lambda: not any(instance.num_requests for instance in fleet.view().instances))
        idle(fleet)
        done = Counter(record.method for record in fleet.migrations if record.outcome == "done")
        assert done["kv"] > 500
        assert {record.outcome for record in fleet.migrations} >= {"done", "aborted", "cancelled", "finished"}


class FleetMachine(RuleBasedStateMachine):
    """Looks for an order of requests, departures, swaps and losses that loses or doubles a token."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.clients: list[Client] = []
        self.swaps: list[anyio.CancelScope] = []

    def do(self, step: Coroutine[Any, Any, None]) -> None:
        self.runner.run(step)

    @initialize(engines=st.integers(1, 3), max_requests=st.integers(1, 4), kv_blocks=st.integers(16, 40))
    def open(self, engines: int, max_requests: int, kv_blocks: int) -> None:
        self.engines = [
            engine_of(f"e{n}", max_requests=max_requests, kv_blocks=kv_blocks, kv_block_tokens=8)
            for n in range(engines)
        ]
        self.fleet = sim_fleet(*MODELS[:3], engines=self.engines)
        self.do(self._open())

    async def _open(self) -> None:
        self.closing, self.opened, self.closed = anyio.Event(), anyio.Event(), anyio.Event()
        self.life = asyncio.get_running_loop().create_task(self._live())
        await self.opened.wait()

    async def _live(self) -> None:
        async with self.fleet, anyio.create_task_group() as tasks:
            self.tasks: TaskGroup = tasks
            self.opened.set()
            await self.closing.wait()

    @rule(
        model=st.sampled_from(MODELS[:3]),
        prompt=st.lists(st.integers(1, 99), min_size=1, max_size=40).map(tuple),
        max_tokens=st.integers(1, 40),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def ask(self, model: str, prompt: tuple[int, ...], max_tokens: int, temperature: float) -> None:
        self.do(self._start(model, prompt, Sampling(max_tokens=max_tokens, temperature=temperature, seed=7)))

    async def _start(self, model: str, prompt: tuple[int, ...], sampling: Sampling) -> None:
        client = Client(model, prompt, sampling)
        self.clients.append(client)
        self.tasks.start_soon(client.run, self.fleet)

    @precondition(lambda self: any(not client.done for client in self.clients))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([client for client in self.clients if not client.done]))
        self.do(self._cancel(client.scope))

    @rule(data=st.data(), model=st.sampled_from(MODELS[:3]), deadline_s=st.sampled_from([0.0, 0.05]))
    def swap(self, data: st.DataObject, model: str, deadline_s: float) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        self.do(self._begin(lambda: swap(self.fleet, engine.id, model, deadline_s)))

    async def _begin(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start something by hand that may be cancelled."""
        scope = anyio.CancelScope()
        self.swaps.append(scope)

        async def scoped() -> None:
            with scope:
                await work()

        self.tasks.start_soon(scoped)

    @precondition(lambda self: any(not client.done for client in self.clients))
    @rule(data=st.data(), method=st.sampled_from([None, "kv", "tokens"]))
    def move(self, data: st.DataObject, method: MigrationMethod | None) -> None:
        client = data.draw(st.sampled_from([client for client in self.clients if not client.done]))
        engine = data.draw(st.sampled_from(self.engines))
        self.do(self._begin(lambda: move(self.fleet, client.request, engine.id, method)))

    @rule(data=st.data(), deadline_s=st.sampled_from([0.0, 0.1]))
    def drain(self, data: st.DataObject, deadline_s: float) -> None:
        engine = data.draw(st.sampled_from(self.engines))
        self.do(self._begin(lambda: drain(self.fleet, engine.id, deadline_s)))

    @precondition(lambda self: self.swaps)
    @rule()
    def cancel_swap(self) -> None:
        self.do(self._cancel(self.swaps.pop()))

    async def _cancel(self, scope: anyio.CancelScope) -> None:
        scope.cancel()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.do(self._lose(data.draw(st.sampled_from(self.engines))))

    async def _lose(self, engine: SimEngine) -> None:
        engine.lose("chaos")

    @rule(seconds=st.sampled_from([0.0, 0.001, 0.015, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.do(anyio.sleep(seconds))

    @invariant()
    def every_prefix_is_right(self) -> None:
        for client in self.clients:
            client.check()

    def teardown(self) -> None:
        if hasattr(self, "fleet"):
            self.do(self._close())
        self.runner.close()

    async def _close(self) -> None:
        try:
            await until(lambda: all(client.done or client.scope.cancel_called for client in self.clients))
            await until(lambda: not any(instance.swapping for instance in self.fleet.view().instances))
            for client in self.clients:
                client.check()
            idle(self.fleet)
        finally:
            self.closing.set()
            await self.life


TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
