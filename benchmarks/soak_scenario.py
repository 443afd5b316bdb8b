"""The scenario of a soak: a quiet phase, one with faults and operations, and a check of what is left.

A `Setup` is what it runs on, simulated or real: a fleet of chaotic engines on a chaotic store, and requests.
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

from benchmarks.soak_clients import CheckedRequest, ClientPool, ClientResults
from benchmarks.soak_operations import Engines, OperationRates, RandomOperations
from hotswap import DeviceBudget, Fleet, InstanceState
from hotswap.testing.chaos import ChaosStore

__all__ = ["FINDINGS", "Scenario", "Setup", "soak"]

# Parts of a report that are empty in a good run.
FINDINGS = ("wrong", "errors", "leftovers", "logged")
_SETTLE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The load and the disturbance, which end after `seconds` or `num_requests`, whichever comes first.

    Attributes:
        clients: The clients that send requests.
        rates: How often operations disturb the fleet.
        quiet_s: Seconds before faults and operations begin.
        seconds: Seconds with them.
        num_requests: Requests with them.
    """

    clients: ClientPool
    rates: OperationRates
    quiet_s: float = 0.0
    seconds: float = float("inf")
    num_requests: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The fleet that is soaked, with its parts.

    Attributes:
        fleet: Not open yet.
        engines: The engines of the fleet.
        store: The store of the fleet.
        requests: The requests that clients choose from.
        num_lent: Returns the number of chunks that the store has lent and not got back.
        budget: The memory that the engines share; `None` if each has its own.
    """

    fleet: Fleet
    engines: Engines
    store: ChaosStore
    requests: Sequence[CheckedRequest]
    num_lent: Callable[[], int]
    budget: DeviceBudget | None = None

    def arm(self, armed: bool) -> None:
        """Switch the injection of faults on or off."""
        self.engines.arm(armed)
        self.store.injector.armed = armed

    @property
    def injected(self) -> dict[str, int]:
        """Number of injected faults, by kind."""
        of_store = {f"store {kind}": count for kind, count in self.store.injected.items()}
        return dict(sorted({**self.engines.injected, **of_store}.items()))


async def soak(setup: Setup, scenario: Scenario, seed: int) -> dict[str, Any]:
    """Run a soak and return its report, in which all of `FINDINGS` are empty in a good run."""
    random, quiet, disturbed, leftovers = Random(seed), ClientResults(), ClientResults(), list[str]()
    tasks, began_s = set(anyio.get_running_tasks()), anyio.current_time()
    setup.arm(False)
    with _listening() as logged:
        async with setup.fleet as fleet:
            operations = RandomOperations(fleet, setup.engines, scenario.rates, random)
            if scenario.quiet_s:
                await scenario.clients.run(fleet, setup.requests, random, quiet, seconds=scenario.quiet_s)
            setup.arm(True)
            async with operations.running():
                await scenario.clients.run(
                    fleet,
                    setup.requests,
                    random,
                    disturbed,
                    num_requests=scenario.num_requests,
                    seconds=scenario.seconds,
                )
            setup.arm(False)
            leftovers += await _settled(fleet)
        leftovers += [f"a task is left over: {task}" for task in set(anyio.get_running_tasks()) - tasks]
        if lent := setup.num_lent():
            leftovers.append(f"{lent} chunks of the store are still lent")
        if setup.budget is not None and (setup.budget.leases or setup.budget.held_bytes):
            leftovers.append(f"memory is still leased: {setup.budget}")
    return {
        "seconds": anyio.current_time() - began_s,
        "quiet": quiet.report(),
        "disturbed": disturbed.report(),
        "faults": setup.injected,
        "moves": _counted(f"{record.method} {record.outcome}" for record in fleet.migrations),
        "swaps": _counted(record.outcome for record in fleet.swaps),
        "drains": dict(sorted(operations.drains.items())),
        "num_resizes": operations.num_resizes,
        "wrong": quiet.wrong + disturbed.wrong,
        "errors": quiet.errors + disturbed.errors,
        "leftovers": leftovers,
        "logged": logged,
    }


def _counted(kinds: Iterator[str]) -> dict[str, int]:
    return dict(sorted(Counter(kinds).items()))


# ---------------------------------------------------------------------- leftovers


async def _settled(fleet: Fleet) -> list[str]:
    """Wait until all resources are released, and return what is not."""
    with anyio.move_on_after(_SETTLE_S):
        while list(_left_over(fleet)):  # noqa: ASYNC110 - a view has no event
            await anyio.sleep(0.05)
    return list(_left_over(fleet))


def _left_over(fleet: Fleet) -> Iterator[str]:
    view = fleet.view()
    if view.kv_store is not None and view.kv_store.num_leases:
        yield f"KV blocks are leased: {view.kv_store}"
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
    """Keeps errors that hotswap logs, and warnings with a traceback: there should be none."""

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
