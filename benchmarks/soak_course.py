"""The course of a soak: calm, then faults and disturbances, then calm again and a look at the books.

What it takes place in is a `Place`, simulated or real: a fleet of chaotic engines on a chaotic store, and the
requests that clients make of it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import anyio

from benchmarks.soak_clients import Ask, Crowd, Seen
from benchmarks.soak_hands import Engines, Hands, Pace
from hotswap import Fleet, InstanceState
from hotswap.testing.chaos import ChaosStore

__all__ = ["FINDINGS", "Course", "Place", "soak"]

# Parts of a report that are empty if all is well.
FINDINGS = ("wrong", "errors", "books", "logged")
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How much goes on, and how long; whichever of seconds and requests comes first.

    Attributes:
        crowd: Who asks.
        pace: How often hands disturb.
        quiet_s: Seconds before faults and disturbances begin.
        seconds: Seconds with them.
        requests: Requests with them.
    """

    crowd: Crowd
    pace: Pace
    quiet_s: float = 0.0
    seconds: float = float("inf")
    requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a soak takes place.

    Attributes:
        fleet: Not open yet.
        engines: Those of the fleet.
        store: That of the fleet.
        asks: What clients ask.
        num_lent: How much the store has lent out and not got back.
    """

    fleet: Fleet
    engines: Engines
    store: ChaosStore
    asks: Sequence[Ask]
    num_lent: Callable[[], int]

    def arm(self, armed: bool) -> None:
        """Let faults come, or not."""
        self.engines.arm(armed)
        self.store.injector.armed = armed

    @property
    def injected(self) -> dict[str, int]:
        """How many faults came, by kind."""
        of_store = {f"store {kind}": count for kind, count in self.store.injected.items()}
        return dict(sorted({**self.engines.injected, **of_store}.items()))


async def soak(place: Place, course: Course, seed: int) -> dict[str, Any]:
    """Run a soak and return its report, in which all of `FINDINGS` are empty if all is well."""
    random, quiet, disturbed, books = Random(seed), Seen(), Seen(), list[str]()
    tasks, began_s = set(anyio.get_running_tasks()), anyio.current_time()
    place.arm(False)
    with _listening() as logged:
        async with place.fleet as fleet:
            hands = Hands(fleet, place.engines, course.pace, random)
            if course.quiet_s:
                await course.crowd.run(fleet, place.asks, random, quiet, seconds=course.quiet_s)
            place.arm(True)
            async with hands.busy():
                await course.crowd.run(
                    fleet, place.asks, random, disturbed, requests=course.requests, seconds=course.seconds
                )
            place.arm(False)
            books += await _settled(fleet)
        books += [f"a task is left over: {task}" for task in set(anyio.get_running_tasks()) - tasks]
        if lent := place.num_lent():
            books.append(f"{lent} chunks of the store are still lent")
    return {
        "seconds": anyio.current_time() - began_s,
        "quiet": quiet.report(),
        "disturbed": disturbed.report(),
        "faults": place.injected,
        "moves": _counted(f"{record.way} {record.outcome}" for record in fleet.migrations),
        "swaps": _counted(record.outcome for record in fleet.swaps),
        "drains": dict(sorted(hands.drains.items())),
        "wrong": quiet.wrong + disturbed.wrong,
        "errors": quiet.errors + disturbed.errors,
        "books": books,
        "logged": logged,
    }


def _counted(kinds: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(kinds).items()))


# ---------------------------------------------------------------------- books


async def _settled(fleet: Fleet) -> list[str]:
    """Wait until everything was given back, and say what was not."""
    with anyio.move_on_after(_SETTLE_S):
        while list(_left_over(fleet)):  # noqa: ASYNC110 - a view has no event
            await anyio.sleep(0.05)
    return list(_left_over(fleet))


def _left_over(fleet: Fleet) -> Iterator[str]:
    view = fleet.view()
    yield from (f"a request waits: {request}" for request in view.waiting)
    yield from (f"a request runs: {request}" for request in view.running)
    yield from (f"a model has requests: {model}" for model in view.models if model.num_requests)
    for instance in view.instances:
        busy = instance.num_requests or instance.num_running or instance.num_waiting
        settled = instance.state in (InstanceState.EMPTY, InstanceState.SERVING) and not instance.swapping
        whole = instance.num_free_kv_blocks == instance.num_kv_blocks
        if busy or instance.draining or not settled or not whole:
            yield f"an instance is not idle: {instance}"


class _Faults(logging.Handler):
    """Keeps what hotswap logs of failures that it does not know: there should be none."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or (record.exc_info and record.exc_info[0]):
            self.lines.append(self.format(record))


@contextmanager
def _listening() -> Generator[list[str]]:
    log, faults = logging.getLogger("hotswap"), _Faults()
    propagate, log.propagate = log.propagate, False
    log.addHandler(faults)
    try:
        yield faults.lines
    finally:
        log.removeHandler(faults)
        log.propagate = propagate
