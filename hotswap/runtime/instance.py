"""What the fleet knows of one engine beside what the engine tells of itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, cast

from hotswap.checks import shown
from hotswap.engine import (
    Engine,
    SupportsAdapters,
    SupportsKVLimit,
    SupportsModelCheck,
    SupportsModelTrial,
    SupportsResize,
    WrapperEngine,
)
from hotswap.errors import InstanceError, UnsupportedModel
from hotswap.loop_time import current_time
from hotswap.metered_store import MeteredStore
from hotswap.model import ModelCard
from hotswap.phase_view import PhaseView
from hotswap.request import ModelId
from hotswap.runtime.turn import Turn
from hotswap.store import WeightStore
from hotswap.telemetry import Telemetry
from hotswap.view import EngineStatus, InstanceId, InstanceState, InstanceView

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

__all__ = ["Instance", "refusal"]

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
# An engine that could not be restarted so many times in a row is left LOST.
MAX_RESTARTS = 10


@dataclass(frozen=True, slots=True)
class Cooldown:
    """How often something failed in a row, and the loop time from which it may be tried again."""

    num_failures: int = 0
    until_s: float = -math.inf


class Instance:
    """One engine of a fleet: its requests, its swap, and what may be tried on it again, and when.

    Only `FleetState` changes it; everything else reads it, mostly as a frozen `view()`.

    Attributes:
        engine: The engine.
        id: Its id.
        polled: Whether it is asked for its status at every view, since it does not tell of changes.
        gone_for_good: Whether so many restarts failed in a row that none is tried any more.
        swap_context: The span of its latest swap, for links.
        refused: Models that its engine says it will never serve, with its reasons.
        turn: The requests that its turn began with.
        num_evicted: How many requests it has given back so far.
        phase: Where its swap is, without the bytes; `None` outside of one.
        reads: What its swap reads the next model from.
        lost_because: Why it is lost, empty if that is not known; `None` while it is not.
    """

    def __init__(self, engine: Engine, models: Iterable[ModelCard]) -> None:
        self.engine = engine
        self.id: InstanceId = engine.id
        self.polled = True
        self.num_requests = self.num_high_priority = self.num_moves = self.last_assigned = 0
        self.num_evicted = 0
        self.last_used_s: float | None = None
        self.swapped_s: float | None = None
        self.serving_since_s: float | None = None
        self.draining = self.swapping = self.gone_for_good = False
        self.turn = Turn()
        self.target: ModelId | None = None
        self.phase: PhaseView | None = None
        self.reads: MeteredStore | None = None
        self.lost_because: str | None = None
        self.cooldowns: dict[ModelId | None, Cooldown] = {}
        self.refused: dict[ModelId, UnsupportedModel] = {}
        self.swap_context: SpanContext | None = None
        self._first_token: Span | None = None
        self._told: EngineStatus | None = None
        self.consider(*models)

    def current_phase(self) -> PhaseView | None:
        """Return where its swap is, with the bytes that it has read by now; `None` outside of one."""
        if self.phase is None or self.reads is None:
            return None
        return replace(self.phase, loaded_bytes=self.reads.num_bytes)

    def status(self) -> EngineStatus:
        """Return what the engine tells of itself.

        Raises:
            InstanceError: it cannot; its own error is the cause.
        """
        try:
            told = cast("object", self.engine.status())
            if not isinstance(told, EngineStatus):
                raise TypeError(f"{shown(told)} is no EngineStatus")
            self._told = told
            return told
        except InstanceError:
            raise
        except Exception as exc:
            raise InstanceError(
                f"Instance {self.id!r} cannot tell its status ({type(exc).__name__}: {exc}); if it does not "
                "recover, remove or replace it."
            ) from exc

    def view(self) -> InstanceView:
        """The engine's status with the fleet's fields beside it; errors are those of `status`."""
        return self._view(self.status())

    def last_view(self) -> InstanceView | None:
        """The same with the status that the engine told last; `None` if it has told none."""
        return None if self._told is None else self._view(self._told)

    def seem_lost(self) -> None:
        """Have `last_view` show it LOST, as its engine told a request, until it tells its status again."""
        if self._told is not None:
            self._told = replace(self._told, state=InstanceState.LOST)

    def _view(self, status: EngineStatus) -> InstanceView:
        own = self._counts()
        # A wrapper hides the ability, not the status.
        own["max_adapters"] = status.max_adapters if _supports(type(self.engine), SupportsAdapters) else 0
        own["swapping"], own["target"], own["phase"] = self.swapping, self.target, self.current_phase()
        is_lost = status.state == InstanceState.LOST
        own["lost_because"] = (self.lost_because or status.lost_because) if is_lost else ""
        own["serving_since_s"] = self.serving_since_s if status.model is not None else None
        own["draining"], own["swapped_s"] = self.draining, self.swapped_s
        own["cooling_down"] = self._cooling_down() if self.cooldowns or self.refused else ()
        return InstanceView.of(status, own)

    def counted(self, view: InstanceView) -> InstanceView:
        """Return an earlier view of it with the fleet's counts as they are now."""
        return view.updated_by(self._counts())

    def _counts(self) -> dict[str, object]:
        return {
            "num_requests": self.num_requests,
            "num_high_priority": self.num_high_priority,
            "num_moves": self.num_moves,
            "last_assigned": self.last_assigned,
            "last_used_s": self.last_used_s,
            "num_opening": len(self.turn.opening),
        }

    def _cooling_down(self) -> tuple[ModelId, ...]:
        later = (model for model in self.cooldowns if model is not None and not self.may_try(model))
        return tuple(dict.fromkeys((*self.refused, *later)))

    def consider(self, *models: ModelCard) -> bool:
        """Note which of these the engine says that it will never serve; return whether it says of any."""
        if (limited := cast("SupportsKVLimit | None", _beneath(self.engine, SupportsKVLimit))) is not None:
            # One elsewhere finds it out, so as to know it when it is asked; one here knows it of all.
            any(limited.most_kv_tokens(model) is not None for model in models)
        if _beneath(self.engine, SupportsModelCheck) is None:
            return False
        for model in models:
            self.refused.pop(model.id, None)
            with suppress(UnsupportedModel):
                self.check_model(model)
        return True

    def most_kv_tokens(self, model: ModelCard) -> int | None:
        """Return how many tokens of one request of a model it could hold; `None` if that is not known."""
        engine = cast("SupportsKVLimit | None", _beneath(self.engine, SupportsKVLimit))
        return None if engine is None else engine.most_kv_tokens(model)

    def check_model(self, model: ModelCard) -> None:
        """Raise `UnsupportedModel`, and note it, if the engine says that it will never serve a model."""
        engine = cast("SupportsModelCheck | None", _beneath(self.engine, SupportsModelCheck))
        if engine is not None:
            with self._noting(model):
                engine.check_model(model)

    @property
    def resizable(self) -> SupportsResize | None:
        """What resizes its KV pool; `None` if neither its engine can, nor one that this wraps."""
        return cast("SupportsResize | None", _beneath(self.engine, SupportsResize))

    @property
    def tries_models(self) -> bool:
        """Whether `try_model` may find something out."""
        return _beneath(self.engine, SupportsModelTrial) is not None

    async def try_model(self, model: ModelCard, store: WeightStore) -> None:
        """Raise `UnsupportedModel`, and note it, if the engine finds that it will never serve a model."""
        engine = cast("SupportsModelTrial | None", _beneath(self.engine, SupportsModelTrial))
        if engine is not None:
            with self._noting(model):
                await engine.try_model(model, store)

    @contextmanager
    def _noting(self, model: ModelCard) -> Generator[None]:
        try:
            yield
        except UnsupportedModel as exc:
            self.refused[model.id] = exc
            raise

    @property
    def broken(self) -> bool:
        """Whether it is LOST, or a verb that failed left it half way, so that only `unload` may help."""
        return not self.swapping and self.status().state not in (InstanceState.SERVING, InstanceState.EMPTY)

    def may_try(self, model: ModelId | None) -> bool:
        """Whether a model that failed to load here may be tried again; `None` stands for a restart."""
        if (model is None and self.gone_for_good) or model in self.refused:
            return False
        return current_time() >= self.cooldowns.get(model, Cooldown()).until_s

    def next_try_s(self) -> float:
        """The loop time at which the next of its pauses ends; infinite if there is none."""
        later = (c.until_s for c in self.cooldowns.values() if c.until_s > current_time())
        return min(later, default=math.inf)

    def await_first_token(self, span: Span) -> None:
        """Keep a span open until the model that was just loaded gives its first token."""
        self._first_token = span

    def end_first_token(self, telemetry: Telemetry) -> None:
        """End that span, if it is open: the token came, or never will."""
        if self._first_token is not None:
            telemetry.finish(self._first_token)
            self._first_token = None

    def __repr__(self) -> str:
        return f"<Instance of {self.engine!r}>"


def _beneath(engine: Engine, ability: type) -> Engine | None:
    """Return the engine if it has an ability, else that which it wraps and that has it; `None` without."""
    while isinstance(engine, WrapperEngine) and not _supports(type(engine), ability):
        engine = engine.wrapped
    return engine if _supports(type(engine), ability) else None


@cache
def _supports(kind: type[Engine], ability: type) -> bool:
    """Whether engines of a class have an ability; a remote one gets its class when it is started."""
    return issubclass(kind, ability)


def refusal(instances: Collection[Instance], model: ModelId) -> UnsupportedModel | None:
    """Return why a model will never be served, if every instance's engine says so."""
    refuse = bool(instances) and all(model in of.refused for of in instances)
    return next(iter(instances)).refused[model] if refuse else None
