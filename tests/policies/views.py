"""Fleets as short as a line, fleets of every shape, and a fleet that carries out what it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from hypothesis import strategies as st

from hotswap import (
    AdapterId,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelId,
    ModelView,
    Request,
    RequestId,
    WaitingView,
)
from hotswap.abc import Action, Swap, Unload
from hotswap.backends.sim import SimStore
from hotswap.policies import accepted
from hotswap.runtime.state import FleetState
from hotswap.runtime.views import LiveView

SERVING, EMPTY, LOADING = InstanceState.SERVING, InstanceState.EMPTY, InstanceState.LOADING
MODELS = tuple(map(ModelId, "abcd"))


def model(
    name: str,
    p: int = 0,
    *,
    w: float = 1.0,
    min_replicas: int = 0,
    waiting: int = 0,
    failed: int = 0,
    weight: int = 0,
) -> ModelView:
    return ModelView(
        id=ModelId(name),
        num_running=p - waiting,
        num_waiting=waiting,
        weight=w,
        min_replicas=min_replicas,
        num_failed_loads=failed,
        weight_bytes=weight,
    )


def serving(
    name: str,
    of: str,
    requests: int = 0,
    *,
    since_s: float = 0.0,
    preloaded: str | None = None,
    memory: int = 0,
) -> InstanceView:
    return InstanceView(
        id=InstanceId(name),
        state=SERVING,
        model=ModelId(of),
        num_requests=requests,
        serving_since_s=since_s,
        preloaded=ModelId(preloaded) if preloaded else None,
        memory_bytes=memory,
    )


def empty(name: str, *, preloaded: str | None = None, memory: int = 0) -> InstanceView:
    return InstanceView(
        id=InstanceId(name),
        state=EMPTY,
        preloaded=ModelId(preloaded) if preloaded else None,
        memory_bytes=memory,
    )


def swapping_to(name: str, to: str, *, of: str | None = None) -> InstanceView:
    """An instance that swaps to another model; with `of`, it still serves that one meanwhile."""
    return InstanceView(
        id=InstanceId(name),
        state=SERVING if of else LOADING,
        model=ModelId(of) if of else None,
        swapping=True,
        target=ModelId(to),
    )


def waiting(name: str, since_s: float) -> WaitingView:
    return WaitingView(
        id=RequestId(f"{name}@{since_s}"), model=ModelId(name), arrived_s=since_s, waiting_since_s=since_s
    )


def fleet(
    instances: Iterable[InstanceView],
    models: Iterable[ModelView],
    *,
    now_s: float = 100.0,
    waiting: Iterable[WaitingView] = (),
) -> FleetView:
    return FleetView(now_s=now_s, instances=tuple(instances), models=tuple(models), waiting=tuple(waiting))


def request(of: str, *, adapter: str | None = None, tokens: int = 1) -> Request:
    return Request(
        id=RequestId("r"),
        model=ModelId(of),
        prompt=(1,) * tokens,
        adapter=AdapterId(adapter) if adapter else None,
    )


def swaps(actions: Iterable[Action]) -> list[tuple[str, str]]:
    """The plan as `(instance, model)` pairs."""
    return [(action.instance, action.model) for action in actions if isinstance(action, Swap)]


def served(view: FleetView) -> FleetView:
    """The fleet once every load has ended well."""
    return replace(view, instances=tuple(_loaded(i, view.now_s) if i.swapping else i for i in view.instances))


def began(view: FleetView, actions: Iterable[Action]) -> FleetView:
    """The fleet right after it began the actions: written apart from `assume`, which it checks."""
    instances = {i.id: i for i in view.instances}
    for action in accepted(view, actions):
        if isinstance(action, Swap | Unload):
            target = action.model if isinstance(action, Swap) else None
            instances[action.instance] = replace(instances[action.instance], swapping=True, target=target)
    return replace(view, instances=tuple(instances.values()))


def _loaded(instance: InstanceView, now_s: float) -> InstanceView:
    return replace(
        instance,
        state=SERVING if instance.target else EMPTY,
        model=instance.target,
        target=None,
        swapping=False,
        serving_since_s=now_s if instance.target else None,
        preloaded=None,
    )


_model_ids = st.sampled_from(MODELS)


@st.composite
def instance_views(draw: st.DrawFn, name: str, now_s: float) -> InstanceView:
    state = draw(st.sampled_from(InstanceState))
    has_model = state not in (InstanceState.EMPTY, InstanceState.LOST)
    swapping = draw(st.booleans()) and state is not InstanceState.LOST
    num_kv_blocks = draw(st.integers(0, 8))
    return InstanceView(
        id=InstanceId(name),
        state=state,
        model=draw(_model_ids) if has_model else None,
        swapping=swapping,
        target=draw(st.none() | _model_ids) if swapping else None,
        num_requests=draw(st.integers(0, 6)),
        max_requests=6,
        num_kv_blocks=num_kv_blocks,
        num_free_kv_blocks=draw(st.integers(0, num_kv_blocks)),
        adapters=draw(st.sampled_from([(), (AdapterId("x"),), (AdapterId("x"), AdapterId("y"))])),
        preloaded=draw(st.none() | _model_ids),
        memory_bytes=draw(st.sampled_from([0, 10, 20])),
        serving_since_s=draw(st.floats(0.0, now_s)) if state is SERVING else None,
        cooling_down=draw(st.sampled_from([(), (), (), MODELS[:1], MODELS[1:3]])),
        draining=has_model and draw(st.sampled_from([False, False, True])),
    )


@st.composite
def model_views(draw: st.DrawFn, name: ModelId, *, max_min_replicas: int = 2) -> ModelView:
    return ModelView(
        id=name,
        num_running=draw(st.integers(0, 20)),
        num_waiting=draw(st.integers(0, 20)),
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        min_replicas=draw(st.integers(0, max_min_replicas)),
        num_failed_loads=draw(st.sampled_from([0, 0, 0, 1, 5000])),
        weight_bytes=draw(st.sampled_from([0, 5, 15])),
    )


@st.composite
def fleet_views(draw: st.DrawFn) -> FleetView:
    """Every state, swaps under way, missing min_replicas, mixed sizes; also no instance or no model."""
    now_s = 60.0
    names = [f"e{n}" for n in range(draw(st.integers(0, 7)))]
    requests = draw(st.lists(st.tuples(_model_ids, st.floats(0.0, now_s)), max_size=5))
    return FleetView(
        now_s=now_s,
        instances=tuple(draw(instance_views(name, now_s)) for name in names),
        models=tuple(draw(model_views(name)) for name in MODELS[: draw(st.integers(0, len(MODELS)))]),
        waiting=tuple(waiting(name, since_s) for name, since_s in requests),
    )


@st.composite
def steady_fleets(draw: st.DrawFn) -> FleetView:
    """Settled fleets of equal engines, some of them EMPTY, under a load that will not change."""
    count = draw(st.integers(1, 8))
    held = draw(st.lists(st.none() | _model_ids, min_size=count, max_size=count))
    models = [draw(model_views(name, max_min_replicas=1)) for name in MODELS]
    return fleet(
        [serving(f"e{n}", of) if of else empty(f"e{n}") for n, of in enumerate(held)],
        [replace(m, weight_bytes=0) for m in models],
    )


class Shown:
    """An instance as an index sees it."""

    def __init__(self, now: InstanceView) -> None:
        self.now = now

    def view(self) -> InstanceView:
        return self.now

    def last_view(self) -> InstanceView:
        return self.now

    def counted(self, view: InstanceView) -> InstanceView:
        return view.updated(num_requests=self.now.num_requests)


class Kept:
    """A fleet whose index is kept from view to view, as a real fleet keeps its own."""

    def __init__(self, instances: Iterable[InstanceView]) -> None:
        self.shown = {instance.id: Shown(instance) for instance in instances}
        self.state = FleetState(SimStore({}))
        for name, shown in self.shown.items():
            self.state.index.add(name, shown)

    @property
    def now(self) -> Mapping[InstanceId, InstanceView]:
        """The instances as they are."""
        return {name: shown.now for name, shown in self.shown.items()}

    def drop(self, instance: InstanceId) -> None:
        """Have an instance go."""
        del self.shown[instance]
        self.state.index.remove(instance)

    def change(self, view: InstanceView) -> None:
        """Have an instance change, and tell no more of it than that, as far as that is enough."""
        before = self.shown[view.id].now
        self.shown[view.id].now = view
        load = replace(
            before,
            num_running=view.num_running,
            num_prefill_tokens=view.num_prefill_tokens,
            num_free_kv_blocks=view.num_free_kv_blocks,
            adapters=view.adapters,
        )
        if view == load:
            self.state.index.load_changed(view.id)
        elif view == replace(load, num_requests=view.num_requests):
            self.state.index.counts_changed(view.id)
            self.state.index.load_changed(view.id)
        else:
            self.state.index.state_changed(view.id)

    def view(self) -> FleetView:
        """The fleet as it is now; good until the next change."""
        self.state.refresh()
        return LiveView.of(self.state, now_s=0.0, running=False)


@st.composite
def many_hosts(draw: st.DrawFn) -> list[InstanceView]:
    """Of one model more than are looked at one by one: idle, busy, full, swapping and small ones."""
    return [draw(a_host(f"e{number}")) for number in range(draw(st.integers(9, 100)))]


@st.composite
def a_host(draw: st.DrawFn, name: str) -> InstanceView:
    """One of them."""
    running, unseen = draw(st.integers(0, 5)), draw(st.sampled_from([0, 0, 0, 1, 2, 7]))
    blocks = draw(st.sampled_from([4, 60]))
    return replace(
        serving(name, "a", running + unseen),
        num_running=running,
        num_prefill_tokens=draw(st.sampled_from([0, 0, 0, 30, 900])),
        swapping=draw(st.sampled_from([False, False, False, True])),
        max_requests=draw(st.sampled_from([3, 99])),
        num_kv_blocks=blocks,
        num_free_kv_blocks=draw(st.integers(0, blocks)),
        adapters=draw(st.sampled_from([(), (AdapterId("x"),)])),
    )
