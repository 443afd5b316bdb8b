"""Admission: which request goes next, and that a request that leaves takes no place along."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import AdapterId, FleetView, InstanceId, InstanceState, ModelId, Request, RequestId
from hotswap.abc import EngineStatus, Router
from hotswap.backends.sim import SimEngine
from hotswap.errors import QueueFull
from hotswap.offline.virtual_time import run, virtual_time
from hotswap.runtime.admission import Admission
from hotswap.runtime.change import Change
from hotswap.runtime.instance import Instance
from hotswap.runtime.queue import Ticket
from hotswap.runtime.state import FleetState
from tests.runtime.support import store_of

A, B = ModelId("a"), ModelId("b")


def request(name: str, model: ModelId = A, *, priority: int = 0, adapter: str | None = None) -> Request:
    return Request(
        id=RequestId(name),
        model=model,
        prompt=(1,),
        priority=priority,
        adapter=None if adapter is None else AdapterId(adapter),
        arrived_s=anyio.current_time(),
    )


class Serving(SimEngine):
    """Serves a model from the beginning, with room for every request."""

    def __init__(self, model: ModelId) -> None:
        super().__init__(f"e-{model}")
        self.model = model

    def status(self) -> EngineStatus:
        return EngineStatus(
            id=self.id, state=InstanceState.SERVING, model=self.model, max_requests=100_000, max_adapters=8
        )


class Places(Router):
    """A router with so many places for each model, and the order in which it gave them away."""

    def __init__(self, **places: int) -> None:
        self.state = FleetState(store_of("a", "b"))
        for model in (A, B):
            self.state.add(Serving(model))
        self.places = {ModelId(model): count for model, count in places.items()}
        self.given: list[str] = []
        self.asked = self.num_arrived = 0
        self.admission = Admission(self.state, self, max_waiting=10_000)

    def enter(self, wanted: Request, *, refusable: bool = False) -> Ticket:
        self.num_arrived += 1
        return self.admission.enter(wanted, self.num_arrived, refusable=refusable)

    async def admit(self, wanted: Request) -> Instance:
        return await self.admission.answer(self.enter(wanted))

    def wake(self) -> None:
        self.state.tell(Change.INSTANCES)

    def route(self, wanted: Request, fleet: FleetView) -> InstanceId | None:
        self.asked += 1
        if not self.places.get(wanted.model):
            return None
        self.places[wanted.model] -= 1
        self.given.append(wanted.id)
        return fleet.hosts(wanted.model)[0].id

    def release(self, wanted: Request, instance: Instance) -> None:
        self.places[wanted.model] += 1
        self.state.release(wanted, instance)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)), max_size=30), st.integers(0, 30))
def test_places_go_by_priority_then_arrival_within_a_model(
    arrivals: list[tuple[str, int]], places: int
) -> None:
    async def scenario() -> None:
        office = Places()
        async with anyio.create_task_group() as tasks:
            for number, (model, priority) in enumerate(arrivals):
                waiting = request(str(number), ModelId(model), priority=priority)
                tasks.start_soon(office.admit, waiting)
                await anyio.sleep(1)
            office.places = {A: places, B: places}
            office.wake()
            for model in "ab":
                mine = [n for n in range(len(arrivals)) if arrivals[n][0] == model]
                order = sorted(mine, key=lambda n: (-arrivals[n][1], n))
                given_here = [int(name) for name in office.given if arrivals[int(name)][0] == model]
                assert given_here == order[:places]
            assert len(office.state.queue) == len(arrivals) - len(office.given)
            tasks.cancel_scope.cancel()
        assert len(office.state.queue) == 0

    run(scenario)


@virtual_time
async def test_a_thousand_who_wait_for_one_model_cost_one_question() -> None:
    office = Places()
    async with anyio.create_task_group() as tasks:
        for number in range(1000):
            tasks.start_soon(office.admit, request(str(number)))
        await anyio.sleep(1)
        office.asked = 0
        office.wake()
        assert office.asked == 1
        tasks.cancel_scope.cancel()


@virtual_time
async def test_a_request_that_is_cancelled_with_its_answer_in_hand_gives_the_place_back() -> None:
    office = Places(a=0)
    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()

        async def leave() -> None:
            with scope:
                wanted = request("leaver")
                instance = await office.admit(wanted)
                try:
                    await anyio.sleep_forever()
                finally:
                    office.release(wanted, instance)

        tasks.start_soon(leave)
        await anyio.sleep(1)
        office.places[A] = 1
        office.wake()  # answered, but the task has not run yet
        scope.cancel()
    assert office.places[A] == 1
    assert len(office.state.queue) == 0


@virtual_time
async def test_requests_with_other_adapters_do_not_wait_for_each_other() -> None:
    class OneAdapter(Places):
        def route(self, wanted: Request, fleet: FleetView) -> InstanceId | None:
            return super().route(wanted, fleet) if wanted.adapter == "warm" else None

    office = OneAdapter(a=5)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(office.admit, request("first", adapter="cold"))
        await anyio.sleep(1)
        tasks.start_soon(office.admit, request("second", adapter="warm"))
        await anyio.sleep(1)
        assert office.given == ["second"]
        assert [waiting.id for waiting in office.state.queue.views()] == ["first"]
        tasks.cancel_scope.cancel()


@virtual_time
async def test_refusing_a_model_answers_all_that_wait_for_it_and_no_others() -> None:
    office = Places()
    refused: list[str] = []

    async def wait(name: str, model: ModelId) -> None:
        try:
            await office.admit(request(name, model))
        except ValueError:
            refused.append(name)

    async with anyio.create_task_group() as tasks:
        for name, model in [("1", A), ("2", B), ("3", A)]:
            tasks.start_soon(wait, name, model)
        await anyio.sleep(1)
        assert office.admission.refuse(A, ValueError("no")) == 2
        await anyio.sleep(1)
        assert refused == ["1", "3"]
        assert office.state.queue.count(A) == 0
        assert office.state.queue.count(B) == 1
        tasks.cancel_scope.cancel()


@virtual_time
async def test_retry_after_grows_with_the_time_people_have_waited() -> None:
    async def hint(waited_s: float) -> float:
        office = Places()
        async with anyio.create_task_group() as tasks:
            for number in range(20):
                tasks.start_soon(office.admit, request(str(number)))
            await anyio.sleep(waited_s)
            office.places[A] = 20
            office.wake()
        office.places[A], office.admission._max_waiting = 0, 0
        with pytest.raises(QueueFull) as full:
            office.enter(request("one too many"), refusable=True)
        return full.value.retry_after_s

    assert await hint(0.5) < await hint(5) < await hint(50)
