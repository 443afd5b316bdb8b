"""Consistent hashing with bounded loads: the chosen replica, the bound, and the keys that a change moves."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import AdapterId, InstanceId, InstanceView, ModelId, Request, RequestId
from hotswap.errors import ConfigError
from hotswap.policies import ConsistentHashRouter
from tests.policies.views import empty, fleet, model, serving, swapping_to

PLAIN = ConsistentHashRouter(c=inf)
BOUNDS = st.sampled_from([1.0, 1.1, 1.25, 2.0])
LOADS = st.lists(st.integers(0, 12), min_size=1, max_size=9)


def asks(key: int, *, adapter: str | None = None, of: str = "a", more: Sequence[int] = ()) -> Request:
    return Request(
        id=RequestId("r"),
        model=ModelId(of),
        prompt=(key, *more),
        adapter=AdapterId(adapter) if adapter else None,
    )


def named(count: int) -> list[str]:
    return [f"e{number}" for number in range(count)]


def route(router: ConsistentHashRouter, loads: dict[str, int], request: Request) -> str:
    instances = [serving(name, "a", requests) for name, requests in loads.items()]
    answer = router.route(request, fleet(instances, [model("a")]))
    assert answer is not None
    return answer


def placed(router: ConsistentHashRouter, names: Iterable[str], num_keys: int) -> dict[int, str]:
    """Where keys go that arrive one after the other, and stay."""
    loads = dict.fromkeys(names, 0)
    where: dict[int, str] = {}
    for key in range(num_keys):
        where[key] = route(router, loads, asks(key))
        loads[where[key]] += 1
    return where


def moved(before: dict[int, str], after: dict[int, str]) -> list[int]:
    return [key for key, name in before.items() if after[key] != name]


# ------------------------------------------------------------------ the bound


@given(LOADS, BOUNDS, st.integers(0, 99))
def test_a_chosen_replica_stays_within_its_share(loads: list[int], c: float, key: int) -> None:
    named_loads = dict(zip(named(len(loads)), loads, strict=True))
    answer = route(ConsistentHashRouter(c=c), named_loads, asks(key))
    assert named_loads[answer] + 1 <= ceil(c * (sum(loads) + 1) / len(loads))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), BOUNDS)
def test_no_instance_exceeds_its_share_while_requests_arrive(
    arrivals: list[int], num_instances: int, c: float
) -> None:
    loads = dict.fromkeys(named(num_instances), 0)
    for num_placed, key in enumerate(arrivals, start=1):
        loads[route(ConsistentHashRouter(c=c), loads, asks(key))] += 1
        assert max(loads.values()) <= ceil(c * num_placed / num_instances)


def test_without_slack_the_fleet_is_even() -> None:
    loads = Counter(placed(ConsistentHashRouter(c=1.0), named(7), 70).values())
    assert set(loads.values()) == {10}


# ------------------------------------------------------------------ the ring


@given(LOADS, BOUNDS | st.just(inf), st.integers(0, 99), st.integers(1, 20))
def test_it_is_the_walk_on_a_ring_of_the_candidates_alone(
    loads: list[int], c: float, key: int, virtual_nodes: int
) -> None:
    """The walk, written out: all points of the candidates in order, the first below the capacity."""
    names = named(len(loads))
    instances = [serving(name, "a", load) for name, load in zip(names, loads, strict=True)]
    others = [
        serving("x0", "b"),
        empty("x1"),
        swapping_to("x2", "a"),
        replace(serving("x3", "a"), max_requests=0),
    ]
    router = ConsistentHashRouter(c=c, virtual_nodes=virtual_nodes)
    answer = router.route(asks(key), fleet([*others, *instances], [model("a"), model("b")]))

    ring = sorted((point, name) for name in names for point in points_of(name, virtual_nodes))
    place = number(repr(("a", None)).encode() + key.to_bytes(8, "little"), size=8)[0]
    walk = [name for point, name in ring if point >= place] + [name for _, name in ring]
    below = {
        name for name, load in zip(names, loads, strict=True) if load < c * (sum(loads) + 1) / len(loads)
    }
    assert answer == next(name for name in walk if name in below)


def points_of(name: str, count: int) -> list[int]:
    return [point for n in range(count) for point in number(f"{n}:{name}".encode(), size=64)][:count]


def number(data: bytes, *, size: int) -> list[int]:
    digest = blake2b(data, digest_size=size).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, size, 8)]


@pytest.mark.parametrize("leaving", ["e0", "e3", "e7"])
def test_an_instance_that_leaves_moves_its_own_keys_alone(leaving: str) -> None:
    names = named(8)
    before = placed(PLAIN, names, 400)
    after = placed(PLAIN, [name for name in names if name != leaving], 400)
    assert moved(before, after) == [key for key, name in before.items() if name == leaving]


def test_an_instance_that_comes_takes_keys_and_moves_none_between_others() -> None:
    before, after = placed(PLAIN, named(8), 400), placed(PLAIN, named(9), 400)
    came = moved(before, after)
    assert {after[key] for key in came} == {"e8"}
    assert 400 / 9 / 2 < len(came) < 400 / 9 * 2


def test_a_full_instance_gets_its_keys_back() -> None:
    instances = [serving(name, "a") for name in named(4)]
    key = asks(5)
    home = PLAIN.route(key, fleet(instances, [model("a")]))
    full = [replace(i, num_requests=i.max_requests) if i.id == home else i for i in instances]
    assert PLAIN.route(key, fleet(full, [model("a")])) not in (home, None)
    assert PLAIN.route(key, fleet(instances, [model("a")])) == home


def test_what_others_serve_does_not_matter() -> None:
    here = [serving(name, "a") for name in named(4)]
    there: list[InstanceView] = [serving("x0", "b"), empty("x1")]
    swapped: list[InstanceView] = [empty("x0"), serving("x1", "c", 9)]
    models = [model("a"), model("b"), model("c")]
    for key in range(50):
        answers = {PLAIN.route(asks(key), fleet(here + more, models)) for more in ([], there, swapped)}
        assert len(answers) == 1


def test_a_model_with_few_of_many_instances_is_walked_in_the_same_order() -> None:
    """Its own ring and that of the whole fleet agree, so no key moves when one replaces the other."""
    here = [serving(name, "a") for name in named(2)]
    others: list[InstanceView] = [serving(f"x{number}", "b") for number in range(60)]
    for key in range(50):
        views = [fleet([*here, *others[:count]], [model("a"), model("b")]) for count in (0, 29, 31, 60)]
        assert len({PLAIN.route(asks(key), view) for view in views}) == 1


def test_keys_are_spread() -> None:
    shares = Counter(placed(PLAIN, named(10), 2000).values())
    assert len(shares) == 10
    assert max(shares.values()) < 1.5 * 200


# ------------------------------------------------------------------ keys


def where(router: ConsistentHashRouter, *requests: Request) -> set[InstanceId | None]:
    view = fleet([serving(name, "a") for name in named(32)], [model("a")])
    return {router.route(request, view) for request in requests}


def test_requests_with_the_same_first_tokens_meet() -> None:
    router = ConsistentHashRouter(prefix_tokens=3)
    shared = [asks(1, more=(2, 3, last)) for last in range(20)]
    assert len(where(router, *shared)) == 1
    assert len(where(router, *[asks(1, more=(2, last)) for last in range(20)])) > 10
    assert len(where(router, *[asks(1, adapter=f"x{number}") for number in range(20)])) > 10
    short = asks(1, more=(2,))
    assert where(router, short.continued([3, 4])) == where(router, short)  # what it generated is no key


def test_tokens_that_no_engine_knows_are_routed_all_the_same() -> None:
    router = ConsistentHashRouter()
    assert len(where(router, *[asks(1 << 80)] * 3)) == 1
    assert len(where(router, *[asks(-(1 << 80), more=(key,)) for key in range(20)])) > 5


def test_requests_with_the_same_adapter_meet() -> None:
    router = ConsistentHashRouter(key="adapter")
    assert len(where(router, *[asks(key, adapter="x") for key in range(20)])) == 1
    assert len(where(router, *[asks(key) for key in range(20)])) == 1
    assert len(where(router, *[asks(1, adapter=f"x{number}") for number in range(20)])) > 10


def test_a_key_of_ones_own() -> None:
    router = ConsistentHashRouter(key=lambda request: str(request.prompt[0] % 3))
    assert len(where(router, *[asks(3 * key, adapter=f"x{key}") for key in range(20)])) == 1
    assert len(where(router, *map(asks, range(20)))) == 3


ANSWERS = """
from tests.policies.test_consistent_hash import PLAIN, asks, fleet, model, named, serving
view = fleet([serving(name, "a") for name in named(16)], [model("a")])
print(*[PLAIN.route(asks(key, adapter="x"), view) for key in range(40)])
"""


def test_the_answer_is_the_same_in_every_process() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", ANSWERS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
    assert len(set(answers.pop().split())) > 8


@pytest.mark.parametrize(
    "values",
    [{"c": 0.9}, {"c": float("nan")}, {"virtual_nodes": 0}, {"prefix_tokens": 0}, {"key": "prefixes"}],
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        ConsistentHashRouter(**values)
