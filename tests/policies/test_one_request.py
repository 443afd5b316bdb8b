"""One waiting request brings its model one instance, however many instances are free to take it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import Model, Sampling
from hotswap.abc import Scheduler, Swap
from hotswap.offline.virtual_time import run
from hotswap.policies import (
    AdapterPool,
    Chain,
    Cooldown,
    ElasticQuota,
    FirstOf,
    Forecast,
    Freeness,
    FreenessAutoscaler,
    HorizontalAutoscaler,
    KeepAliveSwap,
    RestoreMinReplicas,
    ShepherdSwap,
    StartupTimePlacement,
    WeightedLoadSwap,
)
from tests.policies.views import empty, fleet, model, serving, waiting
from tests.runtime.support import read, sim_fleet

SWAP = WeightedLoadSwap(t1=8, t2=6, b=2.0, sigmas=0)
# Every shipped scheduler that loads a model because requests wait for it, with settings at their limits.
SCHEDULERS: dict[str, Callable[[], Scheduler]] = {
    "weighted load": lambda: SWAP,
    "weighted load, no threshold": lambda: WeightedLoadSwap(t1=0, t2=6, b=1.0, sigmas=0),
    "weighted load, a small threshold": lambda: WeightedLoadSwap(t1=0.5, t2=6, b=2.0, sigmas=0),
    "weighted load, as a margin": lambda: WeightedLoadSwap(
        t1=0, t2=6, b=0.0, reading="margin", guard=False, sigmas=0
    ),
    "weighted load, no patience": lambda: WeightedLoadSwap(t1=8, t2=6, b=2.0, patience_s=0.0, sigmas=0),
    "elastic quota": ElasticQuota,
    "freeness": lambda: FreenessAutoscaler(min_instances=0),
    "freeness of the artifact": lambda: FreenessAutoscaler(Freeness("artifact"), min_instances=0),
    "horizontal": lambda: HorizontalAutoscaler(target=1),
    "keep alive": KeepAliveSwap,
    "shepherd": lambda: ShepherdSwap(lambda_=1.0),
    "startup time": StartupTimePlacement,
    "startup time, evicting": lambda: StartupTimePlacement(victims="evict"),
    "startup time, idle only": lambda: StartupTimePlacement(victims="stay"),
    "chain": lambda: Chain(
        RestoreMinReplicas(), StartupTimePlacement(), SWAP, KeepAliveSwap(), AdapterPool()
    ),
    "first of": lambda: FirstOf(StartupTimePlacement(), SWAP),
    "forecast": Forecast,
    "cooldown": lambda: Cooldown(SWAP, 5.0),
}
# These take no instance from another model.
ONLY_EMPTY = {"freeness", "freeness of the artifact", "horizontal"}
every_scheduler = pytest.mark.parametrize("name", SCHEDULERS)


@every_scheduler
@given(
    st.lists(st.sampled_from(["", "b", "c"]), min_size=2, max_size=6), st.sampled_from([0.1, 1.0, 10.0, 1e3])
)
def test_one_plan_gives_an_absent_model_one_instance(name: str, held: list[str], weight: float) -> None:
    instances = [serving(f"e{n}", of) if of else empty(f"e{n}") for n, of in enumerate(held)]
    models = [model("a", 1, waiting=1, w=weight), model("b"), model("c")]
    view = fleet(instances, models, waiting=[waiting("a", 0.0)])
    plan = SCHEDULERS[name]().plan(view)
    loads = [action.instance for action in plan if isinstance(action, Swap) and action.model == "a"]
    assert len(loads) == (1 if "" in held or name not in ONLY_EMPTY else 0)


@every_scheduler
@pytest.mark.parametrize("weight", [1.0, 10.0])
@pytest.mark.parametrize("loaded", [False, True], ids=["EMPTY", "idle"])
@pytest.mark.parametrize("max_tokens", [4, 400], ids=["short", "long"])
def test_a_fleet_swaps_one_instance_for_one_request(
    name: str, weight: float, loaded: bool, max_tokens: int
) -> None:
    """From the first plan to half a minute after the last token, one plan after another."""

    async def serve() -> list[str | None]:
        models = [Model("a", weight=weight), Model("b"), Model("c")]
        async with sim_fleet("a", "b", "c", engines=3, models=models, scheduler=SCHEDULERS[name]()) as fleet:
            if loaded and name not in ONLY_EMPTY:
                for engine, other in (("e0", "b"), ("e1", "c"), ("e2", "b")):
                    await fleet.swap(engine, to=other)
            before = len(fleet.swaps)
            await read(fleet, "a", list(range(1, 50)), Sampling(max_tokens=max_tokens))
            await anyio.sleep(30)
            return [swap.model for swap in fleet.swaps[before:] if swap.model == "a"]

    assert run(serve) == ["a"]
