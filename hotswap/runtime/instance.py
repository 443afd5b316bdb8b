"""What the fleet remembers of one engine, beside what the engine knows of itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

import anyio

from hotswap.engine import Engine, SupportsAdapters
from hotswap.errors import SwapRefused
from hotswap.request import ModelId, RequestId
from hotswap.telemetry import Telemetry
from hotswap.view import InstanceId, InstanceState, InstanceView

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from hotswap.runtime.flight import Flight

__all__ = ["Instance"]

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0

# What changes with every request, and nothing that says which model is where: the fields of `counted`.
_COUNTED = frozenset({"num_requests", "num_high_priority", "num_moves", "last_assigned", "last_used_s"})


class Change(Enum):
    """What is new of an instance: the load that its engine tells of, counts of the fleet, or more."""

    LOAD = auto()
    COUNTED = auto()
    TURNED = auto()


@dataclass(frozen=True, slots=True)
class Retry:
    """How often something failed in a row, and the loop time from which it may be tried again."""

    num_failures: int = 0
    at_s: float = -math.inf


class Instance:
    """One engine of a fleet: who is assigned to it, whether it is being swapped, when it may be tried again.

    Owned by the fleet; everyone else reads its frozen `view()`.
    """

    def __init__(self, engine: Engine) -> None:
        self.on_change: Callable[[InstanceId, Change], None] | None = None
        self.engine = engine
        self.id: InstanceId = engine.id
        self.flights: dict[RequestId, Flight] = {}
        self.num_requests = self.num_high_priority = 0
        self.num_moves = 0
        self.last_assigned = 0
        self.swapped_s: float | None = None
        self.draining = False
        self._adapts = isinstance(engine, SupportsAdapters)  # a wrapper hides the ability, not the view
        self.serving_since_s: float | None = None
        self.last_used_s: float | None = None
        self.swap_context: SpanContext | None = None
        self._first_token: Span | None = None
        self._retries: dict[ModelId | None, Retry] = {}
        self._swapping = False
        self._target: ModelId | None = None
        self._watched = engine.watch(self)

    def __setattr__(self, name: str, value: object) -> None:
        # Whatever is set here shows in the view, and nobody has to remember to say so.
        object.__setattr__(self, name, value)
        if (tell := self.on_change) is not None:
            tell(self.id, Change.COUNTED if name in _COUNTED else Change.TURNED)

    def charge(self, number: int, *, high: bool) -> None:
        """Count a request in that the assignment of this number brings; `high` is its priority over 0."""
        self._count(1, high=high, last_assigned=number)

    def release(self, *, high: bool) -> None:
        """Count one out again."""
        self._count(-1, high=high)

    def _count(self, requests: int, *, high: bool, **fields: int) -> None:
        """Change counts and say so once, not for each of them: it happens twice in every request."""
        vars(self).update(
            fields,
            num_requests=self.num_requests + requests,
            num_high_priority=self.num_high_priority + (requests if high else 0),
            last_used_s=anyio.current_time(),
        )
        if self.on_change is not None:
            self.on_change(self.id, Change.COUNTED)

    def load_changed(self) -> None:
        """As the engine tells."""
        if self.on_change is not None:
            self.on_change(self.id, Change.LOAD)

    def state_changed(self) -> None:
        """As the engine tells."""
        if self.on_change is not None:
            self.on_change(self.id, Change.TURNED)

    @property
    def restless(self) -> bool:
        """Whether its view may change without a word, so that it has to be looked at each time."""
        return not self._watched or self.retries

    @property
    def retries(self) -> bool:
        """Whether something failed here that may be tried again."""
        return bool(self._retries)

    def view(self) -> InstanceView:
        """The engine's own view with the fleet's fields filled in."""
        view = self.engine.status()
        resting = (model for model in self._retries if model is not None and not self.due(model))
        return InstanceView.of(
            view,
            max_adapters=view.max_adapters if self._adapts else 0,
            swapping=self._swapping,
            target=self._target,
            serving_since_s=self.serving_since_s if view.model is not None else None,
            draining=self.draining,
            swapped_s=self.swapped_s,
            cooling_down=tuple(resting) if self._retries else (),
            num_requests=self.num_requests,
            num_high_priority=self.num_high_priority,
            num_moves=self.num_moves,
            last_assigned=self.last_assigned,
            last_used_s=self.last_used_s,
        )

    def counted(self, view: InstanceView) -> InstanceView:
        """Return a view of it with the fleet's counts as they are now."""
        return view.updated(
            num_requests=self.num_requests,
            num_high_priority=self.num_high_priority,
            num_moves=self.num_moves,
            last_assigned=self.last_assigned,
            last_used_s=self.last_used_s,
        )

    @property
    def broken(self) -> bool:
        """Whether it is LOST, or left half way by a verb that failed, so that only `unload` may help."""
        settled = (InstanceState.SERVING, InstanceState.EMPTY)
        return not self._swapping and self.engine.status().state not in settled

    def claim(self, target: ModelId | None) -> None:
        """Take the instance for a swap to `target`: synchronous, so two swaps can never interleave.

        `None`, an unload, may claim an instance that was left half way as well.

        Raises:
            SwapRefused: another swap has it, or it was left half way.
        """
        view = self.view()
        if view.swapping:
            raise SwapRefused(
                f"Instance {self.id!r} is being swapped to {view.target!r}; wait for that swap to end."
            )
        if target is not None and view.state in (InstanceState.LOADING, InstanceState.DRAINING):
            raise SwapRefused(f"Instance {self.id!r} is {view.state}; wait until it is SERVING or EMPTY.")
        self._swapping, self._target = True, target

    def unclaim(self) -> None:
        """Give the instance back after its swap."""
        self._swapping, self._target = False, None
        self.swapped_s = anyio.current_time()

    def await_first_token(self, span: Span) -> None:
        """Keep a span open until the model that was just loaded gives its first token."""
        self._first_token = span

    def settle_first_token(self, telemetry: Telemetry) -> None:
        """End that span, if it is open: the token came, or never will."""
        if self._first_token is not None:
            telemetry.finish(self._first_token)
            self._first_token = None

    def failed(self, model: ModelId | None) -> None:
        """Leave the pair of instance and model alone for a while that doubles with every failure in a row.

        `None` stands for an unload, also one that restarts a lost instance.
        """
        failures = self._retries.get(model, Retry()).num_failures + 1
        delay_s = min(FIRST_BACKOFF_S * 2 ** (failures - 1), LONGEST_BACKOFF_S)
        retry = Retry(num_failures=failures, at_s=anyio.current_time() + delay_s)
        self._retries = {**self._retries, model: retry}

    def succeeded(self, model: ModelId | None) -> None:
        """Forget earlier failures with the model."""
        self._retries = {tried: retry for tried, retry in self._retries.items() if tried != model}

    def due(self, model: ModelId | None) -> bool:
        """Whether the model may be tried here again."""
        return anyio.current_time() >= self._retries.get(model, Retry()).at_s

    def next_retry_s(self) -> float:
        """The loop time at which the next of the pauses ends; infinite if there is none."""
        now_s = anyio.current_time()
        return min((retry.at_s for retry in self._retries.values() if retry.at_s > now_s), default=math.inf)

    def __repr__(self) -> str:
        return f"<Instance of {self.engine!r}>"
