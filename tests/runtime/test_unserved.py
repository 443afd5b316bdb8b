"""A model that has requests and no instance: the log says so once, the view shows it as long as it lasts."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from hotswap import Fleet, FleetView, InstanceId, ModelId, Sampling
from hotswap.abc import Action, Scheduler, Swap
from hotswap.errors import SwapFailed
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import RestoreMinReplicas, StaticPinning, WeightedLoadSwap
from tests.runtime.support import Idle, engine_of, idle, models, read, sim_fleet, store_of, until
from tests.runtime.test_swap import NoPreload, Unreadable

SOME = Sampling(max_tokens=5, ignore_eos=True)
A, B = ModelId("a"), ModelId("b")
WITHIN_S = 60.0  # of waiting, after which the log must have told of it


def since_s(fleet: Fleet, model: ModelId = B) -> float | None:
    return fleet.view().model(model).unserved_since_s


def warnings_of(caplog: pytest.LogCaptureFixture, model: str = "b") -> list[str]:
    """The warnings about a model, which is the first name that each of them quotes."""
    warned = (r for r in caplog.records if (r.name, r.levelno) == ("hotswap.unserved", logging.WARNING))
    messages = [record.getMessage() for record in warned]
    return [message for message in messages if re.match(rf"[^']*'{model}'", message)]


class Repeating(Scheduler):
    """Asks for the same swap each time, which is done already."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return [Swap(instance=InstanceId("e0"), model=A)]


# Reasons for which no decision of the scheduler ever serves model b.
REASONS: dict[str, tuple[Scheduler, dict[str, Any]]] = {
    "pinned": (StaticPinning({"e0": "a"}), {}),
    "floored": (WeightedLoadSwap(t1=0, t2=4, b=1, sigmas=0), {"min_replicas": 1}),
    "min_replicas alone": (RestoreMinReplicas(), {"min_replicas": 1}),
    "by hand alone": (Idle(), {}),
    "asks for another": (Repeating(), {}),
}


@pytest.mark.parametrize("reason", REASONS)
@virtual_time
async def test_the_log_says_once_that_a_model_has_requests_and_no_instance(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, fields = REASONS[reason]
    registered = [*models("a", **fields), *models("b")]
    async with (
        sim_fleet("a", "b", engines=1, models=registered, scheduler=scheduler, interval_s=0.05) as fleet,
        anyio.create_task_group() as clients,
    ):
        with anyio.fail_after(60):
            if fleet.view().instances[0].model is None and not fields and reason != "pinned":
                await fleet.swap("e0", to="a")
            await read(fleet, "a", (1,), SOME)
        with caplog.at_level(logging.WARNING, "hotswap"):
            for number in range(3):
                clients.start_soon(fleet.generate, "b", (1, number), SOME)
            await anyio.sleep(WITHIN_S)
            assert len(warnings_of(caplog)) == 1
            assert "instance" in warnings_of(caplog)[0].lower(), "it says what stands in the way"
            await anyio.sleep(1800)
            clients.start_soon(fleet.generate, "b", (2,), SOME)
            await anyio.sleep(60)
            assert len(warnings_of(caplog)) == 1
        assert warnings_of(caplog, "a") == []
        await read(fleet, "a", (3,), SOME)
        clients.cancel_scope.cancel()


@virtual_time
async def test_the_log_says_it_again_when_it_happens_again(caplog: pytest.LogCaptureFixture) -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        with caplog.at_level(logging.WARNING, "hotswap"):
            for episode in (1, 2):
                with anyio.move_on_after(WITHIN_S):
                    await fleet.generate("b", (1,), SOME)
                assert len(warnings_of(caplog)) == episode
                await anyio.sleep(5)
            await fleet.swap("e0", to="b")
            await read(fleet, "b", (1,), SOME)
            await fleet.swap("e0", to="a")
            with anyio.move_on_after(WITHIN_S):
                await fleet.generate("b", (1,), SOME)
            assert len(warnings_of(caplog)) == 3
        idle(fleet)


@virtual_time
async def test_the_log_tells_of_each_model_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        sim_fleet("a", "b", "c", engines=1, scheduler=StaticPinning({"e0": "a"})) as fleet,
        anyio.create_task_group() as clients,
    ):
        with caplog.at_level(logging.WARNING, "hotswap"):
            for model in ("b", "c", "b"):
                clients.start_soon(fleet.generate, model, (1,), SOME)
            await anyio.sleep(WITHIN_S)
            assert [len(warnings_of(caplog, model)) for model in ("a", "b", "c")] == [0, 1, 1]
        clients.cancel_scope.cancel()


@virtual_time
async def test_the_log_says_nothing_of_a_model_that_is_being_loaded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hotswap"):
        async with sim_fleet("a", "b", engines=1) as fleet:
            for number in range(10):
                await read(fleet, "ab"[number % 2], (number,), SOME)
    assert warnings_of(caplog, "a") == warnings_of(caplog, "b") == []


@virtual_time
async def test_a_view_shows_since_when_requests_wait_for_a_model_that_no_instance_serves() -> None:
    async with (
        sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        await fleet.swap("e0", to="a")
        assert (since_s(fleet, A), since_s(fleet, B)) == (None, None)
        await anyio.sleep(1.0)
        came_s = anyio.current_time()
        clients.start_soon(fleet.generate, "b", (1,), SOME)
        clients.start_soon(fleet.generate, "a", (1,), Sampling(max_tokens=100, ignore_eos=True))
        await anyio.sleep(0.5)
        assert (since_s(fleet, A), since_s(fleet, B)) == (None, came_s)
        clients.start_soon(fleet.generate, "b", (2,), SOME)
        await anyio.sleep(10)
        assert since_s(fleet) == came_s, "a later request does not begin it anew"
        await fleet.swap("e0", to="b")
        assert since_s(fleet) is None
    idle(fleet)


@virtual_time
async def test_a_view_shows_it_until_the_last_client_has_left() -> None:
    async with sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        start_s = anyio.current_time()

        async def client(seconds: float) -> None:
            with anyio.move_on_after(seconds):
                await fleet.generate("b", (1,), SOME)

        async with anyio.create_task_group() as clients:
            for seconds in (1.0, 3.0):
                clients.start_soon(client, seconds)
            await anyio.sleep(2.0)
            assert since_s(fleet) == start_s, "one of them still waits"
        assert since_s(fleet) is None
        with anyio.move_on_after(1.0):
            await fleet.generate("b", (1,), SOME)
        assert since_s(fleet) is None


@virtual_time
async def test_a_view_does_not_show_it_of_a_model_that_is_loaded_now() -> None:
    async with (
        sim_fleet("a", "b", engines=1, scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        clients.start_soon(fleet.generate, "b", (1,), SOME)
        await anyio.sleep(1.0)
        assert since_s(fleet) == 0.0
        clients.start_soon(lambda: fleet.swap("e0", to="b"))
        await until(lambda: fleet.view().instances[0].swapping)
        assert since_s(fleet) is None


@virtual_time
async def test_a_view_shows_it_again_after_a_load_that_failed() -> None:
    store = Unreadable(store_of("a", "b"), "b")
    engine = NoPreload(engine_of("e0"))
    async with (
        sim_fleet("a", "b", engines=[engine], store=store, scheduler=Idle(), max_load_attempts=9) as fleet,
        anyio.create_task_group() as clients,
    ):
        clients.start_soon(fleet.generate, "b", (1,), SOME)
        await anyio.sleep(1.0)
        with pytest.raises(SwapFailed):
            await fleet.swap("e0", to="b")
        await anyio.sleep(1.0)
        assert since_s(fleet) is not None
        clients.cancel_scope.cancel()


@virtual_time
async def test_a_view_shows_it_from_the_loss_of_the_last_instance() -> None:
    engine = engine_of("e0")
    async with (
        sim_fleet("a", engines=[engine], scheduler=Idle()) as fleet,
        anyio.create_task_group() as clients,
    ):
        await fleet.swap("e0", to="a")
        clients.start_soon(fleet.generate, "a", (1,), Sampling(max_tokens=300, ignore_eos=True))
        await anyio.sleep(0.5)
        assert since_s(fleet, A) is None
        engine.lose()
        lost_s = anyio.current_time()
        await anyio.sleep(1.0)
        assert since_s(fleet, A) == lost_s
        await fleet.swap("e0", to="a")
        assert since_s(fleet, A) is None


@virtual_time
async def test_a_request_waits_for_the_first_engine_of_a_fleet_that_has_none() -> None:
    """As before the first node of a cluster has joined, or while the last one is replaced."""
    async with sim_fleet("a", engines=[]) as fleet, anyio.create_task_group() as clients:
        clients.start_soon(read, fleet, "a", (1,), SOME)
        await anyio.sleep(10.0)
        assert since_s(fleet, A) == 0.0
        await fleet.add(engine_of("e0"))
        await until(lambda: not fleet.view().waiting)
        await fleet.remove("e0")
        clients.start_soon(read, fleet, "a", (2,), SOME)
        await anyio.sleep(10.0)
        await fleet.add(engine_of("e0"))
