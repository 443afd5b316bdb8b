"""The frozen picture of a fleet that every decision is made from.

A view holds values only and serialises (see `hotswap.offline.replay`), so any decision can be replayed
offline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NewType, Protocol, Self, TypeVar

from hotswap.lookup import Count, Lookup, Rank
from hotswap.request import AdapterId, ModelId, RequestId
from hotswap.store_view import Residency, StoreView, TierView

__all__ = [
    "AdapterView",
    "EngineStatus",
    "FleetView",
    "InstanceId",
    "InstanceState",
    "InstanceView",
    "ModelView",
    "Residency",
    "RunningView",
    "StoreView",
    "TierView",
    "ViewSource",
    "WaitingView",
]

InstanceId = NewType("InstanceId", str)

_Status = TypeVar("_Status", bound="EngineStatus")


class InstanceState(StrEnum):
    """The life of an instance; see the diagram in `hotswap.engine`."""

    EMPTY = "EMPTY"
    LOADING = "LOADING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    LOST = "LOST"


@dataclass(frozen=True, kw_only=True)  # without slots, so that `updated` is as fast as it is
class EngineStatus:
    """What an engine tells of itself at one moment: its state, its load and its memory.

    Attributes:
        id: The engine's id, which is the instance's.
        state: Where it is in its life.
        model: The model that it serves, loads or is draining; `None` if there is none.
        num_running: Requests of its batch.
        num_waiting: Requests that wait inside the engine.
        num_prefill_tokens: Tokens that must be computed before the requests here can give their next token,
            beyond the one that a decode computes. An engine that does not know how far a prompt has been
            computed counts all of it until its first token.
        max_requests: The most requests that it takes at once.
        num_kv_blocks: KV blocks of its pool; 0 while there is none.
        num_free_kv_blocks: Blocks that a new request could be given, also those that are kept only for reuse
            as a prefix.
        num_next_kv_blocks: Blocks that the first waiting request needs before it can begin; 0 if none waits.
        preempted: Requests that wait again after they had run, as far as the engine knows.
        kv_block_tokens: Tokens of a KV block.
        memory_bytes: What weights and KV blocks may take together; 0 if the engine does not know.
        weight_bytes: What weights take now, preloaded ones included.
        adapters: The adapters that it holds, by `Adapter.version`.
        max_adapters: How many it could hold; 0 if it can hold none.
        preloaded: The model that is staged beside the one that it serves.
        load_path: How the engine came by its model, in its own words, where it has more ways than one.
        node: Where it is, for stores whose tiers belong to nodes; "" if that makes no difference.
    """

    id: InstanceId
    state: InstanceState
    model: ModelId | None = None
    num_running: int = 0
    num_waiting: int = 0
    num_prefill_tokens: int = 0
    max_requests: int = 256
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    num_next_kv_blocks: int = 0
    preempted: tuple[RequestId, ...] = ()
    kv_block_tokens: int = 16
    memory_bytes: int = 0
    weight_bytes: int = 0
    adapters: tuple[AdapterId, ...] = ()
    max_adapters: int = 0
    preloaded: ModelId | None = None
    load_path: str = ""
    node: str = ""

    def updated(self, **fields: object) -> Self:
        """Return it with other values for some fields.

        The same as `dataclasses.replace`, but it runs no `__init__`, which takes five times as long: a large
        fleet makes thousands of these in a second.
        """
        return _made(type(self), self, fields)

    @property
    def max_tokens(self) -> int | None:
        """The longest request its KV blocks could ever hold, in tokens; `None` while no pool exists."""
        return self.num_kv_blocks * self.kv_block_tokens or None


@dataclass(frozen=True, kw_only=True)
class InstanceView(EngineStatus):
    """One instance at one moment: what its engine tells, and what the fleet knows of it beside that.

    Attributes:
        num_requests: Requests that the fleet has assigned here, also those that the engine has not seen yet;
            routers balance this number.
        swapping: Whether a swap has the instance, from its acceptance until its record is written.
        target: The model of that swap; `None` for an unload.
        serving_since_s: The loop time at which the present model became ready; `None` if there is none.
        cooling_down: Models that failed to load here and are not tried again yet.
        draining: Whether the fleet sends nothing more here, and moves what runs elsewhere.
        last_used_s: The loop time at which a request last came here or left; `None` if none ever did.
        num_high_priority: Requests among `num_requests` whose priority is over 0.
        num_moves: Moves under way that begin or end here.
        last_assigned: The number, counted over the fleet, of the assignment by which the latest request came
            here; 0 if none ever did.
        swapped_s: The loop time at which the latest swap here ended, an unload too and whatever its outcome;
            `None` if there was none.
    """

    num_requests: int = 0
    swapping: bool = False
    target: ModelId | None = None
    serving_since_s: float | None = None
    cooling_down: tuple[ModelId, ...] = ()
    draining: bool = False
    last_used_s: float | None = None
    num_high_priority: int = 0
    num_moves: int = 0
    last_assigned: int = 0
    swapped_s: float | None = None

    @classmethod
    def of(cls, status: EngineStatus, **fields: object) -> InstanceView:
        """Return the view of an engine's status and the fleet's own fields."""
        return _made(cls, status, fields)

    @property
    def open(self) -> bool:
        """Whether a request for `model` may be sent here now, also while the next one is staged."""
        serving = self.state is InstanceState.SERVING and not self.draining
        return serving and self.num_requests < self.max_requests

    @property
    def free(self) -> bool:
        """Whether a swap may begin here now."""
        settled = self.state in (InstanceState.SERVING, InstanceState.EMPTY)
        return settled and not self.swapping and not self.draining

    @property
    def hosted(self) -> ModelId | None:
        """The model that it is SERVING; `None` of any other state."""
        return self.model if self.state is InstanceState.SERVING else None

    @property
    def next_model(self) -> ModelId | None:
        """The model that it serves, loads or is turning to; `None` while it is emptied by hand, or LOST."""
        if self.swapping:
            return self.target
        alive = self.state in (InstanceState.SERVING, InstanceState.LOADING) and not self.draining
        return self.model if alive else None


def _made(kind: type[_Status], base: EngineStatus, fields: dict[str, object]) -> _Status:
    made = object.__new__(kind)
    object.__setattr__(made, "__dict__", base.__dict__ | fields)
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One registered model at one moment.

    `num_running` requests are assigned to instances, `num_waiting` sit in the waiting room; their sum is the
    *p* of the swap policy. `num_failed_loads` counts failures since the last load that succeeded.
    `last_evicted_s` is the loop time at which a swap or unload of one of its replicas last ended; `None` if
    none did.
    """

    id: ModelId
    weight_bytes: int = 0
    min_replicas: int = 0
    weight: float = 1.0
    num_running: int = 0
    num_waiting: int = 0
    num_failed_loads: int = 0
    last_evicted_s: float | None = None

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self.num_running + self.num_waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingView:
    """One request of the waiting room, in the order in which they are asked about.

    Of its `num_tokens` it was given `num_generated` before, elsewhere.
    """

    id: RequestId
    model: ModelId
    adapter: AdapterId | None = None
    num_tokens: int = 0
    num_generated: int = 0
    priority: int = 0
    arrived_s: float = 0.0
    waiting_since_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """One request that an instance is charged with; `moving` while it is on its way to another.

    `begun` once it has got a token there: until then it waits in the engine, or its tokens are prefilled.
    """

    id: RequestId
    model: ModelId
    instance: InstanceId
    num_tokens: int = 0
    num_remaining: int = 0
    priority: int = 0
    arrived_s: float = 0.0
    begun: bool = True
    moving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterView:
    """One adapter that has been asked for, at one moment; `id` is its latest version, as engines hold it.

    `num_running` requests with this version are assigned to instances, `num_waiting` sit in the waiting room.
    `popularity` is how much it was asked for of late: a request counts for one when it comes, and for half as
    much after every minute. `asked_s` is the loop time at which the last one came, `gap_s` what lies between
    two of them, later ones counting for more; `None` before there were two.
    """

    id: AdapterId
    model: ModelId
    num_running: int = 0
    num_waiting: int = 0
    popularity: float = 0.0
    asked_s: float = 0.0
    gap_s: float | None = None

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return self.num_running + self.num_waiting


class ViewSource(Protocol):
    """Where a view finds its parts when it is asked for them, which is at the moment that it shows."""

    @property
    def lookup(self) -> Lookup:
        """The instances."""
        ...

    def part(self, name: str) -> Any:
        """Return the field of that name."""
        ...

    def running_on(self, instance: InstanceId) -> tuple[RunningView, ...]:
        """Return those of `running` that an instance is charged with."""
        ...


_PARTS = ("instances", "models", "waiting", "store", "running", "adapters")


class _Lazy:
    """What `FleetView` is beside its fields: it fetches those that its source still has."""

    __slots__ = ("__weakref__", "_lookup", "_on_instance", "_source")

    _lookup: Lookup
    _source: ViewSource | None
    _on_instance: dict[InstanceId, list[RunningView]]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _PARTS:
                value = self._source.part(name)
            elif name == "_lookup":
                source = self._source
                value = Lookup(self.instances) if source is None else source.lookup
            elif name == "_source":
                value = None
            elif name == "_on_instance":
                value = {}
                for running in self.running:
                    value.setdefault(running.instance, []).append(running)
            else:
                raise AttributeError(name)
            object.__setattr__(self, name, value)
            return value


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView(_Lazy):
    """The whole fleet at loop time `now_s`: the only input of a scheduler's or a router's decision.

    `running` and `adapters` are there for schedulers; routers see them empty. In a large fleet ask `hosts`,
    `serving`, `replicas`, `least`, `instance` and `running_on`, which cost what they return, rather than go
    over `instances` and `running`, which cost what there is. A view may be kept: it never changes.
    """

    now_s: float
    instances: tuple[InstanceView, ...] = ()
    models: tuple[ModelView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()
    store: StoreView = field(default_factory=StoreView)
    running: tuple[RunningView, ...] = ()
    adapters: tuple[AdapterView, ...] = ()

    @classmethod
    def of(cls, source: ViewSource, now_s: float) -> FleetView:
        """Return the view of a source, whose parts are fetched when they are first asked for.

        Whoever makes it calls `settle` before the source changes, if somebody still has the view.
        """
        view = object.__new__(cls)
        object.__setattr__(view, "now_s", now_s)
        object.__setattr__(view, "_source", source)
        object.__setattr__(view, "_lookup", source.lookup)
        return view

    def settle(self) -> None:
        """Fetch everything, so that the source may change."""
        if self._source is None:
            return
        for name in _PARTS:
            getattr(self, name)
        object.__setattr__(self, "_source", None)
        object.__delattr__(self, "_lookup")  # its own is made when somebody asks

    @property
    def ids(self) -> frozenset[InstanceId]:
        """Those of all instances; the same object from view to view until one comes or goes."""
        return self._lookup.ids

    def instance(self, instance: InstanceId) -> InstanceView:
        """The view of one instance; `KeyError` if the fleet has none of that id."""
        return self._lookup.instance(instance)

    def model(self, model: ModelId) -> ModelView:
        """The view of one model; `KeyError` if it is not registered."""
        for view in self.models:
            if view.id == model:
                return view
        raise KeyError(model)

    def hosts(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Instances that are SERVING the model, also those that take no more requests now."""
        return self._lookup.hosts(model)

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Instances that serve the model or are turning to it; those turning away from it do not count."""
        return self._lookup.replicas(model)

    def serving(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Instances to which a request of the model may be sent now."""
        return tuple(instance for instance in self._lookup.hosts(model) if instance.open)

    def min_by(self, model: ModelId, rank: Rank) -> InstanceView | None:
        """The host of the model that `rank` puts first, `None` if it ranks none.

        As `min(hosts(model), key=rank)`, but what a fleet has ranked once it ranks again only after a change,
        so the answer does not take longer for more hosts.
        """
        return self._lookup.min_by(model, rank)

    def ranked(self, model: ModelId, rank: Rank) -> Iterator[InstanceView]:
        """The hosts of the model that `rank` ranks, the best first; costs what is taken of them.

        Valid until `least` or `ranked` is asked for the same rank again, or something changes.
        """
        return self._lookup.ranked(model, rank)

    def total(self, model: ModelId, count: Count) -> tuple[int, int]:
        """How many hosts of the model `count` has a number for, and the sum of these, kept like `least`.

        The number may depend on what the fleet counts itself, such as `num_requests`, and on no load.
        """
        return self._lookup.total(model, count)

    def host_ids(self, model: ModelId) -> frozenset[InstanceId]:
        """The ids of `hosts`; the same object from view to view until one comes or goes."""
        return self._lookup.host_ids(model)

    def running_on(self, instance: InstanceId) -> tuple[RunningView, ...]:
        """Those of `running` that an instance is charged with, in the same order."""
        if self._source is not None:
            return self._source.running_on(instance)
        return tuple(self._on_instance.get(instance, ()))
