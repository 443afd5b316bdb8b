"""The queue of requests: its order, that none starves, and that its length costs nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import anyio
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from hotswap import Adapter, AdapterId, Fleet, ModelId, Request, RequestId, Sampling
from hotswap.abc import Engine, Scheduler, WrapperEngine
from hotswap.backends.sim import SimEngine
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from hotswap.runtime.queue import Queue
from tests.runtime.counting import CountingRouter, counted_calls
from tests.runtime.support import PROFILE, Idle, engine_of, idle, models, sim_fleet, until

ONE = Sampling(max_tokens=1, ignore_eos=True)
A = ModelId("a")
LEVEL = 64  # places that a level of priority is worth, as docs/engine.md promises of engines

# ---------------------------------------------------------------- no level starves


class Stream:
    """Requests of one priority that keep coming, more than an engine of one place can serve."""

    num_clients = 3

    def __init__(self, fleet: Fleet, priority: int, adapter: str | None, *, most: int) -> None:
        self.fleet, self.priority, self.adapter, self.most = fleet, priority, adapter, most
        self.num_served, self.ended = 0, False

    async def client(self) -> None:
        while not self.ended and self.num_served < self.most:
            await self.fleet.generate("a", (1,), ONE, priority=self.priority, adapter=self.adapter)
            self.num_served += 1


async def overtaken(high: int, low: int, adapters: tuple[str | None, str | None], num_low: int) -> list[int]:
    """How many requests of a stream were served between the arrival of one below and its own end, of each."""
    counts: list[int] = []
    async with sim_fleet(
        "a",
        engines=[engine_of("e0", max_requests=1)],
        scheduler=Idle(),
        adapters=[Adapter("x", "a"), Adapter("y", "a")],
    ) as fleet:
        await fleet.swap("e0", to="a")
        stream = Stream(fleet, high, adapters[0], most=4 * LEVEL * (high - low) + 200)

        async def below() -> None:
            before = stream.num_served
            await fleet.generate("a", (2,), ONE, priority=low, adapter=adapters[1])
            counts.append(stream.num_served - before)

        async with anyio.create_task_group() as clients:
            for _ in range(stream.num_clients):
                clients.start_soon(stream.client)
            await anyio.sleep(0.5)
            assert len(fleet.view().waiting) == stream.num_clients - 1
            async with anyio.create_task_group() as others:
                for _ in range(num_low):
                    others.start_soon(below)
            stream.ended = True
        idle(fleet)
    return counts


@pytest.mark.parametrize("adapters", [(None, None), ("x", None), (None, "x"), ("x", "y")])
@pytest.mark.parametrize(("high", "low", "num_low"), [(1, 0, 1), (1, 0, 10), (3, 1, 10), (0, -1, 10)])
def test_a_request_is_overtaken_by_a_bounded_number_of_a_higher_priority(
    high: int, low: int, num_low: int, adapters: tuple[str | None, str | None]
) -> None:
    counts = run(overtaken, high, low, adapters, num_low)
    assert len(counts) == num_low
    assert max(counts) <= LEVEL * (high - low) + Stream.num_clients + num_low


@virtual_time
async def test_of_requests_that_came_at_about_the_same_time_the_highest_priority_goes_first() -> None:
    served: list[int] = []

    async def client(fleet: Fleet, priority: int) -> None:
        await fleet.generate("a", (1,), ONE, priority=priority)
        served.append(priority)

    async with (
        sim_fleet("a", engines=[engine_of("e0", max_requests=1)], scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        for number in range(40):
            clients.start_soon(client, fleet, number % 4)
            await anyio.sleep(0.01)
        await fleet.swap("e0", to="a")
    assert served == sorted(served, reverse=True)


@virtual_time
async def test_a_request_that_was_evicted_goes_before_those_that_came_after_it() -> None:
    served: list[int] = []

    async def client(fleet: Fleet, number: int, max_tokens: int) -> None:
        await fleet.generate("a", (1, number), Sampling(max_tokens=max_tokens, ignore_eos=True))
        served.append(number)

    async with (
        sim_fleet("a", "b", engines=[engine_of("e0", max_requests=1)], scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        await fleet.swap("e0", to="a")
        clients.start_soon(client, fleet, 0, 50)
        for number in range(1, 6):
            await anyio.sleep(0.01)
            clients.start_soon(client, fleet, number, 2)
        await anyio.sleep(0.1)
        await fleet.swap("e0", to="b")
        await fleet.swap("e0", to="a")
    assert served == [0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------- a thousand adapters


def holding(name: str, *, max_adapters: int = 1000) -> SimEngine:
    return SimEngine(name, PROFILE, kv_blocks=4096, max_requests=4, max_adapters=max_adapters)


async def questions(engines: Mapping[str, Sequence[Engine]], num_adapters: int, num_each: int) -> float:
    """How often the router is asked for each request, where all wait before the first is served.

    `engines` are those that serve each model; each model has as many adapters, and requests for each.
    """
    router = CountingRouter(LeastLoadedRouter())
    names = [f"x{number}" for number in range(num_adapters)]
    async with sim_fleet(
        *engines,
        engines=[engine for serving in engines.values() for engine in serving],
        scheduler=Idle(),
        router=router,
        adapters=[Adapter(name, model) for model in engines for name in names],
        max_waiting=5000,
    ) as fleet:
        async with anyio.create_task_group() as clients:
            for model in engines:
                for number in range(num_each):
                    for name in names:
                        ask = partial(fleet.generate, model, (1, number), ONE, adapter=name)
                        clients.start_soon(ask)
            num_requests = len(engines) * num_adapters * num_each
            await until(lambda: len(fleet.view().waiting) == num_requests)
            for model, serving in engines.items():
                for engine in serving:
                    await fleet.swap(engine.id, to=model)
        idle(fleet)
    return router.num_questions / num_requests


@pytest.mark.parametrize(("num_adapters", "num_each"), [(1000, 1), (100, 10)])
def test_requests_with_many_adapters_ask_the_router_a_few_times_each(
    num_adapters: int, num_each: int
) -> None:
    assert run(questions, {"a": [holding("e0")]}, num_adapters, num_each) <= 5


def test_requests_with_many_adapters_of_two_models_ask_the_router_a_few_times_each() -> None:
    assert run(questions, {"a": [holding("e0")], "b": [holding("e1")]}, 500, 1) <= 5


def test_an_open_instance_that_holds_no_adapters_has_no_request_with_one_asked_about() -> None:
    plain = WrapperEngine(engine_of("plain"))
    assert run(questions, {"a": [plain, holding("e0")]}, 200, 1) <= 5


def test_requests_with_more_adapters_than_an_engine_holds_ask_the_router_a_few_times_each() -> None:
    assert run(questions, {"a": [holding("e0", max_adapters=8)]}, 300, 1) <= 5


# ---------------------------------------------------------------- ten thousand requests

FEW, MANY, SOME = 100, 10_000, 50

Waiting: TypeAlias = tuple[Fleet, TaskGroup]


@asynccontextmanager
async def queue_of(num_waiting: int, scheduler: Scheduler, **options: Any) -> AsyncGenerator[Waiting]:
    """A fleet with one slow engine of four places, and so many requests for model a."""
    engine = SimEngine("e0", replace(PROFILE, floor_s=0.05), kv_blocks=512, max_requests=4)
    # Without turns by the clock: those that events ask for are what a request costs.
    options = {"engines": [engine], "max_waiting": 20_000, "interval_s": 1e6, **options}
    async with (
        sim_fleet("a", "b", scheduler=scheduler, **options) as fleet,
        anyio.create_task_group() as clients,
    ):
        for number in range(num_waiting):
            clients.start_soon(fleet.generate, "a", (1, number), ONE)
        await anyio.sleep(0.01)
        yield fleet, clients
        clients.cancel_scope.cancel()


async def calls_to_come(fleet: Fleet, clients: TaskGroup) -> float:
    """Calls for each request that comes by itself and waits behind all others."""
    with counted_calls() as count:
        for number in range(SOME):
            clients.start_soon(fleet.generate, "a", (2, number), ONE)
            for _ in range(5):  # what is woken by it has its turn
                await checkpoint()
    return count.value / SOME


async def calls_to_leave(fleet: Fleet) -> float:
    """Calls for each client that gives up, one after the other."""

    async def leaver(after_s: float) -> None:
        with anyio.move_on_after(after_s):
            await fleet.generate("a", (3,), ONE)

    async with anyio.create_task_group() as leavers:
        for number in range(SOME):
            leavers.start_soon(leaver, 1.0 + 0.01 * number)
        await anyio.sleep(0.9)
        with counted_calls() as count:
            await anyio.sleep(0.9)
    return count.value / SOME


async def calls_to_be_served(fleet: Fleet) -> float:
    """Calls for each request that is served while the others wait."""
    before = len(fleet.view().waiting)
    with counted_calls() as count:
        await anyio.sleep(0.52)
    num_served = before - len(fleet.view().waiting)
    assert num_served >= 32
    return count.value / num_served


async def while_none_is_served(num_waiting: int, scheduler: Scheduler) -> dict[str, float]:
    registered = models("a") + models("b", min_replicas=1)
    async with queue_of(num_waiting, scheduler, models=registered) as (fleet, clients):
        await anyio.sleep(2.0)
        assert len(fleet.view().waiting) == num_waiting
        leave = await calls_to_leave(fleet)
        return {"leave": leave, "come": await calls_to_come(fleet, clients)}


async def while_they_are_served(num_waiting: int, scheduler: Scheduler) -> dict[str, float]:
    async with queue_of(num_waiting, scheduler) as (fleet, clients):
        if isinstance(scheduler, Idle):
            await fleet.swap("e0", to="a")
        await until(lambda: fleet.view().instances[0].num_running == 4)
        served = await calls_to_be_served(fleet)
        return {"served": served, "come": await calls_to_come(fleet, clients)}


SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "by hand": Idle,
    "weighted": lambda: WeightedLoadSwap(t1=0, t2=8, b=1.5, patience_s=None, sigmas=0),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("costs", [while_none_is_served, while_they_are_served])
def test_a_request_costs_as_much_beside_ten_thousand_that_wait_as_beside_a_hundred(
    costs: Callable[[int, Scheduler], Awaitable[dict[str, float]]], scheduler: str
) -> None:
    few = run(costs, FEW, SCHEDULERS[scheduler]())
    many = run(costs, MANY, SCHEDULERS[scheduler]())
    dearer = {event: (few[event], many[event]) for event in few if many[event] > 1.3 * few[event]}
    assert dearer == {}


@virtual_time
async def test_what_is_asked_about_costs_as_much_as_there_are_kinds_of_requests() -> None:
    """A request behind ten thousand of a kind that was declined is found without a look at each of them."""

    def calls_to_ask(num_waiting: int) -> int:
        queue, adapted = Queue(), AdapterId("x")
        for number in range(num_waiting):
            waiting = Request(id=RequestId(str(number)), model=A, prompt=(1,), adapter=adapted)
            queue.add(waiting, number, anyio.Event())
        last = queue.add(Request(id=RequestId("last"), model=A, prompt=(1,)), num_waiting, anyio.Event())
        with counted_calls() as count:
            assert list(queue.heads(A))[1:] == [last]
        return count.value

    assert calls_to_ask(MANY) == calls_to_ask(FEW)
