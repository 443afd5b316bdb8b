"""The contracts of the routers on every fleet, and the order of affinity."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import AdapterId, FleetView, InstanceId, InstanceState, InstanceView
from hotswap.abc import Router
from hotswap.errors import ConfigError
from hotswap.policies import (
    AffinityRouter,
    ConsistentHashRouter,
    FirstOfRouters,
    LeastLoadedRouter,
    LeastTimeRouter,
    PrefixRouter,
)
from tests.policies.views import (
    MODELS,
    Kept,
    a_host,
    empty,
    fleet,
    fleet_views,
    many_hosts,
    model,
    request,
    serving,
    swapping_to,
)

ROUTERS = (LeastLoadedRouter(), AffinityRouter(), FirstOfRouters(AffinityRouter(), LeastLoadedRouter()))
# These do not balance by the number of requests alone.
EVERY_ROUTER = (
    *ROUTERS,
    ConsistentHashRouter(),
    PrefixRouter(),
    PrefixRouter(time=LeastTimeRouter()),
    LeastTimeRouter(),
)


def holding(instance: InstanceView, *adapters: str) -> InstanceView:
    return replace(instance, adapters=tuple(map(AdapterId, adapters)))


def blocks(instance: InstanceView, free: int, total: int) -> InstanceView:
    return replace(instance, num_kv_blocks=total, num_free_kv_blocks=free)


def route(
    router: Router, *instances: InstanceView, adapter: str | None = None, tokens: int = 1
) -> str | None:
    return router.route(
        request("a", adapter=adapter, tokens=tokens), fleet(instances, [model("a"), model("b")])
    )


# ------------------------------------------------------------------ every fleet


@pytest.mark.parametrize("router", EVERY_ROUTER, ids=repr)
@given(view=fleet_views(), of=st.sampled_from(MODELS), adapter=st.sampled_from([None, "x", "z"]))
def test_an_answer_is_an_open_replica_and_given_whenever_there_is_one(
    router: Router, view: FleetView, of: str, adapter: str | None
) -> None:
    asked = request(of, adapter=adapter)
    answer = router.route(asked, view)
    fitting = {i.id for i in view.instances if i.open and i.model == of}
    assert answer in fitting if fitting else answer is None
    assert router.route(asked, replace(view, instances=view.instances[::-1])) == answer


@pytest.mark.parametrize("router", EVERY_ROUTER, ids=repr)
@given(data=st.data())
def test_what_is_kept_from_route_to_route_changes_no_answer(router: Router, data: st.DataObject) -> None:
    kept = Kept(data.draw(many_hosts()))
    for _ in range(data.draw(st.integers(1, 5))):
        tokens, adapter = data.draw(st.integers(1, 700)), data.draw(st.sampled_from([None, "x"]))
        asked = request("a", adapter=adapter, tokens=tokens)
        view = fleet(kept.now.values(), [model("a")])
        assert router.route(asked, kept.view()) == router.route(asked, view)
        for name in data.draw(st.lists(st.sampled_from(sorted(kept.now)), max_size=4, unique=True)):
            new, before = data.draw(a_host(name)), kept.now[name]
            match data.draw(st.sampled_from(["go", "all", "count", "load", "load"])):
                case "go":
                    kept.drop(name)
                case "all":
                    kept.change(new)
                case "count":
                    kept.change(replace(before, num_requests=new.num_requests))
                case _:
                    free = min(new.num_free_kv_blocks, before.num_kv_blocks)
                    tokens = new.num_prefill_tokens
                    kept.change(replace(before, num_prefill_tokens=tokens, num_free_kv_blocks=free))


# ------------------------------------------------------------------ least loaded


@pytest.mark.parametrize("router", EVERY_ROUTER, ids=repr)
def test_no_open_replica_is_none(router: Router) -> None:
    full = replace(serving("e0", "a", 4), max_requests=4)
    assert route(router) is None
    draining = replace(swapping_to("e3", "b", of="a"), state=InstanceState.DRAINING)
    assert route(router, serving("e0", "b"), empty("e1"), swapping_to("e2", "a"), draining, full) is None


@pytest.mark.parametrize("router", EVERY_ROUTER, ids=repr)
def test_an_instance_about_to_turn_away_is_used_only_where_no_other_is_open(router: Router) -> None:
    leaving = swapping_to("e0", "b", of="a")
    assert route(router, leaving) == "e0"
    assert route(router, leaving, serving("e1", "a", 5)) == "e1"
    assert route(router, leaving, replace(serving("e1", "a", 5), max_requests=5)) == "e0"


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_the_fewest_requests_win_then_free_blocks_then_the_smaller_id(router: Router) -> None:
    assert route(router, serving("e0", "a", 3), serving("e1", "a", 2), serving("e2", "b", 0)) == "e1"
    half, most = blocks(serving("e0", "a", 2), 50, 100), blocks(serving("e1", "a", 2), 9, 10)
    assert route(router, half, most) == "e1"
    assert route(router, serving("e1", "a"), serving("e0", "a")) == "e0"


@pytest.mark.parametrize("router", ROUTERS, ids=repr)
def test_an_instance_too_small_for_the_tokens_is_a_last_resort(router: Router) -> None:
    small, large = blocks(serving("e0", "a", 0), 2, 2), blocks(serving("e1", "a", 5), 4, 4)
    assert route(router, small, large, tokens=31) == "e0"
    assert route(router, small, large, tokens=32) == "e1"  # 2 blocks of 16 hold no 33rd token
    assert route(router, small, large, tokens=64) == "e0"


@pytest.mark.parametrize("router", EVERY_ROUTER, ids=repr)
def test_a_request_waits_for_the_full_replica_that_alone_can_hold_it(router: Router) -> None:
    small, large = blocks(serving("e0", "a", 0), 2, 2), blocks(serving("e1", "a", 5), 4, 4)
    full = replace(large, max_requests=5)
    assert route(router, small, full, tokens=32) is None
    assert route(router, small, full, tokens=31) == "e0"
    assert route(router, small, full, tokens=64) == "e0"  # which says that it never fits


# ------------------------------------------------------------------ affinity


def test_a_holder_of_the_adapter_comes_before_a_less_loaded_replica() -> None:
    instances = (
        serving("e0", "a", 0),
        holding(serving("e1", "a", 8), "x"),
        holding(serving("e2", "b", 0), "x"),
    )
    assert route(AffinityRouter(), *instances, adapter="x") == "e1"
    assert route(AffinityRouter(), *instances, adapter="y") == "e0"
    assert route(AffinityRouter(), *instances) == "e0"


def test_a_holder_too_small_for_the_tokens_is_passed_over() -> None:
    small = blocks(holding(serving("e0", "a", 0), "x"), 2, 2)
    large, other = blocks(serving("e1", "a", 5), 4, 4), blocks(serving("e2", "a", 7), 2, 2)
    assert route(AffinityRouter(), small, large, other, adapter="x", tokens=32) == "e1"
    assert route(AffinityRouter(), small, large, other, adapter="x", tokens=64) == "e0"  # it never fits
    assert route(AffinityRouter(), large, other, adapter="x", tokens=64) == "e1"


def test_the_least_loaded_holder_wins() -> None:
    instances = (
        serving("e0", "a", 0),
        holding(serving("e1", "a", 4), "x"),
        holding(serving("e2", "a", 3), "x", "y"),
    )
    assert route(AffinityRouter(), *instances, adapter="x") == "e2"


@pytest.mark.parametrize(
    ("busy", "idle", "passed_over"),
    [(8, 0, False), (9, 0, True), (29, 20, False), (30, 20, False), (31, 20, True)],
)
def test_an_overloaded_holder_is_passed_over(busy: int, idle: int, passed_over: bool) -> None:
    router = AffinityRouter(abs_threshold=8, rel_threshold=1.5)
    answer = route(router, holding(serving("e0", "a", busy), "x"), serving("e1", "a", idle), adapter="x")
    assert answer == ("e1" if passed_over else "e0")
    never = AffinityRouter(abs_threshold=inf)
    assert route(never, holding(serving("e0", "a", busy), "x"), serving("e1", "a", idle), adapter="x") == "e0"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 8), st.integers(1, 120))
def test_one_popular_adapter_does_not_pile_up(start: list[int], threshold: int, arrivals: int) -> None:
    router = AffinityRouter(abs_threshold=threshold, rel_threshold=1.0)
    loads = {InstanceId(f"e{n}"): requests for n, requests in enumerate(start)}
    for _ in range(arrivals):
        answer = router.route(request("a", adapter="x"), fleet(_replicas(loads), [model("a")]))
        assert answer is not None
        loads[answer] += 1
    assert max(loads.values()) - min(loads.values()) <= max(threshold + 1, max(start))


def _replicas(loads: dict[InstanceId, int]) -> Sequence[InstanceView]:
    """Only the first holds the adapter, and none learns it."""
    return [holding(serving(name, "a", n), *(["x"] if name == "e0" else [])) for name, n in loads.items()]


@pytest.mark.parametrize(
    "values", [{"abs_threshold": -1}, {"rel_threshold": 0.5}, {"rel_threshold": float("nan")}]
)
def test_a_senseless_threshold_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        AffinityRouter(**values)


def test_reprs_show_the_settings() -> None:
    assert repr(ROUTERS[-1]) == (
        "FirstOfRouters(AffinityRouter(abs_threshold=8, rel_threshold=1.5), LeastLoadedRouter())"
    )
