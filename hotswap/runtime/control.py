"""The control loop: observe, plan, apply; and recover what was lost."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import anyio

from hotswap.action import Action, Migrate, PinAdapters, Prefetch, Swap, Unload
from hotswap.errors import HotswapError
from hotswap.request import ModelId
from hotswap.runtime.instance import Instance
from hotswap.runtime.observe import ask
from hotswap.runtime.swapper import Swapper
from hotswap.scheduler import Scheduler
from hotswap.store import SupportsPrefetch, WeightStore
from hotswap.telemetry import Telemetry
from hotswap.view import FleetView, InstanceId

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

__all__ = ["Control"]

log = logging.getLogger("hotswap")


class Control:
    """Asks the scheduler every `interval_s`, and at once after `ask`, and starts what it answers.

    Actions run as tasks of the fleet; one on an instance that is not free, or that failed a moment ago, is
    dropped: the scheduler sees the next view and asks again. A scheduler that raises, or asks for what makes
    no sense, is logged, counted and asked again next time; streams and other actions go on.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        observe: Callable[[], FleetView],
        on_turn: Callable[[], object],
        unsettled: Callable[[], Sequence[Instance]],
        instances: dict[InstanceId, Instance],
        store: WeightStore,
        swapper: Swapper,
        migrate: Callable[[Migrate], None],
        hold: Callable[[PinAdapters], None],
        tasks: TaskGroup,
        telemetry: Telemetry,
        interval_s: float,
    ) -> None:
        self._scheduler = scheduler
        self._observe, self._on_turn, self._unsettled = observe, on_turn, unsettled
        self._instances = instances
        self._store = store
        self._swapper = swapper
        self._migrate, self._hold = migrate, hold
        self._tasks, self._telemetry = tasks, telemetry
        self._interval_s = interval_s
        self._asked = anyio.Event()
        self._prefetching: set[ModelId] = set()

    def ask(self) -> None:
        """Plan again as soon as this task runs, without waiting for the interval."""
        self._asked.set()

    async def run(self) -> None:
        """Observe, plan and apply until cancelled."""
        while True:
            self._asked = anyio.Event()
            for part in (self._on_turn, self._revive, self._plan):
                with self._forgiving("The control loop failed in this turn"):
                    part()
            with anyio.move_on_after(self._pause_s()):
                await self._asked.wait()

    def _pause_s(self) -> float:
        """The interval, or less when something may be tried again earlier."""
        retry_s = math.inf
        with self._forgiving("The fleet could not be looked at"):
            retry_s = min((instance.next_retry_s() for instance in self._unsettled()), default=math.inf)
        return min(self._interval_s, retry_s - anyio.current_time())

    def _plan(self) -> None:
        with self._forgiving("Scheduler %r failed to plan", self._scheduler):
            for action in ask(self._observe, lambda fleet: tuple(self._scheduler.plan(fleet))):
                with self._forgiving("Action %r of scheduler %r was not begun", action, self._scheduler):
                    self._start(action)

    @contextmanager
    def _forgiving(self, what: str, *whose: object) -> Generator[None]:
        """Log and count an error, which is no reason to end streams: who caused it is asked again."""
        try:
            yield
        except Exception:
            log.exception(f"{what}; the fleet goes on as it is.", *whose)
            self._telemetry.control_errors.add(1)

    def _start(self, action: Action) -> None:
        match action:
            case Swap() | Unload():
                self._start_swap(action)
            case Prefetch():
                self._start_prefetch(action)
            case PinAdapters():
                self._hold(action)
            case Migrate():
                self._migrate(action)
            case _:
                raise TypeError(
                    f"{action!r} is no action; plan Swap, Unload, Prefetch, PinAdapters and Migrate."
                )

    def _start_swap(self, action: Swap | Unload) -> None:
        instance = self._instances.get(action.instance)
        target = action.model if isinstance(action, Swap) else None
        if instance is None or (target is not None and not self._swapper.knows(target)):
            log.error("Scheduler %r asked for %r, which this fleet does not have.", self._scheduler, action)
            return
        view = instance.view()
        if view.free and view.model != target and instance.due(target):
            instance.claim(target)
            self._tasks.start_soon(
                partial(self._swapper.run_claimed, instance, target, action.deadline_s, action.reason),
                name=f"swap {instance.id} to {target}",
            )

    def _start_prefetch(self, action: Prefetch) -> None:
        if isinstance(self._store, SupportsPrefetch) and action.model not in self._prefetching:
            self._prefetching.add(action.model)
            self._tasks.start_soon(self._prefetch, action.model, name=f"prefetch {action.model}")

    async def _prefetch(self, model: ModelId) -> None:
        assert isinstance(self._store, SupportsPrefetch)
        try:
            await self._store.prefetch(model)
        except Exception as exc:  # a store's own faults as well
            log.warning("Model %r was not prefetched: %s", model, exc, exc_info=_foreign(exc))
        finally:
            self._prefetching.discard(model)

    def _revive(self) -> None:
        """Try to bring broken instances back to EMPTY, with a pause that doubles while it fails."""
        for instance in self._unsettled():
            if instance.broken and instance.due(None):
                instance.claim(None)
                self._tasks.start_soon(self._restart, instance, name=f"restart {instance.id}")

    async def _restart(self, instance: Instance) -> None:
        try:
            await instance.engine.unload()
        except Exception as exc:  # a library's fault as well: it is the instance's, not the fleet's
            instance.failed(None)
            log.warning("Instance %r could not be restarted: %s", instance.id, exc, exc_info=_foreign(exc))
        else:
            instance.succeeded(None)
        finally:
            instance.unclaim()
            self.ask()


def _foreign(error: Exception) -> Exception | None:
    """The error if hotswap did not raise it on purpose, so that its traceback is worth a log."""
    return None if isinstance(error, HotswapError) else error
