"""The frozen picture of a fleet that every decision is made from.

A view holds values only and serialises (see `hotswap.offline.replay`), so any decision can be replayed
offline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any, Self, TypeAlias, TypeVar

from hotswap.demand_view import AdapterView, ModelView, WaitingView
from hotswap.phase_view import PhaseView
from hotswap.request import AdapterId, InstanceId, ModelId, RequestId
from hotswap.store_view import KVStoreView, Residency, StoreView, TierView
from hotswap.times_view import TimesView

__all__ = [
    "AdapterView",
    "Count",
    "CountRank",
    "EngineStatus",
    "FleetView",
    "InstanceId",
    "InstanceState",
    "InstanceView",
    "ModelView",
    "Rank",
    "Residency",
    "RunningView",
    "StoreView",
    "TierView",
    "TimesView",
    "WaitingView",
]

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")


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
        request_kv_blocks: Blocks that one request can have at most; 0 if it can have all.
        least_kv_blocks: The least that its pool can shrink to; 0 if the pool keeps its size.
        most_kv_blocks: The most that its pool can grow to; 0 if the pool keeps its size.
        kept_since_s: The loop time since which KV blocks of requests that left are kept, also across swaps:
            one that left later, with a token of its stay, finds those of all its tokens but the last if it
            comes back. An estimate of one that left just then, whose own blocks may be those that were lost
            last. `None` if the engine does not know, or keeps none.
        kv_block_bytes: Bytes of a KV block, where the pool can be resized; 0 if it cannot.
        device_budget: The name of the budget whose memory it shares with other engines; "" if it shares none.
        memory_bytes: What weights and KV blocks may take together; 0 if the engine does not know.
        weight_bytes: What weights take now, preloaded ones included.
        adapters: The adapters that it holds, by `Adapter.version`.
        max_adapters: How many it could hold; 0 if it can hold none.
        preloaded: The model that is staged beside the one that it serves.
        load_path: How the engine came by its model, in its own words, where it has more than one method.
        node: Where it is, for stores whose tiers belong to nodes; "" if that makes no difference.
        lost_because: Why it is LOST, in words that end a sentence; "" while it is not, or if it is not known.
        warnings: What it promises and this machine does not keep, in sentences; found when it started.
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
    request_kv_blocks: int = 0
    kept_since_s: float | None = None
    least_kv_blocks: int = 0
    most_kv_blocks: int = 0
    kv_block_bytes: int = 0
    device_budget: str = ""
    memory_bytes: int = 0
    weight_bytes: int = 0
    adapters: tuple[AdapterId, ...] = ()
    max_adapters: int = 0
    preloaded: ModelId | None = None
    load_path: str = ""
    node: str = ""
    lost_because: str = ""
    warnings: tuple[str, ...] = ()

    def updated(self, **fields: object) -> Self:
        """Return it with other values for some fields, as `dataclasses.replace` does."""
        return self.updated_by(fields)

    def updated_by(self, fields: Mapping[str, object]) -> Self:
        """Return it with other values for some fields, without `__init__`, which takes ten times as long.

        A large fleet makes thousands of these in a second, for which arguments by name cost too much as well.
        """
        updated = object.__new__(type(self))
        object.__setattr__(updated, "__dict__", _merged(self, fields))
        return updated

    @property
    def max_tokens(self) -> int | None:
        """The longest request its KV blocks could ever hold, in tokens; `None` while no pool exists."""
        most = min(self.request_kv_blocks or self.num_kv_blocks, self.num_kv_blocks)
        return most * self.kv_block_tokens or None


@dataclass(frozen=True, kw_only=True)
class InstanceView(EngineStatus):
    """One instance at one moment: what its engine tells, and what the fleet knows of it beside that.

    Attributes:
        num_requests: Requests that the fleet has assigned here, also those that the engine has not seen yet;
            routers balance this number.
        swapping: Whether a swap has the instance, from its acceptance until its record is written.
        target: The model of that swap; `None` for an unload.
        phase: Where that swap is; `None` before its first phase, and outside of swaps.
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
        num_opening: Requests here without a token of this stay that the shipped schedulers let have one
            before they take the instance: those that were assigned in the moment in which the present model
            became ready, as many as its KV blocks hold, and those that left an instance without a token
            before (`num_stalls`).
    """

    num_requests: int = 0
    swapping: bool = False
    target: ModelId | None = None
    phase: PhaseView | None = None
    serving_since_s: float | None = None
    cooling_down: tuple[ModelId, ...] = ()
    draining: bool = False
    last_used_s: float | None = None
    num_high_priority: int = 0
    num_moves: int = 0
    last_assigned: int = 0
    swapped_s: float | None = None
    num_opening: int = 0

    @classmethod
    def of(cls, status: EngineStatus, fields: Mapping[str, object]) -> InstanceView:
        """Return the view of an engine's status and the fleet's own fields."""
        view = object.__new__(cls)
        object.__setattr__(view, "__dict__", _merged(status, fields))
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
    def next_model(self) -> ModelId | None:
        """The model that it serves, loads or is turning to; `None` while it is emptied by hand, or LOST."""
        if self.swapping:
            return self.target
        alive = self.state in (InstanceState.SERVING, InstanceState.LOADING) and not self.draining
        return self.model if alive else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningView:
    """One request that is assigned to an instance; `moving` while it is on its way to another.

    `begun` once it has got a token there: until then it waits in the engine, or its tokens are prefilled.
    `since_s` is the loop time at which it came there; `num_evicted`, `num_stalls` and `stored_tokens` are
    those of `WaitingView`, the last as of its latest save or restore.
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
    since_s: float = 0.0
    num_evicted: int = 0
    num_stalls: int = 0
    stored_tokens: int = 0


# Orders instances: the smallest key is best, `None` leaves an instance out, and an id at the end prevents
# ties. A rank is pure and hashable, and asked about an instance again only when that has changed.
Rank: TypeAlias = "Callable[[InstanceView], Any]"

# A number of an instance that the fleet itself counts, `None` for one that is not counted; pure and hashable.
Count: TypeAlias = "Callable[[InstanceView], int | None]"


class CountRank(ABC):
    """A rank whose keys begin with what the fleet itself counts, so that few engines must be asked.

    The load of an engine that computes changes with every step. It decides only between equal counts.
    """

    def __call__(self, instance: InstanceView) -> Any:
        """Return the key, `(count, load)`; `None` leaves the instance out."""
        count = self.count(instance)
        return None if count is None else (count, self.load(instance))

    @abstractmethod
    def count(self, instance: InstanceView) -> Any:
        """Return the beginning of the key, on which no load has influence; `None` leaves the instance out."""

    def load(self, instance: InstanceView) -> Any:
        """Return what decides between equal counts; the id if it is not overridden."""
        return instance.id


@dataclass(frozen=True, kw_only=True)
class FleetView:
    """The whole fleet at loop time `now_s`: the only input of a scheduler's or a router's decision.

    `running` and `adapters` are there for schedulers; routers see them empty. In a large fleet ask `hosts`,
    `serving`, `replicas`, `min_by`, `instance`, `oldest_waiting_s`, `waiting_request` and `running_on`, which
    cost what they return, rather than go over `instances`, `waiting` and `running`, which cost what there is.
    A view may be kept: it never changes.
    """

    now_s: float
    instances: tuple[InstanceView, ...] = ()
    models: tuple[ModelView, ...] = ()
    waiting: tuple[WaitingView, ...] = ()
    store: StoreView = field(default_factory=StoreView)
    running: tuple[RunningView, ...] = ()
    adapters: tuple[AdapterView, ...] = ()
    times: TimesView = field(default_factory=TimesView)
    kv_store: KVStoreView | None = None

    @property
    def ids(self) -> frozenset[InstanceId]:
        """The ids of all instances; of one fleet the same object until an instance comes or goes."""
        return self._ids

    def instance(self, instance: InstanceId) -> InstanceView:
        """The view of one instance; `KeyError` if the fleet has none of that id."""
        return self._by_id[instance]

    def model(self, model: ModelId) -> ModelView:
        """The view of one model; `KeyError` if it is not registered."""
        for view in self.models:
            if view.id == model:
                return view
        raise KeyError(model)

    def swap_s(self, model: ModelId, instance: InstanceView) -> float:
        """Seconds for which a swap to a model would have an instance down, by what was measured (`times`)."""
        unload_s = 0.0 if instance.state is InstanceState.EMPTY else self.times.unload_s
        if instance.preloaded == model:
            return unload_s
        return unload_s + self.times.load_s(self.store.seen_from(instance.node), model)

    def hosts(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Instances that are SERVING the model, also those that take no more requests now."""
        return tuple(self._hosts.get(model, ()))

    def replicas(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Instances that serve the model or are swapping to it; those swapping away from it do not count."""
        return tuple(self._replicas.get(model, ()))

    def serving(self, model: ModelId) -> tuple[InstanceView, ...]:
        """Instances to which a request of the model may be sent now."""
        return tuple(instance for instance in self.hosts(model) if instance.open)

    def min_by(self, model: ModelId, rank: Rank) -> InstanceView | None:
        """The host of the model that `rank` puts first, `None` if it ranks none.

        The same as `min(hosts(model), key=rank)`. A fleet keeps what it has ranked and ranks an instance
        again only after a change, so the answer takes no longer for more hosts.
        """
        return next(self.ranked(model, rank), None)

    def ranked(self, model: ModelId, rank: Rank) -> Iterator[InstanceView]:
        """The hosts of the model that `rank` ranks, the best first; costs what is taken of them.

        Valid until `min_by` or `ranked` is asked for the same rank again, or the fleet changes.
        """
        keys = ((rank(host), host) for host in self.hosts(model))
        found = [(key, number, host) for number, (key, host) in enumerate(keys) if key is not None]
        return (host for _, _, host in sorted(found, key=itemgetter(0, 1)))

    def total(self, model: ModelId, count: Count) -> tuple[int, int]:
        """How many hosts of the model `count` has a number for, and the sum of these, kept like `min_by`.

        The number may depend on what the fleet counts itself, such as `num_requests`, and on no load.
        """
        numbers = [number for host in self.hosts(model) if (number := count(host)) is not None]
        return len(numbers), sum(numbers)

    def host_ids(self, model: ModelId) -> frozenset[InstanceId]:
        """The ids of `hosts`; of one fleet the same object until an instance comes or goes."""
        return frozenset(host.id for host in self.hosts(model))

    def oldest_waiting_s(self, model: ModelId) -> float | None:
        """The loop time since which the oldest of the model's requests has waited; `None` if none waits."""
        return self._oldest_waiting_s.get(model)

    def waiting_request(self, request: RequestId) -> WaitingView | None:
        """The view of a request of the queue, as of one that a router is asked about; `None` of any other."""
        return self._waiting_by_id.get(request)

    def running_on(self, instance: InstanceId) -> tuple[RunningView, ...]:
        """Those of `running` that are assigned to an instance, in the same order."""
        return tuple(self._running_on.get(instance, ()))

    # What the answers above are made from, once for each view.

    @cached_property
    def _by_id(self) -> dict[InstanceId, InstanceView]:
        return {instance.id: instance for instance in self.instances}

    @cached_property
    def _ids(self) -> frozenset[InstanceId]:
        return frozenset(self._by_id)

    @cached_property
    def _hosts(self) -> dict[ModelId | None, list[InstanceView]]:
        return _grouped(self.instances, attrgetter("hosted"))

    @cached_property
    def _replicas(self) -> dict[ModelId | None, list[InstanceView]]:
        return _grouped(self.instances, attrgetter("next_model"))

    @cached_property
    def _oldest_waiting_s(self) -> dict[ModelId, float]:
        oldest_s: dict[ModelId, float] = {}
        for request in self.waiting:
            since_s = oldest_s.get(request.model, request.waiting_since_s)
            oldest_s[request.model] = min(since_s, request.waiting_since_s)
        return oldest_s

    @cached_property
    def _waiting_by_id(self) -> dict[RequestId, WaitingView]:
        return {request.id: request for request in self.waiting}

    @cached_property
    def _running_on(self) -> dict[InstanceId, list[RunningView]]:
        return _grouped(self.running, attrgetter("instance"))


def _merged(status: EngineStatus, fields: Mapping[str, object]) -> dict[str, object]:
    merged = status.__dict__.copy()
    merged.update(fields)
    return merged


def _grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
