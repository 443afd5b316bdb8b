"""Which adapters an engine holds, and how many requests use each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hotswap.backends.notifier import StatusNotifier
from hotswap.errors import InstanceError, OutOfMemory, ShardMissing, UnknownAdapter, UnsupportedAdapter
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId

__all__ = ["AdapterAccounting", "Held"]

PlaceT = TypeVar("PlaceT")


@dataclass(slots=True, eq=False)
class Held(Generic[PlaceT]):
    """An adapter that is held, and how many requests use it."""

    place: PlaceT
    num_users: int = 0


class AdapterAccounting(Generic[PlaceT]):
    """The adapters of one engine; belongs to the event loop.

    `PlaceT` is what the engine knows an adapter by, such as its place in a pool.

    Args:
        engine: Its name, for errors.
        most: How many it may hold.
        notifier: Told when an adapter comes or goes.
    """

    def __init__(self, engine: InstanceId, *, most: int, notifier: StatusNotifier) -> None:
        self._engine, self._most, self._notifier = engine, most, notifier
        self._model: ModelId | None = None
        self._held: dict[AdapterId, Held[PlaceT]] = {}

    @property
    def names(self) -> tuple[AdapterId, ...]:
        """The adapters that are held."""
        return tuple(self._held)

    @property
    def places(self) -> dict[AdapterId, PlaceT]:
        """What the engine knows each of them by."""
        return {name: held.place for name, held in self._held.items()}

    def serve(self, model: ModelId) -> None:
        """Hold adapters of `model` from now on."""
        self._model = model

    def clear(self) -> list[PlaceT]:
        """Forget the model and every adapter; return their places."""
        places = [held.place for held in self._held.values()]
        self._model, self._held = None, {}
        self._notifier.state_changed()
        return places

    def directory_of(self, adapter: Adapter) -> Path | None:
        """Return the directory of an adapter that may be loaded; `None` if it is held.

        Raises:
            InstanceError: the engine serves another model.
            UnsupportedAdapter: it holds no adapters at all.
            OutOfMemory: it holds as many as it may.
            ShardMissing: the adapter has no source.
        """
        if self._model != adapter.model:
            raise InstanceError(
                f"Engine {self._engine!r} serves {self._model!r}, and adapter {adapter.id!r} is of "
                f"{adapter.model!r}; ask an engine that serves that."
            )
        if adapter.version in self._held:
            return None
        if not self._most:
            raise UnsupportedAdapter(
                f"Engine {self._engine!r} holds no adapters; ask one that has max_adapters."
            )
        if len(self._held) >= self._most:
            raise OutOfMemory(
                f"Engine {self._engine!r} holds {len(self._held)} adapters, all it may; drop one."
            )
        if adapter.source is None:
            raise ShardMissing(f"Adapter {adapter.version!r} has no source; say in which directory it lies.")
        return Path(adapter.source)

    def add(self, adapter: AdapterId, place: PlaceT) -> None:
        """Note an adapter that was loaded."""
        self._held[adapter] = Held(place)
        self._notifier.state_changed()

    def remove(self, adapter: AdapterId) -> PlaceT | None:
        """Forget an adapter and return its place; `None` if it was not held.

        Raises:
            InstanceError: a request uses it.
        """
        held = self._held.get(adapter)
        if held is None:
            return None
        if held.num_users:
            raise InstanceError(
                f"{held.num_users} requests of engine {self._engine!r} use adapter {adapter!r}; let them end."
            )
        del self._held[adapter]
        self._notifier.state_changed()
        return held.place

    def use(self, adapter: AdapterId | None) -> Held[PlaceT] | None:
        """Count one more user of an adapter; the caller decrements `num_users` at its end. `None` for none.

        Raises:
            UnknownAdapter: it is not held.
        """
        if adapter is None:
            return None
        held = self._held.get(adapter)
        if held is None:
            raise UnknownAdapter(f"Engine {self._engine!r} holds no adapter {adapter!r}; load it first.")
        held.num_users += 1
        return held

    def unloaded(self, adapter: AdapterId) -> InstanceError:
        """Return the error of an adapter whose model was unloaded while the adapter was read."""
        return InstanceError(
            f"Engine {self._engine!r} unloaded the model of adapter {adapter!r} while that was read; "
            "ask again."
        )

    def __repr__(self) -> str:
        held = ", ".join(f"{name} [{held.num_users} users]" for name, held in self._held.items())
        return f"<AdapterAccounting of {self._engine} {self._model} [{held or 'none'}; at most {self._most}]>"
