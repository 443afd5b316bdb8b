"""A simulation whose models wait for an instance says so twice at most, however often they wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from benchmarks.turns import differences
from hotswap import FleetView
from hotswap.abc import Action, Scheduler, Swap
from hotswap.policies import KeepAliveSwap
from hotswap.request import ModelId
from hotswap.simulation import Cluster, Trace, TraceRequest, simulate
from hotswap.simulation.driver import UNSERVED_S
from hotswap.simulation.run import Driver
from hotswap.view import InstanceState

DRIVERS: tuple[Driver, ...] = ("clients", "events")
CLUSTER = Cluster(num_engines=1, profile="h100-llama-3.1-8b")


def in_turn(*models: str, tokens: int = 2_000) -> Trace:
    """Long answers of models in turn, all asked for at once: each waits until those before it have ended."""
    requests = (
        TraceRequest(arrive_s=number / 10, model=model, prompt_tokens=10, output_tokens=tokens)
        for number, model in enumerate(models)
    )
    return Trace.of(requests, "in turn")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "hotswap.unserved"]


@pytest.mark.parametrize("driver", DRIVERS)
def test_the_first_wait_is_told_as_it_happens_and_all_are_counted_at_the_end(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(in_turn("a", "b", "c", "d"), CLUSTER, scheduler=KeepAliveSwap(), driver=driver)
    first, last = told(caplog)
    assert first.startswith("Model 'b' has had 1 request(s) waiting")
    assert "3 of 4 models" in last
    assert "3 times" in last


@pytest.mark.parametrize("driver", DRIVERS)
def test_one_wait_is_told_once_and_none_not_at_all(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    simulate(in_turn("a", "b", tokens=5), CLUSTER, scheduler=KeepAliveSwap(), driver=driver)
    assert told(caplog) == []
    simulate(in_turn("a", "b"), CLUSTER, scheduler=KeepAliveSwap(), driver=driver)
    assert len(told(caplog)) == 1


def test_what_other_threads_warn_of_meanwhile_is_heard_and_not_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("hotswap.unserved")

    def warn(ended: int, total: int) -> None:
        thread = threading.Thread(target=log.warning, args=("Model %r waits.", "z"))
        thread.start()
        thread.join()

    trace = in_turn("a", "b", "c", "d")
    simulate(trace, CLUSTER, scheduler=KeepAliveSwap(), driver="events", progress=warn)
    assert told(caplog).count("Model 'z' waits.") >= 4
    assert "3 of 4 models" in told(caplog)[-1]


def test_after_a_simulation_all_warnings_are_heard_again(caplog: pytest.LogCaptureFixture) -> None:
    trace = in_turn("a", "b", "c")

    def stop(ended: int, total: int) -> None:
        raise ValueError("stop")

    with pytest.raises(ExceptionGroup):
        simulate(trace, CLUSTER, scheduler=KeepAliveSwap(), driver="events", progress=stop)
    caplog.clear()
    log = logging.getLogger("hotswap.unserved")
    for _ in range(3):
        log.warning("Model %r waits.", "z")
    assert len(told(caplog)) == 3


@dataclass(frozen=True)
class Once(Scheduler):
    """Loads the first model that is asked for, and no other: what a scheduler with a fault may do."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return [
            Swap(instance=instance.id, model=request.model)
            for request, instance in zip(fleet.waiting, fleet.instances, strict=False)
            if instance.state is InstanceState.EMPTY and instance.free
        ]


def test_requests_that_a_scheduler_never_serves_end_and_the_others_are_told_of() -> None:
    """Which the docs let a user try: such a simulation never ended."""
    clients, events = (
        simulate(in_turn("a", "b", "a", tokens=5), CLUSTER, scheduler=Once(), interval_s=10.0, driver=driver)
        for driver in DRIVERS
    )
    assert [request.error for request in events.requests] == ["", "RequestCancelled", ""]
    assert events.requests[1].ended_s > UNSERVED_S
    assert list(differences(clients, events)) == []


class BackAndForth(Scheduler):
    """Turns an instance to two models, one after the other, for ever."""

    def plan(self, fleet: FleetView) -> Sequence[Action]:
        return [
            Swap(instance=instance.id, model=ModelId("b" if instance.model == "a" else "a"))
            for instance in fleet.instances
            if instance.free and not instance.num_requests
        ]


@pytest.mark.parametrize("driver", DRIVERS)
def test_swaps_for_no_request_keep_no_simulation_going(driver: Driver) -> None:
    trace = in_turn("a", "b", "c", tokens=5)
    outcome = simulate(trace, CLUSTER, scheduler=BackAndForth(), interval_s=60.0, driver=driver)
    assert [request.error for request in outcome.requests] == ["", "", "RequestCancelled"]
