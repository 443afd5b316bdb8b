"""Hypothesis strategies for the views of fleets in any state that a router or a scheduler may see."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.sampling import Sampling
from hotswap.view import (
    AdapterView,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelView,
    Residency,
    RunningView,
    StoreView,
    TierView,
    WaitingView,
)

__all__ = ["fleet_views", "instance_views", "requests", "routings", "store_views"]

NOW_S = 1000.0
MODELS = tuple(ModelId(name) for name in "abcd")
ADAPTERS = tuple(AdapterId(name) for name in ("x", "y", "z@1"))

_HOLDING = (InstanceState.SERVING, InstanceState.DRAINING)
_STATES = (*InstanceState, *[InstanceState.SERVING] * 5)  # most instances serve
_MANY = 8  # times an instance is in a large fleet
_seldom = st.sampled_from([False, False, False, False, False, True])


def requests(models: Sequence[ModelId] = MODELS) -> st.SearchStrategy[Request]:
    """Requests for any of `models`, new or continued."""
    tokens = st.lists(st.integers(0, 99), min_size=1, max_size=40).map(tuple)
    return st.builds(
        Request,
        id=st.integers(0, 999).map(lambda number: RequestId(f"r{number}")),
        model=st.sampled_from(models),
        prompt=tokens,
        sampling=st.just(Sampling(max_tokens=64)),
        generated=st.just(()) | tokens,
        adapter=st.none() | st.sampled_from(ADAPTERS),
        priority=st.integers(0, 2),
        arrived_s=st.floats(0, NOW_S),
    )


@st.composite
def instance_views(draw: st.DrawFn, id: InstanceId, models: Sequence[ModelId] = MODELS) -> InstanceView:
    """One instance in any consistent state: its model, requests, KV blocks, adapters and swap."""
    state = draw(st.sampled_from(_STATES))
    holds = state in _HOLDING
    swapping = state in (InstanceState.LOADING, InstanceState.DRAINING) or draw(_seldom)
    num_blocks = draw(st.sampled_from([8, 64])) if holds else 0
    elastic = holds and draw(st.booleans())
    max_requests = draw(st.sampled_from([1, 4, 256, 256]))
    num_requests = draw(st.integers(0, 6)) if holds else 0
    num_running = draw(st.integers(0, num_requests))
    num_waiting = draw(st.integers(0, num_requests - num_running))
    max_adapters = draw(st.sampled_from([0, 1, 2, 8]))
    adapters = st.lists(st.sampled_from(ADAPTERS), max_size=max_adapters if holds else 0, unique=True)
    return InstanceView(
        id=id,
        state=state,
        model=draw(st.sampled_from(models)) if holds else None,
        num_running=num_running,
        num_waiting=num_waiting,
        num_prefill_tokens=draw(st.integers(0, 8192)) if num_requests else 0,
        max_requests=max_requests,
        num_kv_blocks=num_blocks,
        num_free_kv_blocks=draw(st.integers(0, num_blocks)),
        num_next_kv_blocks=draw(st.integers(1, 8)) if num_waiting else 0,
        preempted=tuple(RequestId(f"{id}.{number}") for number in range(draw(st.integers(0, num_waiting)))),
        least_kv_blocks=draw(st.integers(1, num_blocks)) if elastic else 0,
        most_kv_blocks=num_blocks + draw(st.sampled_from([0, 64])) if elastic else 0,
        kept_since_s=draw(st.none() | st.floats(0, NOW_S)) if holds else None,
        kv_block_bytes=draw(st.sampled_from([1 << 20, 3 << 20])) if elastic else 0,
        device_budget=draw(st.sampled_from(["d0", "d1"])) if elastic else "",
        memory_bytes=draw(st.sampled_from([16 << 30, 80 << 30])),
        weight_bytes=(8 << 30) if holds else 0,
        adapters=tuple(draw(adapters)),
        max_adapters=max_adapters,
        preloaded=draw(st.none() | st.sampled_from(models)) if holds else None,
        node=draw(st.sampled_from(["", "n0", "n1"])),
        num_requests=num_requests,
        swapping=swapping,
        target=draw(st.sampled_from(models)) if swapping else None,
        serving_since_s=draw(st.floats(0, NOW_S)) if holds else None,
        draining=holds and draw(_seldom),
        last_used_s=draw(st.none() | st.floats(0, NOW_S)),
        cooling_down=draw(st.lists(st.sampled_from(models), max_size=2, unique=True).map(tuple)),
        num_high_priority=draw(st.integers(0, num_requests)),
        num_moves=draw(st.sampled_from([0, 0, 1])) if holds else 0,
        last_assigned=draw(st.integers(0, 99)),
        swapped_s=draw(st.none() | st.floats(0, NOW_S)),
    )


@st.composite
def store_views(draw: st.DrawFn, models: Sequence[ModelId] = MODELS) -> StoreView:
    """A store of two tiers with every model on the slower one, and some on the faster, of a node or all."""
    node = draw(st.sampled_from(["", "n0"]))
    fast = draw(st.lists(st.sampled_from(models), unique=True))
    where = [(model, "host", node) for model in fast] + [(model, "disk", "") for model in models]
    return StoreView(
        tiers=(
            TierView(name="host", used_bytes=(8 << 30) * len(fast), bytes_per_s=20e9, node=node),
            TierView(name="disk", used_bytes=(8 << 30) * len(models), bytes_per_s=4e9),
        ),
        residency=tuple(Residency(model=m, tier=tier, size_bytes=8 << 30, node=on) for m, tier, on in where),
    )


@st.composite
def fleet_views(
    draw: st.DrawFn, models: Sequence[ModelId] = MODELS, max_instances: int = 5, *, with_running: bool = True
) -> FleetView:
    """A fleet whose counts agree: of running requests by model and by instance, and of waiting requests.

    Some have eight instances of each that was drawn, so that models have dozens of replicas.
    `with_running=False` gives the view of a router, which has no running requests or adapters.
    """
    names = [InstanceId(f"e{number}") for number in range(draw(st.integers(0, max_instances)))]
    held = models[: draw(st.integers(1, len(models)))]  # often few models, so that many have replicas
    instances = tuple([draw(instance_views(name, held)) for name in names])
    waiting = tuple(draw(st.lists(_waiting(models), max_size=8)))
    running: Counter[ModelId | None] = Counter()
    for instance in instances:
        running[instance.model] += instance.num_requests
    queued = Counter(request.model for request in waiting)
    requests = [draw(_running(instance)) for instance in instances] if with_running else []
    if with_running:
        counts = [sum(request.priority for request in here) for here in requests]
        instances = tuple(map(_with_high_priority, instances, counts))
    adapters = [draw(_adapter_views(model, waiting)) for model in models] if with_running else []
    fleet = FleetView(
        now_s=NOW_S,
        instances=instances,
        models=tuple([draw(_model_view(model, running[model], queued[model])) for model in models]),
        waiting=waiting,
        store=draw(store_views(models)),
        running=tuple(request for here in requests for request in here),
        adapters=tuple(itertools.chain.from_iterable(adapters)),
    )
    return _repeated(fleet, draw(st.sampled_from([1, 1, 1, _MANY])))


@st.composite
def routings(draw: st.DrawFn) -> tuple[Request, FleetView]:
    """A fleet, and a request for a model that some instance of it holds, if any does."""
    fleet = draw(fleet_views(with_running=False))
    held = sorted({instance.model for instance in fleet.instances if instance.model is not None})
    return draw(requests(held or MODELS)), fleet


@st.composite
def _running(draw: st.DrawFn, instance: InstanceView) -> Sequence[RunningView]:
    """The running requests of an instance, as many as it counts."""
    if instance.model is None or not instance.num_requests:
        return ()
    lengths = st.tuples(st.integers(1, 200), st.integers(0, 1), st.booleans())
    drawn = draw(st.lists(lengths, min_size=instance.num_requests, max_size=instance.num_requests))
    return [
        RunningView(
            id=RequestId(f"{instance.id}.{number}"),
            model=instance.model,
            instance=instance.id,
            num_tokens=num_tokens,
            num_remaining=64,
            priority=priority,
            arrived_s=NOW_S - num_tokens,
            begun=begun,
            moving=number < instance.num_moves,
            stored_tokens=num_tokens // 2 if begun else 0,
        )
        for number, (num_tokens, priority, begun) in enumerate(drawn)
    ]


def _repeated(fleet: FleetView, times: int) -> FleetView:
    """A fleet with each instance, and what runs there, so many times; drawing them all would take long."""
    suffixes = ["", *(f"~{number}" for number in range(1, times))]

    def renamed(request: RequestId, of: InstanceId, suffix: str) -> RequestId:
        return RequestId(f"{of}{suffix}{request.removeprefix(of)}")

    return replace(
        fleet,
        instances=tuple(
            replace(
                instance,
                id=InstanceId(f"{instance.id}{suffix}"),
                preempted=tuple(renamed(request, instance.id, suffix) for request in instance.preempted),
            )
            for suffix in suffixes
            for instance in fleet.instances
        ),
        running=tuple(
            replace(
                request,
                id=renamed(request.id, request.instance, suffix),
                instance=InstanceId(f"{request.instance}{suffix}"),
            )
            for suffix in suffixes
            for request in fleet.running
        ),
        models=tuple(replace(model, num_running=model.num_running * times) for model in fleet.models),
    )


def _with_high_priority(instance: InstanceView, count: int) -> InstanceView:
    return replace(instance, num_high_priority=count)


def _waiting(models: Sequence[ModelId]) -> st.SearchStrategy[WaitingView]:
    return st.builds(
        WaitingView,
        id=st.integers(0, 999).map(lambda number: RequestId(f"w{number}")),
        model=st.sampled_from(models),
        adapter=st.none() | st.sampled_from(ADAPTERS),
        num_tokens=st.integers(1, 100),
        num_generated=st.sampled_from([0, 0, 1]),
        stored_tokens=st.sampled_from([0, 0, 1]),
        stored_node=st.sampled_from(["", "", "n0", "n1"]),
        last_instance=st.none() | st.sampled_from([InstanceId("e0"), InstanceId("e1")]),
        priority=st.integers(0, 2),
        arrived_s=st.floats(0, NOW_S),
        waiting_since_s=st.floats(0, NOW_S),
    )


@st.composite
def _adapter_views(draw: st.DrawFn, model: ModelId, waiting: Sequence[WaitingView]) -> Sequence[AdapterView]:
    """The adapters of one model that requests wait for, and some that were asked for before."""
    queued = Counter(request.adapter for request in waiting if request.model == model)
    asked = {*queued, *draw(st.lists(st.sampled_from(ADAPTERS), unique=True))}
    return [
        AdapterView(
            id=adapter,
            model=model,
            num_running=draw(st.sampled_from([0, 0, 3])),
            num_waiting=queued[adapter],
            popularity=draw(st.floats(0, 20)),
            asked_s=draw(st.floats(0, NOW_S)),
            gap_s=draw(st.none() | st.floats(0, NOW_S)),
        )
        for adapter in sorted(name for name in asked if name is not None)
    ]


def _model_view(model: ModelId, num_running: int, num_waiting: int) -> st.SearchStrategy[ModelView]:
    return st.builds(
        ModelView,
        id=st.just(model),
        weight_bytes=st.just(8 << 30),
        min_replicas=st.integers(0, 2),
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        num_running=st.just(num_running),
        num_waiting=st.just(num_waiting),
        num_failed_loads=st.sampled_from([0, 0, 0, 1, 5]),
        last_evicted_s=st.none() | st.floats(0, NOW_S),
    )
