"""The frozen picture of a fleet that every decision is made from.

A view holds values only and serialises (see `hotswap.offline.replay`), so any decision can be replayed
offline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NewType, Protocol, TypedDict, Unpack

from hotswap.lookup import Count, Lookup, Rank
from hotswap.request import AdapterId, ModelId, RequestId
from hotswap.store_view import Residency, StoreView, TierView

__all__ = [
    "AdapterView",
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


class InstanceState(StrEnum):
    """The life of an instance; see the diagram in `hotswap.engine`."""

    EMPTY = "EMPTY"
    LOADING = "LOADING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    LOST = "LOST"


class _Renewed(TypedDict, total=False):
    """What changes of an instance while it serves a model, and what a fleet adds to what its engine says."""

    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_free_kv_blocks: int
    num_next_kv_blocks: int
    preempted: tuple[RequestId, ...]
    max_adapters: int
    num_requests: int
    swapping: bool
    target: ModelId | None
    serving_since_s: float | None
    resting: tuple[ModelId, ...]
    draining: bool
    last_used_s: float | None
    num_high_priority: int
    num_moves: int
    last_assigned: int
    swapped_s: float | None


@dataclass(frozen=True, kw_only=True)  # without slots, so that `renewed` is as fast as it is
class InstanceView:
    """One instance at one moment.

    The engine fills in what it knows; the fleet adds the last eleven fields. `num_requests` counts every
    request the fleet has assigned here, also those the engine has not seen yet, and is what routers balance.
    `num_prefill_tokens` are what requests here must have computed before their next token, beyond the one
    that a decode computes; an engine that is not told how far a prompt is counts it whole until its first
    token. `num_free_kv_blocks` counts every block that a new request could be given, also those that are kept
    only in case somebody begins with the same tokens. `num_next_kv_blocks` are those that the first of who
    waits here needs before it can begin; 0 if nobody waits. `preempted` are those who wait again after they
    had run, as far as the engine knows.
    `draining` is true while the fleet sends nothing more here and has moved, or moves, what runs elsewhere.
    `swapping` is true from the moment a swap is accepted until its record is written; `target` is the model
    it is turning to. `adapters` are those it holds now, of the `max_adapters` that it could; 0 of an engine
    that can hold none. `serving_since_s` is the loop time at which the present model became ready, `None` if
    there is none. `road` is how the engine came by it, in the engine's own words, where it has more ways than
    one. `node` is where it is, for stores whose tiers belong to nodes; "" if that makes no difference.
    `last_used_s` is the loop time at which a request last came here or left, `None` if none ever did.
    `num_high_priority` of the requests have a priority over 0. `num_moves` are the moves under way that begin
    or end here. `last_assigned` is the number, counted over the fleet, of the assignment by which the latest
    request came here; 0 if none ever did. `swapped_s` is the loop time at which the latest swap here ended,
    an unload too and however it ended; `None` if there was none.
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
    road: str = ""
    node: str = ""
    num_requests: int = 0
    swapping: bool = False
    target: ModelId | None = None
    serving_since_s: float | None = None
    resting: tuple[ModelId, ...] = ()
    draining: bool = False
    last_used_s: float | None = None
    num_high_priority: int = 0
    num_moves: int = 0
    last_assigned: int = 0
    swapped_s: float | None = None

    def renewed(self, **fields: Unpack[_Renewed]) -> InstanceView:
        """Return it with some fields as they are now: as `dataclasses.replace`, in a fifth of the time.

        A fleet of thousands of instances makes thousands of views for each second of its traffic.
        """
        view = object.__new__(InstanceView)
        object.__setattr__(view, "__dict__", self.__dict__ | fields)
        return view

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
    def becomes(self) -> ModelId | None:
        """The model that it serves, loads or is turning to; `None` while it is emptied by hand, or LOST."""
        if self.swapping:
            return self.target
        alive = self.state in (InstanceState.SERVING, InstanceState.LOADING) and not self.draining
        return self.model if alive else None

    @property
    def max_tokens(self) -> int | None:
        """The longest request its KV blocks could ever hold, in tokens; `None` while no pool exists."""
        return self.num_kv_blocks * self.kv_block_tokens or None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One registered model at one moment.

    `num_running` requests are assigned to instances, `num_waiting` sit in the waiting room; their sum is the
    *p* of the swap policy. `num_failed_loads` counts failures since the last load that succeeded.
    `left_s` is the loop time at which a swap or unload of one of its replicas last ended; `None` if none did.
    """

    id: ModelId
    weight_bytes: int = 0
    min_replicas: int = 0
    slowness: float = 1.0
    num_running: int = 0
    num_waiting: int = 0
    num_failed_loads: int = 0
    left_s: float | None = None

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

    def least(self, model: ModelId, rank: Rank) -> InstanceView | None:
        """The host of the model that `rank` puts first, `None` if it ranks none.

        As `min(hosts(model), key=rank)`, but what a fleet has ranked once it ranks again only after a change,
        so the answer does not take longer for more hosts.
        """
        return self._lookup.least(model, rank)

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
