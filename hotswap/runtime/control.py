"""The control loop: observe, plan, apply; restart what was lost; tell of requests that no plan serves."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio

from hotswap import telemetry as tm
from hotswap.action import Action, Migrate, PinAdapters, Prefetch, Resize, Swap, Unload
from hotswap.checks import check_required_seconds
from hotswap.errors import ConfigError, HotswapError, InstanceError
from hotswap.loop_time import current_time
from hotswap.request import ModelId
from hotswap.runtime.adapters import Adapters
from hotswap.runtime.change import Change
from hotswap.runtime.instance import Instance
from hotswap.runtime.losses import Losses
from hotswap.runtime.metrics import LastView
from hotswap.runtime.moves import Moves
from hotswap.runtime.resizes import Resizes
from hotswap.runtime.state import FleetState
from hotswap.runtime.swaps import Swaps
from hotswap.runtime.views import lend
from hotswap.scheduler import Scheduler
from hotswap.store import SupportsNodes, SupportsPrefetch
from hotswap.stray_cancellation import no_stray_cancellation
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceState

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Control"]

log = logging.getLogger("hotswap")
log_unserved = logging.getLogger("hotswap.unserved")  # apart, so that simulations can count what it tells

# So long may requests wait for a model that no instance serves or swaps to, before the log tells of it.
UNSERVED_S = 5.0


class Control:
    """Asks the scheduler every `interval_s`, and at once when the state changes, and starts what it answers.

    Actions run as tasks of the fleet. One on an instance that is not free, or that failed a moment ago, is
    dropped: the scheduler sees the next view and plans again. A scheduler that raises, or asks for what makes
    no sense, is logged, counted and asked again next time; streams and other actions go on.
    """

    def __init__(
        self,
        state: FleetState,
        scheduler: Scheduler,
        swaps: Swaps,
        moves: Moves,
        adapters: Adapters,
        losses: Losses,
        resizes: Resizes,
        *,
        interval_s: float,
        telemetry: Telemetry,
    ) -> None:
        self._state, self._scheduler = state, scheduler
        self._swaps, self._moves, self._adapters = swaps, moves, adapters
        self._losses, self._resizes = losses, resizes
        self._interval_s, self._telemetry = interval_s, telemetry
        self._asked = anyio.Event()
        self._prefetching: set[tuple[ModelId, str]] = set()
        self._told_unserved: dict[ModelId, float] = {}
        self.planned_s: float | None = None  # when the scheduler was asked last, whatever came of it

    def state_changed(self, change: Change) -> None:
        """Plan again as soon as this task runs, without waiting for the interval."""
        if change is not Change.RELEASED:
            self._asked.set()

    async def run(self, tasks: TaskGroup, last_view: LastView) -> None:
        """Observe, plan and apply until cancelled."""
        self._state.subscribe(self)
        try:
            while True:
                self._asked = anyio.Event()
                with self._forgiving("The control loop failed in this turn"):
                    last_view.keep()
                for part in (self._restart_lost, self._unload_unknown, self._plan, self._tell_unserved):
                    with self._forgiving("The control loop failed in this turn"):
                        part(tasks)
                self.planned_s = current_time()
                with anyio.move_on_after(self._pause_s()):
                    await self._asked.wait()
        finally:
            self._state.unsubscribe(self)

    def _pause_s(self) -> float:
        """The interval, or less when something may be tried again earlier."""
        retry_s = math.inf
        with self._forgiving("The fleet could not be looked at"):
            retry_s = min((instance.next_try_s() for instance in self._state.troubled()), default=math.inf)
        return min(self._interval_s, retry_s - current_time())

    def _unload_unknown(self, tasks: TaskGroup) -> None:
        """Unload models that are not the fleet's: an engine elsewhere may have kept one of another fleet."""
        state = self._state
        state.refresh()
        for model in state.index.hosted():
            if model not in state.models:
                reason = f"this fleet has no model {model}"
                for view in state.index.hosts(model):
                    self._start_swap(Unload(instance=view.id, reason=reason), tasks)

    def _plan(self, tasks: TaskGroup) -> None:
        with self._forgiving("Scheduler %r failed to plan", self._scheduler):
            self._state.refresh(progress=True)
            for action in lend(self._state, lambda fleet: tuple(self._scheduler.plan(fleet)), running=True):
                with self._forgiving("Action %r of scheduler %r was not begun", action, self._scheduler):
                    self._start(action, tasks)

    @contextmanager
    def _forgiving(self, what: str, *whose: object) -> Generator[None]:
        """Log and count an error, which is no reason to end streams."""
        try:
            yield
        except Exception:
            log.exception(f"{what}; the fleet goes on as it is.", *whose)
            self._telemetry.control_errors.add(1)

    # ------------------------------------------------------------------ actions

    def _start(self, action: Action, tasks: TaskGroup) -> None:
        match action:
            case Swap() | Unload():
                self._start_swap(action, tasks)
            case Prefetch():
                self._start_prefetch(action, tasks)
            case PinAdapters():
                tasks.start_soon(self._adapters.pin, action, name=f"adapters of {action.instance}")
            case Migrate():
                self._start_move(action, tasks)
            case Resize():
                self._resizes.start(action, tasks)
            case _:
                raise TypeError(
                    f"{action!r} is no action; plan Swap, Unload, Prefetch, PinAdapters, Migrate and Resize."
                )

    def _start_swap(self, action: Swap | Unload, tasks: TaskGroup) -> None:
        instance = self._state.instances.get(action.instance)
        target = action.model if isinstance(action, Swap) else None
        if instance is None or (target is not None and target not in self._state.models):
            log.error("Scheduler %r asked for %r, which this fleet does not have.", self._scheduler, action)
            return
        check_required_seconds(ConfigError, deadline_s=action.deadline_s)
        view = instance.view()
        if view.free and view.model != target and instance.may_try(target):
            self._state.claim(instance, target)
            swap = partial(self._swaps.run_planned, deadline_s=action.deadline_s, reason=action.reason)
            tasks.start_soon(swap, instance, target, name=f"swap {instance.id} to {target}")

    def _start_move(self, action: Migrate, tasks: TaskGroup) -> None:
        active = self._state.requests.get(action.request)
        destination = self._state.instances.get(action.destination)
        if active is not None and destination is not None:  # else it has gone meanwhile
            move = partial(self._moves.run_planned, method=action.method, reason=action.reason)
            tasks.start_soon(move, active, destination, name=f"move {action.request}")

    def _start_prefetch(self, action: Prefetch, tasks: TaskGroup) -> None:
        key = action.model, action.node
        if key not in self._prefetching:
            self._prefetching.add(key)
            tasks.start_soon(self._prefetch, action.model, action.node, name=f"prefetch {action.model}")

    async def _prefetch(self, model: ModelId, node: str) -> None:
        store = self._state.store
        try:
            if node and isinstance(store, SupportsNodes):
                store = store.on(node)
            if isinstance(store, SupportsPrefetch):
                with no_stray_cancellation("The prefetch"):
                    await store.prefetch(model)
        except Exception as exc:  # a store's own faults as well
            foreign = None if isinstance(exc, HotswapError) else exc  # not on purpose: worth a traceback
            log.warning("Model %r was not prefetched: %s", model, exc, exc_info=foreign)
        finally:
            self._prefetching.discard((model, node))

    # ------------------------------------------------------------------ what was lost

    def _restart_lost(self, tasks: TaskGroup) -> None:
        """Try to bring broken instances back to EMPTY, with a pause that doubles while it fails."""
        for instance in self._state.troubled():
            with suppress(InstanceError):  # it cannot tell its status, as the index has logged
                if (status := instance.status()).state is InstanceState.LOST:
                    self._losses.note(instance, status.lost_because)
                if instance.broken and instance.may_try(None):
                    self._state.claim(instance, None)
                    tasks.start_soon(self._restart, instance, name=f"restart {instance.id}")

    async def _restart(self, instance: Instance) -> None:
        limit_s = self._swaps.limits.unload_s
        try:
            with anyio.move_on_after(limit_s) as limit, no_stray_cancellation("The unload"):
                await instance.engine.unload()
            if limit.cancelled_caught:
                raise TimeoutError(f"The unload took longer than its limit of {limit_s:g} s.")
        except Exception as exc:  # a library's fault as well: it is the instance's, not the fleet's
            self._state.failed(instance, None)
            self._count_restart(instance, "failed")
            self._log_failed_restart(instance, exc)
        else:
            self._state.succeeded(instance, None)
            self._count_restart(instance, "done")
            log.warning(
                "Instance %r was restarted and is EMPTY; before: %s",
                instance.id,
                self._losses.reason(instance),
            )
            self._losses.over(instance)
        finally:
            self._state.unclaim(instance)
            self._state.tell(Change.INSTANCES)

    def _count_restart(self, instance: Instance, outcome: str) -> None:
        self._telemetry.restarts.add(1, {tm.INSTANCE: instance.id, tm.RESTART_OUTCOME: outcome})

    def _log_failed_restart(self, instance: Instance, error: Exception) -> None:
        if instance.gone_for_good:
            what = "Instance %r is lost for good; remove or replace it. Its last restart failed: %s"
        else:
            what = "Instance %r could not be restarted and will be tried again: %s"
        log.warning(what, instance.id, error if isinstance(error, HotswapError) else tm.traceback_of(error))

    # ------------------------------------------------------------------ what is never served

    def _tell_unserved(self, _: TaskGroup) -> None:
        """Warn, once for each time, of a model whose requests wait though no instance turns to it."""
        now_s, unserved = current_time(), dict[ModelId, float]()
        for model in self._state.queue.models:
            since_s = self._state.unserved_since_s(model)
            if since_s is None:
                continue
            unserved[model] = self._told_unserved.get(model, math.inf)
            if unserved[model] == math.inf and now_s - since_s >= UNSERVED_S:
                unserved[model] = now_s
                log_unserved.warning(
                    "Model %r has had %d request(s) waiting for %.0f s, and no instance serves it or swaps "
                    "to it: %r gives it none. The fleet: %s. Instances may be starting, lost, pinned, kept "
                    "for the min_replicas of other models, or too small.",
                    model,
                    self._state.queue.count(model),
                    now_s - since_s,
                    self._scheduler,
                    self._state,
                )
        self._told_unserved = unserved
