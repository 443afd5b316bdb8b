"""Prefix-aware routing: which requests meet, when even load comes first, which prefixes a change moves."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import AdapterId, FleetView, ModelId, Request, RequestId
from hotswap.errors import ConfigError
from hotswap.policies import LeastTimeRouter, PrefixRouter
from hotswap.testing.strategies import routings
from tests.policies.views import fleet, model, serving

ROUTER = PrefixRouter(block_tokens=4, num_blocks=2)


def asks(*prompt: int, adapter: str | None = None) -> Request:
    return Request(
        id=RequestId("r"),
        model=ModelId("a"),
        prompt=prompt,
        adapter=AdapterId(adapter) if adapter else None,
    )


def begins(key: int, *more: int, adapter: str | None = None) -> Request:
    """Eight tokens that are all of what the router looks at, then others."""
    return asks(*[key] * 8, *more, adapter=adapter)


def route(request: Request, *loads: int, router: PrefixRouter = ROUTER) -> str:
    instances = [serving(f"e{number}", "a", load) for number, load in enumerate(loads)]
    answer = router.route(request, fleet(instances, [model("a")]))
    assert answer is not None
    return answer


def test_requests_that_begin_alike_meet() -> None:
    idle = [0] * 16
    for key in range(20):
        home = route(begins(key), *idle)
        assert {route(begins(key, *range(number)), *idle) for number in range(1, 20)} == {home}
        assert route(begins(key).continued([1, 2, 3, 4]), *idle) == home
    assert len({route(begins(key), *idle) for key in range(60)}) == 16
    assert len({route(begins(1, adapter=f"x{number}"), *idle) for number in range(20)}) > 8


def test_a_home_too_small_for_the_request_is_passed_over() -> None:
    instances = [serving(f"e{number}", "a") for number in range(4)]
    for key in range(20):
        home = ROUTER.route(begins(key), fleet(instances, [model("a")]))
        small = [replace(i, num_kv_blocks=1, kv_block_tokens=4) if i.id == home else i for i in instances]
        assert ROUTER.route(begins(key), fleet(small, [model("a")])) not in (home, None)


def test_a_prefix_is_worth_more_than_a_shorter_queue() -> None:
    home = int(route(begins(1), 0, 0, 0)[1:])
    loads = [8 if number == home else 0 for number in range(3)]
    assert route(begins(1), *loads) == f"e{home}"


def test_a_prompt_without_a_whole_block_goes_to_the_shortest_queue() -> None:
    assert {route(asks(key, key, key), 3, 1, 2) for key in range(20)} == {"e1"}
    assert {route(asks(key, key, key).continued([key] * 9), 3, 1, 2) for key in range(20)} == {"e1"}
    assert len({route(asks(key, key, key, key), 3, 1, 2) for key in range(20)}) == 3


@pytest.mark.parametrize(
    ("busy", "idle", "shortest"),
    [(8, 0, False), (9, 0, True), (29, 20, False), (30, 20, False), (31, 20, True)],
)
def test_an_uneven_fleet_sends_everything_to_the_shortest_queue(busy: int, idle: int, shortest: bool) -> None:
    """Also what would have gone to a third replica: the rule looks at the most and the least loaded."""
    loads = busy, idle, idle + 1
    answers = {route(begins(key), *loads) for key in range(30)}
    assert answers == ({"e1"} if shortest else {"e0", "e1", "e2"})
    never = PrefixRouter(block_tokens=4, num_blocks=2, abs_threshold=inf)
    assert len({route(begins(key), *loads, router=never) for key in range(30)}) == 3


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 8), st.integers(1, 120))
def test_one_popular_prefix_does_not_pile_up(start: list[int], threshold: int, arrivals: int) -> None:
    router = PrefixRouter(block_tokens=4, abs_threshold=threshold, rel_threshold=1.0)
    loads = list(start)
    for _ in range(arrivals):
        loads[int(route(begins(1), *loads, router=router)[1:])] += 1
    assert max(loads) - min(loads) <= max(threshold + 1, max(start))


@given(st.integers(2, 8), st.integers(0, 7))
def test_a_replica_that_leaves_moves_its_own_prefixes_alone(count: int, leaving: int) -> None:
    instances = [serving(f"e{number}", "a") for number in range(count)]
    left = [i for i in instances if i.id != f"e{leaving}"]
    for key in range(40):
        before = ROUTER.route(begins(key), fleet(instances, [model("a")]))
        after = ROUTER.route(begins(key), fleet(left, [model("a")]))
        assert (before == after) == (before != f"e{leaving}")


@pytest.mark.parametrize(
    "values", [{"abs_threshold": -1}, {"rel_threshold": 0.5}, {"block_tokens": 0}, {"num_blocks": 0}]
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        PrefixRouter(**values)


# ------------------------------------------------------------------ seconds in place of requests

# A token is a millisecond, so that the eight tokens that choose a replica save eight.
TIME = LeastTimeRouter(prefill_tokens_per_s=1000, request_s=0.0)
TIMED = replace(ROUTER, time=TIME)


def computing(*num_tokens: int) -> FleetView:
    """Replicas of `a` that have so many tokens to compute."""
    instances = [
        replace(serving(f"e{number}", "a"), num_prefill_tokens=count)
        for number, count in enumerate(num_tokens)
    ]
    return fleet(instances, [model("a")])


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(0, 99))
def test_the_first_token_comes_soonest_with_what_is_found_counted(queues: list[int], key: int) -> None:
    """Mooncake's rule: home by the eight tokens that it need not compute, else the shortest queue."""
    home = int(route(begins(key), *[0] * len(queues))[1:])
    answer = TIMED.route(begins(key), computing(*queues))
    assert answer is not None
    if queues[home] - min(queues) <= 8:
        assert answer == f"e{home}"
    else:
        assert queues[int(answer[1:])] == min(queues)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 3), st.integers(0, 9))
def test_without_a_whole_block_only_the_time_counts(queues: list[int], length: int, adapter: int) -> None:
    short = asks(*[1] * length, adapter=f"x{adapter}")
    view = computing(*queues)
    assert TIMED.route(short, view) == TIME.route(short, view)


@given(routings())
def test_no_answer_keeps_a_request_longer_than_its_blocks_take(routing: tuple[Request, FleetView]) -> None:
    """Whatever the fleet: adapters, full and swapping replicas, blocks that are short."""
    asked, view = routing
    answer, soonest = TIMED.route(asked, view), TIME.route(asked, view)
    assert (answer is None) == (soonest is None)
    if answer is not None:
        by_id = {instance.id: instance for instance in view.instances}
        waits_s = [TIME.expected_s(asked, by_id[name], view) for name in (answer, soonest)]  # type: ignore[index]
        assert waits_s[0] - waits_s[1] <= 8 / 1000 + 1e-9
