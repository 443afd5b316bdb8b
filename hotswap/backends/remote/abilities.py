"""The abilities of remote engines, each a class of its own: an engine has those that its host tells.

`isinstance(engine, SupportsAdapters)` asks for methods, so a class with all of them would claim too much.
"""

from __future__ import annotations

import functools
import types
from contextlib import suppress
from typing import Final, TypeVar

from anyio import from_thread

from hotswap.backends.remote.control import ControlLink
from hotswap.backends.remote.host_memory import LendsMemory
from hotswap.backends.remote.linked import LinkedEngine, count_read
from hotswap.backends.remote.listing import ListsKV
from hotswap.backends.remote.moves import Migrates
from hotswap.backends.remote.values import adapter_fields, card_fields
from hotswap.checks import check_counts
from hotswap.engine import (
    SupportsAdapters,
    SupportsGrammars,
    SupportsKVLimit,
    SupportsModelCheck,
    SupportsModelTrial,
    SupportsPreload,
    SupportsResize,
)
from hotswap.errors import ConfigError, HotswapError, InstanceError, UnsupportedModel
from hotswap.migration import SupportsKVListing, SupportsMigration
from hotswap.model import Adapter, ModelCard
from hotswap.request import AdapterId
from hotswap.store import WeightStore

__all__ = ["abilities_of", "class_with"]

_E = TypeVar("_E", bound=LinkedEngine)

_MAX_VERDICTS = 10_000


class _Preloads(LinkedEngine):
    """See `SupportsPreload`."""

    def can_preload(self, model: ModelCard) -> bool:
        """Whether the weights would fit beside those that are loaded; the host's engine has the last word."""
        status = self.status()
        staged_anew = status.preloaded is not None
        return (
            staged_anew
            or not status.memory_bytes
            or status.weight_bytes + model.weight_bytes <= status.memory_bytes
        )

    async def preload(self, model: ModelCard, store: WeightStore) -> None:
        link = self._linked()
        self._give(store)
        count_read(link, store, await link.call("preload", model=card_fields(model)))

    async def drop_preload(self) -> None:
        await self._call("drop_preload")


class _HoldsAdapters(LinkedEngine):
    """See `SupportsAdapters`."""

    async def load_adapter(self, adapter: Adapter) -> None:
        await self._call("load_adapter", adapter=adapter_fields(adapter))

    async def drop_adapter(self, adapter: AdapterId) -> None:
        await self._call("drop_adapter", adapter=adapter)


class _ChecksModels(LinkedEngine):
    """See `SupportsModelCheck`; the host is asked once for each model, which is not refused until then."""

    def check_model(self, model: ModelCard) -> None:
        if self._link is None or self._link.lost or self._tasks is None:
            return
        verdicts = self._link.verdicts
        if model not in verdicts:
            if len(verdicts) >= _MAX_VERDICTS:
                verdicts.clear()
            verdicts[model] = None
            self._tasks.start_soon(self._ask, self._link, model, name=f"check of {model.id} for {self.id}")
        elif (refusal := verdicts[model]) is not None:
            raise UnsupportedModel(str(refusal))

    async def _ask(self, link: ControlLink, model: ModelCard) -> None:
        try:
            await link.call("check_model", model=card_fields(model))
        except UnsupportedModel as exc:
            link.verdicts[model] = exc
            self._status.state_changed()
        except HotswapError:  # it cannot tell now
            link.verdicts.pop(model, None)


class _LimitsKV(LinkedEngine):
    """See `SupportsKVLimit`; the host is asked for each model until it can tell, and is believed then."""

    def most_kv_tokens(self, model: ModelCard) -> int | None:
        if self._link is None or self._link.lost or self._tasks is None:
            return None
        limits = self._link.kv_limits
        if model not in limits:
            if len(limits) >= _MAX_VERDICTS:
                limits.clear()
            limits[model] = None
            name = f"KV limit of {model.id} for {self.id}"
            self._tasks.start_soon(self._ask_limit, self._link, model, name=name)
        return limits[model]

    async def _ask_limit(self, link: ControlLink, model: ModelCard) -> None:
        num_tokens = 0
        with suppress(HotswapError):  # it cannot tell now
            answer = await link.call("most_kv_tokens", model=card_fields(model))
            with link.reading():
                num_tokens = answer.fields.size("num_tokens")
        if num_tokens:
            link.kv_limits[model] = num_tokens
        else:
            link.kv_limits.pop(model, None)


class _TriesModels(LinkedEngine):
    """See `SupportsModelTrial`; the model is tried with what the host's store has of it."""

    async def try_model(self, model: ModelCard, store: WeightStore) -> None:
        await self._call("try_model", model=card_fields(model))


class _ChecksGrammars(LinkedEngine):
    """See `SupportsGrammars`."""

    def check_grammar(self, field: str, grammar: str) -> None:
        if self._link is None:
            raise InstanceError(f"Engine {self.id!r} cannot be used before `async with` has started it.")
        from_thread.run(self._check_grammar, field, grammar, token=self._link.loop)

    async def _check_grammar(self, field: str, grammar: str) -> None:
        await self._call("check_grammar", field=field, grammar=grammar)


class _Resizes(LinkedEngine):
    """See `SupportsResize`."""

    async def resize_kv(self, num_blocks: int) -> int:
        check_counts(ConfigError, 0, num_blocks=num_blocks)
        link = self._linked()
        answer = await link.call("resize_kv", num_blocks=num_blocks)
        with link.reading():
            return answer.fields.size("num_blocks")


# By the names that hosts tell: what an engine is asked for, and the class that has its verbs at a controller.
_ABILITIES: Final[dict[str, tuple[type, type[LinkedEngine]]]] = {
    "preload": (SupportsPreload, _Preloads),
    "adapters": (SupportsAdapters, _HoldsAdapters),
    "model_check": (SupportsModelCheck, _ChecksModels),
    "model_trial": (SupportsModelTrial, _TriesModels),
    "grammars": (SupportsGrammars, _ChecksGrammars),
    "kv_limit": (SupportsKVLimit, _LimitsKV),
    "resize": (SupportsResize, _Resizes),
    "migration": (SupportsMigration, Migrates),
    "kv_listing": (SupportsKVListing, ListsKV),
    "kv_memory": (SupportsMigration, LendsMemory),
}


def abilities_of(engine: object) -> list[str]:
    """Return the names of an engine's abilities."""
    return [name for name, (ability, _) in _ABILITIES.items() if isinstance(engine, ability)]


@functools.cache
def class_with(base: type[_E], abilities: frozenset[str]) -> type[_E]:
    """Return a subclass of `base` with the methods of some abilities; names that are unknown do not count."""
    added = [made for name, (_, made) in _ABILITIES.items() if name in abilities]
    return types.new_class(base.__name__, (base, *added), exec_body=lambda body: body.update(_names_of(base)))


def _names_of(base: type) -> dict[str, str]:
    return {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__ or ""}
