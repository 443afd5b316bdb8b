"""The shipped routers and schedulers pass the public suites; faulty ones do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from hotswap import FleetView, InstanceId, InstanceState, InstanceView, ModelId, ModelView, Request
from hotswap.abc import Action, Migrate, PinAdapters, Resize, Router, Scheduler, Swap, Unload
from hotswap.policies import (
    AdapterPool,
    AffinityRouter,
    Chain,
    ConsistentHashRouter,
    ElasticMemory,
    ElasticQuota,
    Forecast,
    Freeness,
    FreenessAutoscaler,
    FreenessRouter,
    HorizontalAutoscaler,
    KeepAliveSwap,
    LeastLoadedRouter,
    LeastTimeRouter,
    PrefixRouter,
    PrePlacement,
    RestoreMinReplicas,
    RoundRobinRouter,
    ShepherdSwap,
    StartupTimePlacement,
    StaticPinning,
    VirtualUsageRescheduler,
    WeightedLoadSwap,
    infaas_router,
)
from hotswap.testing.conformance import RouterConformance, SchedulerConformance
from hotswap.testing.strategies import fleet_views
from tests.conformance.outcome import failures
from tests.policies.days import DAY_S, SLOTS, days

# Any failure will do, so nothing is shrunk.
QUICK = settings(RouterConformance.examples, max_examples=20, phases=[Phase.generate])

# What each check was shown, by its name.
_shown: dict[str, list[tuple[Sequence[Any], Mapping[str, Any]]]] = {}
_IS_REPEATED = bool(getattr(RouterConformance.examples, "derandomize", False))


class Routers(RouterConformance):
    """Shows all routers what was generated for the first one."""

    def _for_all(self, look: Callable[[Request, FleetView], None]) -> None:
        _show(look, super()._for_all)


class Schedulers(SchedulerConformance):
    """Shows all schedulers what was generated for the first one."""

    def _for_all(self, look: Callable[[FleetView], None]) -> None:
        _show(look, super()._for_all)


def _show(look: Callable[..., None], generate: Callable[[Callable[..., None]], None]) -> None:
    """Let a check look at what was generated for it before, if anything was.

    Derandomized, Hypothesis generates the same for every policy, and takes more time than the policies do.
    """
    if _IS_REPEATED and look.__qualname__ in _shown:
        try:
            for args, kwargs in _shown[look.__qualname__]:
                look(*args, **kwargs)
        except Exception:
            generate(look)  # fails likewise, with the smallest fleet that does
            raise
        return
    shown: list[tuple[Sequence[Any], Mapping[str, Any]]] = []

    @wraps(look)
    def record(*args: Any, **kwargs: Any) -> None:
        shown.append((args, kwargs))
        look(*args, **kwargs)

    generate(record)
    _shown[look.__qualname__] = shown


class TestLeastLoadedRouterConforms(Routers):
    def make_router(self) -> Router:
        return LeastLoadedRouter()


class TestAffinityRouterConforms(Routers):
    def make_router(self) -> Router:
        return AffinityRouter()


class TestConsistentHashRouterConforms(Routers):
    def make_router(self) -> Router:
        return ConsistentHashRouter()


class TestPrefixRouterConforms(Routers):
    def make_router(self) -> Router:
        return PrefixRouter(block_tokens=4)


class TestPrefixRouterByTimeConforms(Routers):
    def make_router(self) -> Router:
        return PrefixRouter(block_tokens=4, time=LeastTimeRouter())


class TestLeastTimeRouterConforms(Routers):
    def make_router(self) -> Router:
        return LeastTimeRouter()


class TestFreenessRouterConforms(Routers):
    def make_router(self) -> Router:
        return FreenessRouter()


class TestInfaasRouterConforms(Routers):
    def make_router(self) -> Router:
        return infaas_router()


class TestRoundRobinRouterConforms(Routers):
    def make_router(self) -> Router:
        return RoundRobinRouter()


class TestVirtualUsageReschedulerConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return VirtualUsageRescheduler()


class TestVirtualUsageReschedulerOfTheArtifactConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return VirtualUsageRescheduler(Freeness("artifact"), guard=False)


class TestFreenessAutoscalerConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return Chain(FreenessAutoscaler(), VirtualUsageRescheduler())


class TestWeightedLoadSwapConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return WeightedLoadSwap(t1=2, t2=1, b=2.0, sigmas=0)


class TestAdapterPoolConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return Chain(WeightedLoadSwap(t1=2, t2=1, b=2.0, sigmas=0), AdapterPool())


class TestRestoreMinReplicasConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return RestoreMinReplicas()


class TestElasticMemoryConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return ElasticMemory(WeightedLoadSwap(t1=2, t2=1, b=2.0, sigmas=0), least_part=0.0)


class TestElasticQuotaConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return ElasticQuota()


class TestStartupTimePlacementConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return StartupTimePlacement()


class TestStartupTimePlacementThatEvictsConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return StartupTimePlacement(victims="evict")


class TestStartupTimePlacementThatWaitsConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return StartupTimePlacement(victims="stay")


class TestForecastConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return Forecast()


class TestForecastThatHasSeenADayConforms(Schedulers):
    """One that loads ahead in the generated views, whose time is the end of its first day."""

    def make_scheduler(self) -> Scheduler:
        forecast = Forecast(horizon_s=50.0, period_s=DAY_S, num_slots=SLOTS, least_gain=0.05)
        for view in days({"a": {0: 3, 2: 3}, "b": {0: 1, 2: 2}, "c": {7: 3}, "d": {5: 1}}, DAY_S):
            forecast.rates.learn(view)
        return forecast


class TestPrePlacementConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return PrePlacement()


class TestStaticPinningConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return StaticPinning({"e0": "a", "e1": "b", "e2": "a", "gone": "c"})


class TestKeepAliveSwapConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return KeepAliveSwap(keep_alive_s=100.0)


class TestHorizontalAutoscalerConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return HorizontalAutoscaler(target=1.5, stabilization_s=100.0)


class TestShepherdSwapConforms(Schedulers):
    def make_scheduler(self) -> Scheduler:
        return ShepherdSwap(lambda_=1.5)


class _First(Router):
    """Any instance, open or not."""

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        return next((instance.id for instance in fleet.instances if instance.model == request.model), None)


class _Never(Router):
    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        return None


class _TurnByTurn(Router):
    """Remembers how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        able = fleet.serving(request.model)
        self.asked += 1
        return able[self.asked % len(able)].id if able else None


class _Everything(Scheduler):
    """Swaps every instance to the first model, free or not."""

    def plan(self, fleet: FleetView) -> list[Action]:
        return [Swap(instance=instance.id, model=fleet.models[0].id) for instance in fleet.instances]


class _Empty(Scheduler):
    """Unloads every free instance, whatever `min_replicas` says."""

    def plan(self, fleet: FleetView) -> list[Action]:
        return [Unload(instance=instance.id) for instance in fleet.instances if instance.free]


class _Twice(Scheduler):
    def plan(self, fleet: FleetView) -> list[Action]:
        free = [instance for instance in fleet.instances if instance.free and instance.model is None]
        once: list[Action] = [Swap(instance=instance.id, model=fleet.models[0].id) for instance in free]
        return once + once


class _Unknown(Scheduler):
    def plan(self, fleet: FleetView) -> list[Action]:
        return [Swap(instance=InstanceId("nowhere"), model=fleet.models[0].id)]


class _Astray(Scheduler):
    """Moves every request to the first instance, whichever model that serves."""

    def plan(self, fleet: FleetView) -> list[Action]:
        return [Migrate(request=r.id, destination=fleet.instances[0].id) for r in fleet.running]


class _TooMuch(Scheduler):
    """Pins all adapters on every instance."""

    def plan(self, fleet: FleetView) -> list[Action]:
        return [
            PinAdapters(instance=i.id, model=i.model, adapters=tuple(a.id for a in fleet.adapters))
            for i in fleet.instances
            if i.model is not None
        ]


class _Larger(Scheduler):
    """Gives every pool a block more than it may have."""

    def plan(self, fleet: FleetView) -> list[Action]:
        elastic = [i for i in fleet.instances if i.most_kv_blocks and i.free and i.hosted is not None]
        return [Resize(instance=i.id, kv_blocks=i.most_kv_blocks + 1) for i in elastic]


# The check that is made for each fault. The shipped policies pass all checks, above.
ROUTERS: dict[type[Router], str] = {
    _First: "test_it_chooses_only_instances_that_are_open_and_serve_the_model",
    _Never: "test_it_uses_an_idle_replica",
    _TurnByTurn: "test_it_is_a_function_of_request_and_view",
}
SCHEDULERS: dict[type[Scheduler], str] = {
    _Everything: "test_it_leaves_busy_instances_alone",
    _Twice: "test_it_plans_one_action_for_an_instance",
    _Unknown: "test_its_actions_name_what_the_fleet_has",
    _Astray: "test_it_moves_requests_to_other_open_instances_of_their_model",
    _TooMuch: "test_it_gives_adapters_to_instances_that_serve_their_model_and_have_the_places",
    _Larger: "test_it_resizes_kv_pools_within_their_bounds",
}


@pytest.mark.parametrize("router", ROUTERS)
def test_a_faulty_router_is_caught(router: type[Router]) -> None:
    class Suite(RouterConformance):
        examples = settings(QUICK, max_examples=200)  # few views have two open replicas of one model

        def make_router(self) -> Router:
            return router()

    assert failures(Suite, ROUTERS[router])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_faulty_scheduler_is_caught(scheduler: type[Scheduler]) -> None:
    class Suite(SchedulerConformance):
        examples = QUICK

        def make_scheduler(self) -> Scheduler:
            return scheduler()

    assert failures(Suite, SCHEDULERS[scheduler])


def test_a_scheduler_that_unloads_below_min_replicas_is_caught() -> None:
    """In a view of one replica: few generated views have nothing else against the unloads."""
    model = ModelId("a")
    replica = InstanceView(id=InstanceId("e0"), state=InstanceState.SERVING, model=model)
    view = FleetView(now_s=0.0, instances=(replica,), models=(ModelView(id=model, min_replicas=1),))

    class Suite(SchedulerConformance):
        def make_scheduler(self) -> Scheduler:
            return _Empty()

        def _for_all(self, look: Callable[[FleetView], None]) -> None:
            look(view)

    assert list(failures(Suite)) == ["test_it_takes_no_model_below_its_least_replicas"]


@pytest.mark.parametrize("with_running", [False, True])
def test_policies_meet_fleets_of_many_replicas_whose_counts_agree(*, with_running: bool) -> None:
    most_replicas: list[int] = []

    @settings(QUICK, max_examples=60)
    @given(fleet_views(with_running=with_running))
    def look_at(fleet: FleetView) -> None:
        most_replicas.append(max(len(fleet.replicas(model.id)) for model in fleet.models))
        assert len({instance.id for instance in fleet.instances}) == len(fleet.instances)
        assert len({request.id for request in fleet.running}) == len(fleet.running)
        for model in fleet.models:
            of = [instance for instance in fleet.instances if instance.model == model.id]
            assert model.num_running == sum(instance.num_requests for instance in of)
        here = Counter(request.instance for request in fleet.running)
        if with_running:
            assert all(here[instance.id] == instance.num_requests for instance in fleet.instances)

    look_at()
    assert max(most_replicas) >= 8
