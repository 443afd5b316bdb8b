"""Plays a trace to a fleet on simulated engines, in virtual time."""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Literal, TypeAlias

from hotswap.checks import check_choice
from hotswap.errors import ConfigError
from hotswap.kv_store import KVStore
from hotswap.migration import Mover
from hotswap.offline.unserved import unserved_counted
from hotswap.offline.virtual_time import run
from hotswap.policies.defaults import default_router, default_scheduler
from hotswap.router import Router
from hotswap.runtime.move import MigrationLimits
from hotswap.scheduler import Scheduler
from hotswap.simulation.cluster import Cluster
from hotswap.simulation.driver import ClientDriver, EventDriver, Progress, Scenario, TraceDriver
from hotswap.simulation.outcome import Outcome
from hotswap.simulation.trace import Trace

__all__ = ["Driver", "simulate"]

Driver: TypeAlias = Literal["clients", "events"]

_DRIVERS: Mapping[Driver, type[TraceDriver]] = {"clients": ClientDriver, "events": EventDriver}


@contextmanager
def _few_collections() -> Generator[None]:
    """Look for cycles seldom: there are few, and millions of objects to go over."""
    before = gc.get_threshold()
    gc.set_threshold(500_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_few_collections()
def simulate(
    trace: Trace,
    cluster: Cluster,
    *,
    router: Router | None = None,
    scheduler: Scheduler | None = None,
    mover: Mover | None = None,
    migration_limits: MigrationLimits | None = None,
    kv_store: KVStore | None = None,
    interval_s: float = 1.0,
    name: str = "",
    driver: Driver = "clients",
    progress: Progress | None = None,
) -> Outcome:
    """Play a trace to a fleet of the cluster until its last request has ended, and return what became of it.

    The fleet is the one of production, and knows nothing of it; without a router or a scheduler it has those
    of a `Fleet` without any. Requests that fail are part of the outcome. Those that still wait when, after
    the last arrival, none has run for an hour end by `RequestCancelled`. The log warns of the first model
    that no instance serves for long, and counts all in one line at the end. Prompts are
    made when they arrive and forgotten when they end. `progress` is told how many requests have ended, of
    how many. With large `chunk_bytes` in the `migration_limits` moves are simulated sooner. A `kv_store`,
    such as a `SimKVStore`, keeps KV blocks across swaps.

    With the driver `"clients"` every request has a client that reads its stream, as in production: a token is
    a few turns of the event loop, and an hour of 100 engines takes minutes. `"events"` visits an engine when
    its batch changes, and counts tokens: the same decisions and latencies, for thousands of engines.

    Raises:
        ConfigError: the trace is empty, or the fleet refuses the cluster.
        VirtualTimeDeadlock: nothing could go on, which a policy that awaits something real would do.
    """
    if not trace.requests:
        raise ConfigError(f"{trace.name!r} has no requests; nothing would happen.")
    check_choice(ConfigError, tuple(_DRIVERS), driver=driver)
    router = default_router() if router is None else router
    scheduler = default_scheduler() if scheduler is None else scheduler
    played = _DRIVERS[driver](
        Scenario(
            trace=trace,
            cluster=cluster,
            router=router,
            scheduler=scheduler,
            mover=mover,
            migration_limits=migration_limits,
            kv_store=kv_store,
            interval_s=interval_s,
            progress=progress,
        )
    )
    with unserved_counted(trace.name, len(trace.models)):
        run(played.play)
    return Outcome(
        name=name or repr(scheduler),
        trace=trace.name,
        settings={
            "router": repr(router),
            "scheduler": repr(scheduler),
            "interval_s": interval_s,
            "driver": driver,
            "num_engines": cluster.num_engines,
            "device": cluster.measured.device.name,
            "num_nodes": cluster.num_nodes,
            "host_bytes": cluster.host_bytes,
            "batching": cluster.batching,
            "prefix_reuse": cluster.prefix_reuse,
            "reporting": cluster.reporting,
            **({} if kv_store is None else {"kv_store": type(kv_store).__name__}),
        },
        requests=tuple(played.served),
        # Those that the end cuts off end in any order.
        swaps=tuple(sorted(played.swaps, key=lambda swap: (swap.started_s + swap.seconds, swap.instance))),
        migrations=tuple(played.moves),
        samples=tuple(played.samples),
        num_reused_tokens=played.num_reused_tokens,
    )
