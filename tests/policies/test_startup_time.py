"""Where `StartupTimePlacement` starts a model: cases worked by hand, and that trying finds nothing better."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, product
from math import inf, nan
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap import (
    FleetView,
    InstanceState,
    InstanceView,
    ModelId,
    ModelView,
    RequestId,
    Residency,
    RunningView,
    StoreView,
    TierView,
    TimesView,
)
from hotswap.abc import Action, Migrate, Swap
from hotswap.errors import ConfigError
from hotswap.policies import Cooldown, StartupCosts, StartupTimePlacement, accepted
from tests.policies.views import empty, fleet, fleet_views, model, serving, swapping_to, swaps, waiting

GB = 10**9
DISK = TierView(name="disk", bytes_per_s=4 * GB)
STORE = StoreView(
    tiers=(DISK,),
    residency=tuple(Residency(model=ModelId(name), tier="disk", size_bytes=8 * GB) for name in "abcd"),
)
LOAD_S = 2.0  # 8 GB from that disk
# The defaults of ServerlessLLM's own scheduler for a move, and 20 tokens a second.
COSTS = StartupCosts(token_s=0.01, start_s=0.1, tpot_s=0.05)
RULE = StartupTimePlacement(costs=COSTS)


def run(
    name: str, on: InstanceView, tokens: int = 100, left: int = 1000, *, moving: bool = False
) -> RunningView:
    assert on.model is not None
    return RunningView(
        id=RequestId(name),
        model=on.model,
        instance=on.id,
        num_tokens=tokens,
        num_remaining=left,
        moving=moving,
    )


def seen(
    instances: Iterable[InstanceView], models: Iterable[ModelView], running: Iterable[RunningView] = ()
) -> FleetView:
    """A fleet whose counts agree with what runs on it."""
    runs = tuple(running)
    counts = Counter(r.instance for r in runs)
    return replace(
        fleet([replace(i, num_requests=counts[i.id]) for i in instances], models), running=runs, store=STORE
    )


def moves(actions: Iterable[Action]) -> dict[str, str]:
    """The planned moves as `request: destination`."""
    return {action.request: action.destination for action in actions if isinstance(action, Migrate)}


def small(instance: InstanceView, max_requests: int) -> InstanceView:
    return replace(instance, max_requests=max_requests)


# ------------------------------------------------------------------ worked by hand


E0, E1, E2 = serving("e0", "b"), serving("e1", "b"), serving("e2", "b")
RUNS = (
    run("r0", E0, 1000),  # 0.01 * 1000 + 0.1 = 10.1 s
    run("r1", E1, 100),  # 1.1 s
    run("r2", E1, 200),  # 2.1 s
    run("r3", E2, 4000),  # 40.1 s
)


def test_victims_that_move_soonest_are_chosen() -> None:
    """Startup times: 12.1 s on e0, 5.2 s on e1, 42.1 s on e2; so e1, and its requests go to the other two."""
    plan = RULE.plan(seen([E0, E1, E2], [model("a", 1, waiting=1), model("b", 4)], RUNS))
    assert swaps(plan) == [("e1", "a")]
    assert moves(plan) == {"r1": "e0", "r2": "e2"}
    (swap,) = [action for action in plan if isinstance(action, Swap)]
    assert swap.deadline_s == RULE.deadline_s
    assert swap.reason == "1 wait for a; e1 is ready in 5.2 s"


def test_a_busy_replica_that_is_free_sooner_is_waited_for() -> None:
    """100 tokens left at 0.05 s each are 5 s, 110 are 5.5 s; the startup time is 5.2 s."""
    busy = small(serving("e3", "a"), 1)
    models = [model("a", 2, waiting=1), model("b", 4)]
    waits = seen([E0, E1, E2, busy], models, [*RUNS, run("r4", busy, left=100)])
    assert RULE.plan(waits) == ()
    starts = seen([E0, E1, E2, busy], models, [*RUNS, run("r4", busy, left=110)])
    assert swaps(RULE.plan(starts)) == [("e1", "a")]


def test_those_that_would_wait_longer_get_an_instance_though_others_wait() -> None:
    busy = small(serving("e3", "a"), 1)
    view = seen(
        [small(empty("e0"), 1), small(empty("e1"), 1), busy],
        [model("a", 4, waiting=3)],
        [run("r0", busy, left=20)],
    )
    assert swaps(RULE.plan(view)) == [("e0", "a"), ("e1", "a")]  # three wait, one of them for 1 s alone


def test_an_idle_instance_is_quicker_than_victims_and_an_empty_one_disrupts_least() -> None:
    idle = serving("e4", "c")
    models = [model("a", 1, waiting=1), model("b", 4), model("c")]
    assert swaps(RULE.plan(seen([E0, E1, E2, idle], models, RUNS))) == [("e4", "a")]
    assert swaps(RULE.plan(seen([E0, E1, E2, idle, empty("e5")], models, RUNS))) == [("e5", "a")]


def test_a_preloaded_model_needs_no_load() -> None:
    """3.2 s on e1, where it is staged, against 2 s on an EMPTY instance; and 1.1 s with one victim."""
    staged = replace(E1, preloaded=ModelId("a"))
    models = [model("a", 1, waiting=1), model("b", 4)]
    assert swaps(RULE.plan(seen([E0, staged, E2, empty("e3")], models, RUNS))) == [("e3", "a")]
    one_less = [r for r in RUNS if r.id != "r2"]
    assert swaps(RULE.plan(seen([E0, staged, E2, empty("e3")], models, one_less))) == [("e1", "a")]


def test_of_idle_instances_the_one_used_longest_ago_goes() -> None:
    instances = [
        replace(serving("e0", "b"), last_used_s=90.0),
        replace(serving("e1", "c"), last_used_s=20.0),
        serving("e2", "d", since_s=30.0),
    ]
    models = [model("a", 1, waiting=1), model("b"), model("c"), model("d")]
    assert swaps(RULE.plan(seen(instances, models))) == [("e1", "a")]


def test_a_request_that_ends_sooner_than_it_could_move_stays() -> None:
    """Four tokens left take 0.2 s, a move 1.1 s: e1 is ready after 2.2 s, and needs no place elsewhere."""
    full = small(E0, 1)
    ending = run("r1", E1, 100, left=4)
    view = seen([full, E1], [model("a", 1, waiting=1), model("b", 2)], [run("r0", full), ending])
    plan = RULE.plan(view)
    assert swaps(plan) == [("e1", "a")]
    assert moves(plan) == {}


def test_what_ends_by_itself_ends_while_others_move() -> None:
    """Two of e1 end within 1 s and two move in 2.2 s; so it is ready after 4.2 s, load included."""
    runs = [run("r0", E1, 100), run("r1", E1, 100), run("r2", E1, 100, left=10), run("r3", E1, 200, left=20)]
    plan = RULE.plan(seen([E0, E1], [model("a", 1, waiting=1), model("b", 5)], [*runs, run("r4", E0, 900)]))
    assert moves(plan) == {"r0": "e0", "r1": "e0"}
    assert [a.reason for a in plan if isinstance(a, Swap)] == ["1 wait for a; e1 is ready in 4.2 s"]


# ------------------------------------------------------------------ what is not done


def test_no_request_is_evicted_where_replicas_are_full() -> None:
    full = [small(serving("e0", "b"), 1), small(serving("e1", "b"), 1)]
    runs = [run("r0", full[0]), run("r1", full[1])]
    models = [model("a", 1, waiting=1), model("b", 2)]
    assert RULE.plan(seen(full, models, runs)) == ()
    roomy = [full[0], small(full[1], 2)]
    assert moves(RULE.plan(seen(roomy, models, runs))) == {"r0": "e1"}


def test_places_for_waiting_requests_are_no_capacity() -> None:
    roomy = [small(serving("e0", "b"), 1), small(serving("e1", "b"), 2)]
    runs = [run("r0", roomy[0]), run("r1", roomy[1])]
    assert RULE.plan(seen(roomy, [model("a", 1, waiting=1), model("b", 3, waiting=1)], runs)) == ()


def test_capacity_is_counted_in_kv_blocks_too() -> None:
    def plan(free: int) -> dict[str, str]:
        there = replace(E1, num_kv_blocks=100, num_free_kv_blocks=free, kv_block_tokens=16)
        runs = [run("r0", E0, 100, left=400), run("r1", there, 300, left=400)]
        # The largest has 300 tokens, and 19 blocks hold 304.
        return moves(RULE.plan(seen([E0, there], [model("a", 1, waiting=1), model("b", 2)], runs)))

    assert plan(free=19) == {"r0": "e1"}
    assert plan(free=18) == {"r1": "e0"}  # nothing is known of the blocks of e0


def test_a_kv_pool_too_small_for_a_request_is_no_capacity() -> None:
    def plan(num_kv_blocks: int) -> dict[str, str]:
        there = replace(serving("e1", "b"), cooling_down=(ModelId("a"),), kv_block_tokens=16)
        there = replace(there, num_kv_blocks=num_kv_blocks, num_free_kv_blocks=num_kv_blocks)
        runs = [run("r0", E0, 100, left=100)]  # 200 tokens in the end
        return moves(RULE.plan(seen([E0, there], [model("a", 1, waiting=1), model("b", 1)], runs)))

    assert plan(num_kv_blocks=12) == {}
    assert plan(num_kv_blocks=13) == {"r0": "e1"}


def test_what_could_not_be_emptied_is_no_reason_not_to_wait() -> None:
    """1.1 s on e1, if its victim had a place elsewhere; so 2 s on e2, and the replica is free after 1.5 s."""
    staged = replace(small(serving("e1", "b"), 1), preloaded=ModelId("a"))
    busy = small(serving("e0", "a"), 1)
    models = [model("a", 2, waiting=1), model("b", 1)]
    runs = [run("r0", busy, left=30), run("r1", staged)]
    assert RULE.plan(seen([busy, staged, empty("e2")], models, runs)) == ()
    room = small(serving("e3", "b"), 1)
    assert moves(RULE.plan(seen([busy, staged, empty("e2"), room], models, runs))) == {"r1": "e3"}


def test_min_replicas_are_kept() -> None:
    models = [model("a", 1, waiting=1), model("b", 4, min_replicas=3)]
    assert RULE.plan(seen([E0, E1, E2], models, RUNS)) == ()


def test_a_place_that_is_free_or_coming_is_enough() -> None:
    two = [model("a", 2, waiting=2), model("b")]
    assert RULE.plan(seen([small(serving("e0", "a"), 2), empty("e1")], two)) == ()
    assert RULE.plan(seen([swapping_to("e0", "a"), empty("e1")], two)) == ()
    assert swaps(RULE.plan(seen([small(swapping_to("e0", "a"), 1), empty("e1")], two))) == [("e1", "a")]


def test_an_instance_to_which_requests_are_on_their_way_is_no_victim() -> None:
    arriving = replace(seen([E0, E1], [model("a", 1, waiting=1), model("b", 1)]), running=())
    arriving = replace(arriving, instances=tuple(replace(i, num_requests=1) for i in arriving.instances))
    assert RULE.plan(arriving) == ()


def test_models_take_turns_by_the_longest_wait_and_queue_behind_one_another() -> None:
    models = [model("a", 1, waiting=1), model("b", 1, waiting=1)]
    view = replace(seen([empty("e0")], models), waiting=(waiting("a", 99.0), waiting("b", 98.0)))
    assert swaps(RULE.plan(view)) == [("e0", "b")]
    gave_one_up = (models[0], replace(models[1], last_evicted_s=99.5))
    assert swaps(RULE.plan(replace(view, models=gave_one_up))) == [("e0", "b")], "its request waits as long"
    both = replace(view, instances=(empty("e0"), empty("e1")))
    assert [action.reason for action in RULE.plan(both) if isinstance(action, Swap)] == [
        "1 wait for b; e0 is ready in 2 s",
        "1 wait for a; e1 is ready in 4 s",
    ]


# ------------------------------------------------------------------ an instance that turns


def test_moving_off_a_turning_instance_goes_on() -> None:
    """The fleet drops moves beyond those that an instance may take part in; the next plan asks again."""
    models = [model("a", 1, waiting=1), model("b", 3)]
    leaving = replace(swapping_to("e1", "a", of="b"), state=InstanceState.DRAINING)
    runs = [run("r0", E0), run("r1", leaving, moving=True), run("r2", leaving), run("r3", leaving, left=2)]
    plan = RULE.plan(seen([E0, leaving], models, runs))
    assert moves(plan) == {"r2": "e0"}
    assert swaps(plan) == []


def test_an_instance_that_others_are_sent_to_is_not_swapped_in_the_same_plan() -> None:
    leaving = swapping_to("e0", "a", of="b")
    models = [model("a", 1), model("b", 1), model("c", 1, waiting=1)]
    plan = RULE.plan(seen([leaving, E1], models, [run("r0", leaving)]))
    assert moves(plan) == {"r0": "e1"}
    assert swaps(plan) == []


# ------------------------------------------------------------------ nodes, and alternatives


def on(node: str, instance: InstanceView) -> InstanceView:
    return replace(instance, node=node, max_requests=1)


def near(*held: tuple[str, str]) -> StoreView:
    """Two nodes with every model on disk (2 s), and some in host memory (0.4 s)."""
    names = ("n0", "n1")
    tiers = [TierView(name="host", bytes_per_s=20 * GB, node=node) for node in names]
    tiers += [TierView(name="disk", bytes_per_s=4 * GB, node=node) for node in names]
    where = [(model, "host", node) for model, node in held]
    where += [(model, "disk", node) for model in "abcd" for node in names]
    residency = [Residency(model=ModelId(m), tier=t, size_bytes=8 * GB, node=n) for m, t, n in where]
    return StoreView(tiers=tuple(tiers), residency=tuple(residency))


def test_a_model_starts_on_the_node_that_has_it_in_memory() -> None:
    view = seen([on("n0", empty("e0")), on("n1", empty("e1"))], [model("a", 1, waiting=1)])
    assert swaps(RULE.plan(replace(view, store=near(("a", "n1"))))) == [("e1", "a")]
    assert swaps(RULE.plan(replace(view, store=near(("a", "n0"))))) == [("e0", "a")]


def test_a_queue_on_one_node_sends_a_model_to_the_other() -> None:
    view = seen([on("n0", empty("e0")), on("n1", empty("e1"))], [model("a", 1, waiting=1)])
    store = near()
    queued = replace(store.tiers[2], queued_bytes=GB)
    busy = replace(store, tiers=(*store.tiers[:2], queued, store.tiers[3]))
    assert swaps(RULE.plan(replace(view, store=busy))) == [("e1", "a")]


def crossed(*held: tuple[str, str], tokens: int = 20) -> FleetView:
    """`a` waits; its node's only instance is busy with b, and the free instance is on the other node."""
    busy = on("n0", serving("e0", "b"))
    view = seen(
        [busy, on("n1", empty("e1"))], [model("a", 1, waiting=1), model("b", 1)], [run("r0", busy, tokens)]
    )
    return replace(view, store=near(*held))


def test_a_busy_instance_with_the_model_near_is_freed_through_an_idle_one() -> None:
    """b is loaded on e1 in 0.4 s, r0 moves there in 0.3 s, and a is loaded in 0.4 s: 1.1 s, not 2 s."""
    plan = RULE.plan(crossed(("a", "n0"), ("b", "n1")))
    assert swaps(plan) == [("e1", "b"), ("e0", "a")]
    assert [a.deadline_s for a in plan if isinstance(a, Swap)] == [0.0, RULE.deadline_s]
    assert [a.reason for a in plan if isinstance(a, Swap)] == [
        "takes the requests of e0: 1 wait for a; e0 is ready in 1.1 s",
        "1 wait for a; e0 is ready in 1.1 s",
    ]
    assert moves(plan) == {}, "there is nowhere to go yet"


def test_no_replacement_takes_longer_than_the_deadline() -> None:
    """Its requests would be gone from e0 in 0.7 s."""
    view = crossed(("a", "n0"), ("b", "n1"))
    assert swaps(replace(RULE, deadline_s=0.8).plan(view)) == [("e1", "b"), ("e0", "a")]
    assert swaps(replace(RULE, deadline_s=0.6).plan(view)) == [("e1", "a")]


def test_the_requests_follow_once_their_model_is_there() -> None:
    leaving = replace(on("n0", swapping_to("e0", "a", of="b")), state=InstanceState.DRAINING)
    there = on("n1", serving("e1", "b"))
    plan = RULE.plan(seen([leaving, there], [model("a", 1, waiting=1), model("b", 1)], [run("r0", leaving)]))
    assert moves(plan) == {"r0": "e1"}


def test_places_for_moving_requests_are_not_given_to_waiting_ones() -> None:
    """r0 goes to e1 as soon as b is loaded; a waiting request of b needs another instance, r0 does not."""
    leaving = replace(on("n0", swapping_to("e0", "a", of="b")), state=InstanceState.DRAINING)
    coming = on("n1", swapping_to("e1", "b"))
    models = [model("a", 1, waiting=1), model("b", 2, waiting=1)]
    view = replace(seen([leaving, coming, on("n1", empty("e2"))], models, [run("r0", leaving)]), store=near())
    assert swaps(RULE.plan(view)) == [("e2", "b")]
    ending = replace(view, running=(run("r0", leaving, left=1),))
    assert swaps(RULE.plan(ending)) == []
    assert swaps(StartupTimePlacement(costs=COSTS, victims="evict").plan(view)) == []


def test_a_longer_alternative_is_not_chosen() -> None:
    """With b on the disk of n1 it takes 2.7 s, with 200 tokens 2.9 s, with a on the disk of n0 2.7 s."""
    assert swaps(RULE.plan(crossed(("a", "n0")))) == [("e1", "a")]
    assert swaps(RULE.plan(crossed(("a", "n0"), ("b", "n1"), tokens=200))) == [("e1", "a")]
    assert swaps(RULE.plan(crossed(("b", "n1")))) == [("e1", "a")]


def test_requests_that_wait_for_the_victims_model_go_first() -> None:
    view = crossed(("a", "n0"), ("b", "n1"))
    view = replace(view, models=(model("a", 1, waiting=1), model("b", 2, waiting=1)))
    assert ("e0", "a") not in swaps(RULE.plan(view))


def test_eviction_counts_no_time_and_moves_no_request() -> None:
    """Shepherd* of the paper: 0.4 s on e0, whose request goes on elsewhere, once b is loaded there."""
    evicts = StartupTimePlacement(costs=COSTS, victims="evict")
    plan = evicts.plan(crossed(("a", "n0"), tokens=2000))
    assert swaps(plan) == [("e1", "b"), ("e0", "a")]
    assert [a.deadline_s for a in plan if isinstance(a, Swap)] == [0.0, 0.0]
    assert moves(plan) == {}


def test_busy_instances_can_be_left_alone() -> None:
    stays = StartupTimePlacement(costs=COSTS, victims="stay")
    assert swaps(stays.plan(crossed(("a", "n0"), ("b", "n1")))) == [("e1", "a")]
    assert stays.plan(seen([E0, E1, E2], [model("a", 1, waiting=1), model("b", 4)], RUNS)) == ()


@st.composite
def small_fleets_of_nodes(draw: st.DrawFn) -> FleetView:
    view = draw(small_fleets())
    nodes = [draw(st.sampled_from(["n0", "n1"])) for _ in view.instances]
    instances = [replace(i, node=node) for i, node in zip(view.instances, nodes, strict=True)]
    places = st.tuples(st.sampled_from("abc"), st.sampled_from(["n0", "n1"]))
    held = draw(st.lists(places, max_size=4, unique=True))
    return replace(view, instances=tuple(instances), store=near(*held))


@given(small_fleets_of_nodes(), st.sampled_from(["move", "evict", "stay"]))
def test_on_nodes_too_every_action_would_be_begun_and_min_replicas_hold(
    view: FleetView, victims: Literal["move", "evict", "stay"]
) -> None:
    plan = StartupTimePlacement(costs=COSTS, victims=victims).plan(view)
    assert accepted(view, plan) == tuple(plan)
    swapped = {a.instance: a.model for a in plan if isinstance(a, Swap)}
    for donor in view.models:
        before = len(view.replicas(donor.id))
        lost = sum(i.model == donor.id for i in view.instances if i.id in swapped)
        gained = sum(model == donor.id for model in swapped.values())
        assert before - lost + gained >= min(before, donor.min_replicas)
    if victims == "stay":
        assert all(not view.instance(instance).num_requests for instance in swapped)


# ------------------------------------------------------------------ trying everything


def subsets(instances: Sequence[InstanceView]) -> Iterator[tuple[InstanceView, ...]]:
    return chain.from_iterable(combinations(instances, size) for size in range(1, len(instances) + 1))


class Tried:
    """What any set of instances would cost and free for model `a`, by the words of the docstring alone."""

    def __init__(self, view: FleetView) -> None:
        self.view = view

    def movers(self, instance: InstanceView) -> list[RunningView]:
        here = [r for r in self.view.running if r.instance == instance.id]
        return [r for r in here if 0.05 * r.num_remaining > 0.01 * r.num_tokens + 0.1]

    def seconds(self, instance: InstanceView) -> float:
        here = [r for r in self.view.running if r.instance == instance.id]
        movers = self.movers(instance)
        moved_s = sum(0.01 * r.num_tokens + 0.1 for r in movers)
        ended_s = max((0.05 * r.num_remaining for r in here if r not in movers), default=0.0)
        return max(moved_s, ended_s) + (0.0 if instance.preloaded == "a" else LOAD_S)

    def possible(self, taken: Sequence[InstanceView]) -> bool:
        """Whether min_replicas hold, and the victims can be placed so that waiting requests have places."""
        for donor in self.view.models:
            mine = [i for i in taken if i.model == donor.id]
            if mine and len(self.view.replicas(donor.id)) - len(mine) < donor.min_replicas:
                return False
            if mine and not self.all_find_room(donor, mine):
                return False
        return True

    def all_find_room(self, donor: ModelView, taken: Sequence[InstanceView]) -> bool:
        victims = [run for instance in taken for run in self.movers(instance)]
        stay = [i for i in self.view.instances if i.model == donor.id and i not in taken]
        for sent in product(stay, repeat=len(victims)):
            arrivals = Counter(i.id for i in sent)
            left = [i.max_requests - i.num_requests - arrivals[i.id] for i in stay]
            if all(places >= 0 for places in left) and sum(left) >= donor.num_waiting:
                return True
        return False

    def best(self) -> tuple[int, float] | None:
        """Slots freed (the need at most) and seconds of the best set; `None` if nothing should be done."""
        a = self.view.model(ModelId("a"))
        replicas = [i for i in self.view.instances if i.model == "a"]
        candidates = [i for i in self.view.instances if i.model != "a"]
        possible = [taken for taken in subsets(candidates) if self.possible(taken)]
        quickest_s = min((self.seconds(i) for (i, *more) in possible if not more), default=inf)
        served = sum(0.05 * r.num_remaining <= quickest_s for r in self.view.running if r.model == "a")
        need = a.num_waiting - sum(i.max_requests - i.num_requests for i in replicas) - served
        if need <= 0 or not possible:
            return None
        worths = [
            (-min(need, sum(i.max_requests for i in taken)), sum(map(self.seconds, taken)))
            for taken in possible
        ]
        freed, seconds = min(worths)
        return -freed, seconds


@st.composite
def small_fleets(draw: st.DrawFn) -> FleetView:
    """Up to five instances of a, b and c or EMPTY, up to six requests on them, and some that wait for a."""
    instances = []
    for n in range(draw(st.integers(1, 5))):
        of = draw(st.sampled_from(["b", "b", "a", "c", "b", "a", None]))
        instance = serving(f"e{n}", of) if of else empty(f"e{n}")
        preloaded = ModelId("a") if of != "a" and draw(st.integers(0, 5)) == 0 else None
        instances.append(replace(instance, max_requests=draw(st.integers(1, 3)), preloaded=preloaded))
    places = [i for i in instances if i.model for _ in range(i.max_requests)]
    most = min(6, len(places))
    where = draw(st.permutations(range(len(places))))[: draw(st.integers(most // 2, most))]
    runs = [
        run(
            f"r{n}",
            places[place],
            draw(st.sampled_from([100, 700, 1500])),
            draw(st.sampled_from([2000, 1000, 200, 40, 1])),
        )
        for n, place in enumerate(where)
    ]
    models = [
        model("a", 9, waiting=draw(st.integers(1, 7))),
        model("b", 9, waiting=draw(st.integers(0, 1)), min_replicas=draw(st.integers(0, 1))),
        model("c", 9, min_replicas=draw(st.integers(0, 1))),
    ]
    return seen(instances, models, runs)


@settings(max_examples=300)
@given(small_fleets())
def test_no_other_choice_of_instances_is_better(view: FleetView) -> None:
    tried = Tried(view)
    best = tried.best()
    plan = RULE.plan(view)
    for_a = [action for action in plan if isinstance(action, Swap) and action.model == "a"]  # b comes after
    taken = [view.instance(swap.instance) for swap in for_a]
    if best is None:
        assert taken == []
        return
    freed, seconds = best
    assert sum(i.max_requests for i in taken) >= freed
    assert sum(map(tried.seconds, taken)) == pytest.approx(seconds)
    assert tried.possible(taken)


@given(small_fleets())
def test_every_victim_is_sent_once_to_a_replica_that_stays_and_has_places(view: FleetView) -> None:
    plan = RULE.plan(view)
    swapped = {action.instance: action.model for action in plan if isinstance(action, Swap)}
    sent = Counter(action.destination for action in plan if isinstance(action, Migrate))
    victims = [run.id for i in view.instances if i.id in swapped for run in Tried(view).movers(i)]
    assert sorted(a.request for a in plan if isinstance(a, Migrate)) == sorted(victims)
    models = {run.id: run.model for run in view.running}
    for action in plan:
        if isinstance(action, Migrate):
            destination = view.instance(action.destination)
            assert destination.id not in swapped
            assert destination.model == models[action.request]
            assert destination.num_requests + sent[destination.id] <= destination.max_requests


# ------------------------------------------------------------------ what the fleet has measured


def test_measured_loads_and_unloads_decide_whether_a_busy_replica_is_waited_for() -> None:
    """Free in 5.5 s; e1 is ready in 5.2 s by the store, at 1 GB/s in 11.2 s, unloaded in 5.6 s."""
    busy = small(serving("e3", "a"), 1)
    models = [model("a", 2, waiting=1), model("b", 4)]
    view = seen([E0, E1, E2, busy], models, [*RUNS, run("r4", busy, left=110)])
    slow = replace(view, times=TimesView(load_bytes_per_s=(("disk", 1.0 * GB),)))
    unloaded = replace(view, times=TimesView(unload_s=0.4))
    elsewhere = replace(view, times=TimesView(load_bytes_per_s=(("host", 1.0 * GB),)))
    assert swaps(RULE.plan(view)) == swaps(RULE.plan(elsewhere)) == [("e1", "a")]
    for measured in (slow, unloaded):
        assert RULE.plan(measured) == ()
        assert swaps(replace(RULE, measured=False).plan(measured)) == [("e1", "a")]


def test_an_empty_instance_needs_no_unload() -> None:
    idle = replace(serving("e0", "b"), preloaded=ModelId("a"))
    view = seen([idle, empty("e1")], [model("a", 1, waiting=1), model("b")])
    assert swaps(RULE.plan(view)) == [("e0", "a")]
    assert swaps(RULE.plan(replace(view, times=TimesView(unload_s=3.0)))) == [("e1", "a")]


@given(small_fleets_of_nodes(), st.sampled_from(["move", "evict", "stay"]))
def test_measured_times_that_agree_with_the_costs_change_no_plan(
    view: FleetView, victims: Literal["move", "evict", "stay"]
) -> None:
    rates = tuple({tier.name: tier.bytes_per_s for tier in view.store.tiers}.items())
    rule = StartupTimePlacement(costs=COSTS, victims=victims)
    measured = replace(view, times=TimesView(load_bytes_per_s=rates))
    assert rule.plan(measured) == replace(rule, measured=False).plan(measured) == rule.plan(view)


# ------------------------------------------------------------------ every fleet


@given(fleet_views())
def test_every_action_would_be_begun(view: FleetView) -> None:
    view = replace(view, store=STORE)
    plan = RULE.plan(view)
    assert accepted(view, plan) == tuple(plan)
    for action in plan:
        assert isinstance(action, Swap)
        instance = view.instance(action.instance)
        assert action.model not in instance.cooling_down
        assert not instance.memory_bytes or view.model(action.model).weight_bytes <= instance.memory_bytes


@given(small_fleets())
def test_the_order_of_the_view_does_not_matter(view: FleetView) -> None:
    other = replace(
        view,
        instances=view.instances[::-1],
        models=view.models[::-1],
        running=view.running[::-1],
    )
    assert RULE.plan(other) == RULE.plan(view)


def test_without_news_of_the_store_any_instance_is_as_good() -> None:
    view = replace(seen([empty("e0")], [model("a", 1, waiting=1)]), store=StoreView())
    assert swaps(RULE.plan(view)) == [("e0", "a")]


@pytest.mark.parametrize("deadline_s", [-1.0, inf, nan])
def test_a_senseless_deadline_is_refused(deadline_s: float) -> None:
    with pytest.raises(ConfigError, match=r"^deadline_s is "):
        StartupTimePlacement(deadline_s=deadline_s)


def test_another_fate_of_victims_is_refused() -> None:
    with pytest.raises(ConfigError, match="'move', 'evict' or 'stay'"):
        StartupTimePlacement(victims="ask")  # type: ignore[arg-type]


def test_a_cooling_replica_is_a_replica() -> None:
    """`Cooldown` shows it as swapping to the model that it has: it is full, so no place becomes free."""
    cooling = small(serving("e0", "a", since_s=99.0), 1)
    view = seen([cooling, empty("e1")], [model("a", 2, waiting=1)], [run("r0", cooling)])
    assert swaps(Cooldown(RULE, 5.0).plan(view)) == [("e1", "a")]
