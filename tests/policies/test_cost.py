"""Swaps by cost: waits against what an eviction stops, by measured times, without settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from hotswap import FleetView, InstanceView, ModelView, TimesView
from hotswap.abc import Action, Scheduler, Swap
from hotswap.offline.workloads import log_normal_lengths
from hotswap.policies import CostSwap, ElasticQuota, KeepAliveSwap, LeastLoadedRouter, WeightedLoadSwap
from hotswap.simulation import Cluster, Outcome, Trace, TraceRequest, generate, simulate
from hotswap.simulation.outcome import percentile
from tests.policies.loads import running
from tests.policies.views import empty, fleet, model, serving, swapping_to, swaps, waiting

NOW_S = 100.0
# The store knows no models, so that a load takes ten seconds.
LOAD_S = 10.0


def of(
    instances: Sequence[InstanceView],
    models: Sequence[ModelView],
    waits_s: Sequence[tuple[str, float]],
    *,
    absent_s: float = 0.0,
) -> FleetView:
    """A view of models that last had an instance `absent_s` ago: of those that just had one, losses count."""
    queue = [waiting(name, NOW_S - wait_s) for name, wait_s in waits_s]
    evicted_s = None if absent_s == inf else NOW_S - absent_s
    known = [replace(model, last_evicted_s=evicted_s) for model in models]
    return fleet(instances, known, now_s=NOW_S, waiting=queue)


def plan(view: FleetView) -> list[tuple[str, str]]:
    return swaps(CostSwap().plan(view))


def test_an_instance_without_requests_is_taken_at_once_the_least_recently_used_first() -> None:
    models = [model("a"), model("b"), model("c", 1, waiting=1)]
    idle = [serving("e0", "a", since_s=50.0), serving("e1", "b", since_s=40.0)]
    assert plan(of(idle, models, [("c", 0.0)])) == [("e1", "c")]
    assert plan(of([*idle, empty("e2")], models, [("c", 0.0)])) == [("e2", "c")]


@pytest.mark.parametrize(("wait_s", "planned"), [(39.9, []), (40.1, [("e0", "b")])])
def test_a_swap_is_made_once_waits_have_cost_as_much(wait_s: float, planned: list[tuple[str, str]]) -> None:
    """One request stops for two loads of ten seconds and a turn of 20 s; two wait, and lose as much."""
    models = [model("a", 1), model("b", 2, waiting=2)]
    view = of([serving("e0", "a", 1)], models, [("b", wait_s / 2)] * 2)
    assert plan(view) == planned


def test_more_requests_weigh_more_and_so_do_tokens_to_compute_again() -> None:
    models = [model("a", 2), model("b", 1, waiting=1)]
    both = [serving("e0", "a", 2)]
    assert plan(of(both, models, [("b", 56.0)])) == []
    assert plan(of(both, models, [("b", 57.0)])) == [("e0", "b")]
    slow = replace(of(both, models, [("b", 57.0)]), times=TimesView(unload_s=1.0))
    assert plan(slow) == []  # each of the two swaps takes a second more


def test_a_model_with_other_replicas_loses_less() -> None:
    models = [model("a", 2), model("b", 1, waiting=1)]
    two = [serving("e0", "a", 1), serving("e1", "a", 1)]
    assert plan(of(two, models, [("b", 19.0)])) == []
    assert plan(of(two, models, [("b", 21.0)])) == [("e0", "b")]


@pytest.mark.parametrize(("num_others", "cost_s"), [(1, 80.0), (2, 90.0), (5, 120.0)])
def test_an_eviction_costs_the_turns_of_others_that_wait_and_their_time(
    num_others: int, cost_s: float
) -> None:
    """c would have its turn before a came back: 30 s more. Each of its requests waits for the swap back."""
    models = [model("a", 1), model("b", 1, waiting=1), model("c", num_others, waiting=num_others)]
    others = [("c", 0.0)] * num_others
    wait_s = (cost_s * 4 * LOAD_S) ** 0.5  # one request loses by the square of its wait
    assert plan(of([serving("e0", "a", 1)], models, [("b", wait_s - 0.1), *others])) == []
    assert plan(of([serving("e0", "a", 1)], models, [("b", wait_s + 0.1), *others])) == [("e0", "b")]


def test_one_that_has_waited_long_comes_before_more_that_have_not() -> None:
    """60 s of three requests are lost as they are; one that has waited for 59 s has lost 87."""
    models = [model("a"), model("b", 3, waiting=3), model("c", 1, waiting=1)]
    assert plan(of([serving("e0", "a")], models, [("c", 59.0), *[("b", 20.0)] * 3])) == [("e0", "c")]
    assert plan(of([serving("e0", "a")], models, [("c", 29.0), *[("b", 20.0)] * 3])) == [("e0", "b")]


def beside(wait_s: float, *, num_remaining: int = 10_000, here_s: float = 0.0) -> list[Swap]:
    """Plan for a request that waits for b, beside one of a that runs on the only instance."""
    models = [model("a", 1), model("b", 1, waiting=1)]
    since_s = NOW_S - here_s
    one = replace(running("r", "e0"), num_tokens=0, num_remaining=num_remaining, since_s=since_s)
    view = replace(of([serving("e0", "a", 1)], models, [("b", wait_s)]), running=(one,))
    return [action for action in CostSwap().plan(view) if isinstance(action, Swap)]


def test_requests_that_end_soon_are_drained_for_as_long_as_that_costs_less_than_to_evict_them() -> None:
    """Ten tokens take 0.2 s, as long as b's request then has waited; 40 s are what an eviction costs."""
    assert beside(0.19, num_remaining=10) == []
    (swap,) = beside(0.21, num_remaining=10)
    assert 0.2 < swap.deadline_s <= 40.0
    assert beside(39.9) == []
    (swap,) = beside(40.1)
    assert swap.deadline_s == 0.0


# Beside two, one comes in 20.2 s: a hundredth of one in 0.2 s, which waits for 40 s and half of that.
COMES = 0.2 / 20.2 * 40.1


@pytest.mark.parametrize(
    ("num_here", "weight", "num_replicas", "prefill_s", "cost_s", "deadline_s"),
    [
        (1, 1.0, 1, 0.0, 0.2, 25.6),  # of which the double costs more than the 40 s of an eviction
        (2, 1.0, 1, 0.0, 0.2 + COMES, 12.8),
        (2, 3.0, 1, 0.0, 0.2 + 3 * COMES, 25.6),
        (2, 1.0, 2, 0.0, 0.2 + COMES / 2, 12.8),
        (2, 1.0, 1, 20.0, 0.2 + COMES, 25.6),  # those that are drained are not computed again
    ],
)
def test_a_drain_costs_the_waits_of_those_that_come_in_the_meantime(
    num_here: int, weight: float, num_replicas: int, prefill_s: float, cost_s: float, deadline_s: float
) -> None:
    num_tokens = int(prefill_s / TimesView().prefill_token_s / num_here)
    names = [f"r{number}" for number in range(num_here)]
    runs = [replace(running(name, "e0"), num_tokens=num_tokens, since_s=NOW_S - 20.0) for name in names]
    models = [model("a", num_here, w=weight), model("b", 1, waiting=1)]
    others = [serving(f"e{number}", "a", 1, since_s=NOW_S) for number in range(1, num_replicas)]

    def planned(wait_s: float) -> list[Action]:
        view = of([serving("e0", "a", num_here), *others], models, [("b", wait_s)])
        return list(CostSwap().plan(replace(view, running=tuple(runs))))

    assert planned(cost_s - 0.01) == []
    (swap,) = planned(cost_s + 0.01)
    assert isinstance(swap, Swap)
    assert swap.deadline_s == pytest.approx(deadline_s)


def test_requests_that_have_just_come_say_nothing_of_how_many_will() -> None:
    runs = tuple(replace(running(name, "e0"), num_tokens=0, since_s=NOW_S) for name in "rs")
    view = of([serving("e0", "a", 2)], [model("a", 2), model("b", 1, waiting=1)], [("b", 0.21)])
    assert plan(replace(view, running=runs)) == [("e0", "b")]


@pytest.mark.parametrize(
    ("wait_s", "absent_s", "num_others", "planned"),
    [
        (41.0, 98.0, 0, []),
        (41.0, 99.0, 0, [("e0", "b")]),  # 42 s are lost, and 160 s to evict four: 2.05 s a second since then
        (41.0, inf, 1, []),  # another waits as well
        (39.9, inf, 0, []),  # which is under four swap times
        (40.1, inf, 0, [("e0", "b")]),
    ],
)
def test_a_model_that_is_rarely_asked_for_waits_little_longer_than_four_swaps(
    wait_s: float, absent_s: float, num_others: int, planned: list[tuple[str, str]]
) -> None:
    models = [model("a", 4), model("b", 1, waiting=1), model("c", num_others, waiting=num_others)]
    waits = [("b", wait_s), *[("c", 0.0)] * num_others]
    view = of([serving("e0", "a", 4)], models, waits, absent_s=absent_s)
    assert plan(view) == planned
    steady = replace(view, models=of([], models, [], absent_s=50.0).models)
    assert plan(steady) == []  # requests for it come often, so others will share its turn


@pytest.mark.parametrize(
    ("num_waiting", "weight", "enough_s"),
    [(1, 1.0, (42.0 + 160.0) / 2.05), (2, 1.0, (84.0 + 160.0) / 4.1), (1, 2.0, (84.0 + 160.0) / 4.1)],
)
def test_rare_requests_count_by_their_number_and_by_their_weight(
    num_waiting: int, weight: float, enough_s: float
) -> None:
    """Each that has waited for 41 s has lost 42 s, and loses 2.05 s in the next one; evictions cost 160 s."""
    models = [model("a", 4), model("b", num_waiting, waiting=num_waiting, w=weight)]
    for absent_s, planned in ((enough_s - 1.0, []), (enough_s + 1.0, [("e0", "b")])):
        view = of([serving("e0", "a", 4)], models, [("b", 41.0)] * num_waiting, absent_s=absent_s)
        assert plan(view) == planned


@pytest.mark.parametrize(
    ("wait_s", "absent_s", "ends"),
    [(41.0, 99.0, ", once in 99 s"), (41.0, inf, ", the first time"), (81.0, 99.0, "s would be lost")],
)
def test_the_reason_says_by_which_rule_a_model_has_its_turn(
    wait_s: float, absent_s: float, ends: str
) -> None:
    models = [model("a", 4), model("b", 1, waiting=1)]
    (swap,) = CostSwap().plan(of([serving("e0", "a", 4)], models, [("b", wait_s)], absent_s=absent_s))
    assert isinstance(swap, Swap)
    assert swap.reason.endswith(ends)


def test_a_rare_model_is_alone_once_the_others_have_their_instances() -> None:
    models = [model("a", 4), model("b", 1, waiting=1), model("c", 2, waiting=2)]
    waits = [("b", 41.0), *[("c", 50.0)] * 2]
    view = of([serving("e0", "a", 4), empty("e1")], models, waits, absent_s=inf)
    assert plan(view) == [("e1", "c"), ("e0", "b")]


def test_a_swap_that_takes_no_time_divides_nothing_by_zero() -> None:
    models = [model("a", 1), model("b", 1, waiting=1)]
    view = of([serving("e0", "a", 1, preloaded="b")], models, [("b", 1e-6)], absent_s=inf)
    assert plan(view) == []
    assert plan(of(view.instances, models, [("b", 0.1)], absent_s=inf)) == [("e0", "b")]


@pytest.mark.parametrize("absent_s", [99.0, 1e6, inf])
def test_a_rare_model_that_failed_to_load_goes_by_what_is_lost_alone(absent_s: float) -> None:
    """Each attempt may evict four requests for nothing, as long as its weights cannot be read."""
    models = [model("a", 4), model("b", 1, waiting=1, failed=1)]
    first_rule = (2 * 160.0 * 4 * LOAD_S) ** 0.5  # of which half is lost
    for wait_s, planned in ((first_rule - 0.1, []), (first_rule + 0.1, [("e0", "b")])):
        assert plan(of([serving("e0", "a", 4)], models, [("b", wait_s)], absent_s=absent_s)) == planned


@pytest.mark.parametrize(
    ("here_s", "num_remaining", "cost_s"),
    [(20.0, 10_000, 40.0), (80.0, 10_000, 10.0), (99.0, 50_000, 40 * 40 / 198), (90.0, 3_500, 10.0)],
)
def test_a_stop_counts_by_its_share_of_the_whole_time_of_a_request(
    here_s: float, num_remaining: int, cost_s: float
) -> None:
    """40 s are all of a request of 40 s and a quarter of one of 160 s: twice its stay, or by its bound."""
    assert beside(cost_s - 0.1, num_remaining=num_remaining, here_s=here_s) == []
    assert len(beside(cost_s + 0.1, num_remaining=num_remaining, here_s=here_s)) == 1


def test_a_turn_lasts_for_two_swaps() -> None:
    models = [model("a", 1), model("b", 1, waiting=1)]
    young, old = serving("e0", "a", 1, since_s=81.0), serving("e0", "a", 1, since_s=79.0)
    assert plan(of([young], models, [("b", 90.0)])) == []
    assert plan(of([old], models, [("b", 90.0)])) == [("e0", "b")]


def test_a_busy_model_gets_another_replica_and_waits_for_one_that_is_coming() -> None:
    models = [model("a", 9, waiting=4), model("b")]
    busy, idle = replace(serving("e0", "a", 5), max_requests=5), serving("e1", "b")
    assert plan(of([busy, idle], models, [("a", 0.1)] * 4)) == [("e1", "a")]
    coming = swapping_to("e2", "a", of="b")
    assert plan(of([busy, idle, coming], models, [("a", 0.1)] * 4)) == []


@pytest.mark.parametrize(
    ("queue_s", "here_s", "others", "planned"),
    [
        (10.1, 5.1, [serving("e1", "b")], [("e1", "a")]),
        (10.1, 5.1, [empty("e1")], [("e1", "a")]),
        (9.9, 5.1, [serving("e1", "b")], []),  # a swap takes ten seconds
        (10.1, 4.9, [serving("e1", "b")], []),  # two requests have waited for less than that in all
        (10.1, 5.1, [serving("e1", "b", 1)], []),  # for what comes later nothing is evicted
        (10.1, 5.1, [serving("e1", "b"), serving("e2", "a")], []),  # which has no queue
        (10.1, 5.1, [serving("e1", "b"), swapping_to("e2", "a", of="b")], []),
    ],
)
def test_prompts_that_queue_for_longer_than_a_swap_get_an_instance_without_requests(
    queue_s: float, here_s: float, others: list[InstanceView], planned: list[tuple[str, str]]
) -> None:
    busy = replace(serving("e0", "a", 3), num_prefill_tokens=int(queue_s / TimesView().prefill_token_s))
    models = [model("a", 3), model("b", sum(i.num_requests for i in others))]
    queued = [
        running(name, on="e0", begun=name == "old", since_s=NOW_S - here_s) for name in ("old", "r", "s")
    ]
    view = replace(fleet([busy, *others], models, now_s=NOW_S), running=tuple(queued))
    assert plan(view) == planned


def test_one_more_replica_at_a_time_and_none_beside_those_for_requests_that_find_no_place() -> None:
    busy = replace(serving("e0", "a", 3), num_prefill_tokens=400_000)
    queued = tuple(running(name, on="e0", begun=False, since_s=0.0) for name in "rst")
    idle = [empty("e1"), empty("e2")]
    view = replace(fleet([busy, *idle], [model("a", 3)], now_s=NOW_S), running=queued)
    assert plan(view) == [("e1", "a")]
    waits = replace(view, models=(model("a", 4, waiting=1),), waiting=(waiting("a", 0.0),))
    assert plan(waits) == [("e1", "a")]


def test_models_that_fail_to_load_fall_behind() -> None:
    models = [model("a"), model("b", 1, waiting=1, failed=3), model("c", 1, waiting=1)]
    view = of([serving("e0", "a")], models, [("b", 20.0), ("c", 10.0)])
    assert plan(view) == [("e0", "c")]


# ---------------------------------------------------------------------- in time


def played(trace: Trace, scheduler: Scheduler, num_engines: int) -> Outcome:
    cluster = Cluster(num_engines=num_engines, disk_bytes_per_s=50e9)
    router = LeastLoadedRouter()
    return simulate(trace, cluster, router=router, scheduler=scheduler, interval_s=0.5, driver="events")


def two_models(num_tokens: int, every_s: float) -> Trace:
    """One engine's worth of requests for a that never pause, and one for b."""
    steady = [
        TraceRequest(arrive_s=every_s * n, model="a", prompt_tokens=200, output_tokens=num_tokens)
        for n in range(int(120 / every_s))
    ]
    return Trace.of(
        [*steady, TraceRequest(arrive_s=20.0, model="b", prompt_tokens=200, output_tokens=20)], "b waits"
    )


def test_a_request_beside_a_busy_model_waits_no_longer_than_the_stated_bound() -> None:
    outcome = played(two_models(400, 1.0), CostSwap(), 1)
    (b,) = (request for request in outcome.requests if request.model == "b")
    swap_s = max(swap.downtime_s for swap in outcome.swaps)
    most = 6  # requests of a at once, and their prefill is a second at most
    assert b.ttft_s <= 2 * most * (4 * swap_s + 1.0) + 0.5 + swap_s
    patient = played(two_models(400, 1.0), KeepAliveSwap(), 1)
    (starved,) = (request for request in patient.requests if request.model == "b")
    assert b.ttft_s < starved.ttft_s / 3


def test_requests_with_short_answers_end_where_they_are() -> None:
    """Two models share an engine, and each answer of a few tokens ends long before an eviction would pay."""
    requests = [
        TraceRequest(arrive_s=0.5 * n, model="ab"[n % 2], prompt_tokens=200, output_tokens=5)
        for n in range(100)
    ]
    outcome = played(Trace.of(requests, "short answers"), CostSwap(), 1)
    assert len(outcome.swaps) > 10
    assert not any(swap.num_evicted for swap in outcome.swaps)


def test_a_third_model_that_is_rarely_asked_for_waits_no_longer_than_under_other_schedulers() -> None:
    """Two models keep two engines busy, sixteen requests a second; others lose no more than they do there."""
    busy = generate(
        1,
        models={"a": 1.0, "b": 1.0},
        rate_per_s=16.0,
        seconds=120.0,
        prompt_tokens=log_normal_lengths(400),
        output_tokens=log_normal_lengths(150, sigma=0.8),
    ).requests
    rare = [
        TraceRequest(arrive_s=30.0 + 20.0 * n, model="c", prompt_tokens=200, output_tokens=50)
        for n in range(4)
    ]
    trace = Trace.of([*busy, *rare], "third")

    def waits_s(scheduler: Scheduler) -> tuple[float, float]:
        outcome = played(trace, scheduler, 2)
        c = max(request.ttft_s for request in outcome.requests if request.model == "c")
        return c, percentile([request.ttft_s for request in outcome.requests if request.model != "c"], 99)

    (c_s, others_s), weighted, quota = map(waits_s, (CostSwap(), WeightedLoadSwap(), ElasticQuota()))
    assert c_s <= weighted[0]
    assert c_s <= 6.5 * quota[0]
    assert others_s <= min(weighted[1], quota[1])


def test_the_default_needs_no_arguments() -> None:
    outcome = simulate(two_models(50, 2.0), Cluster(num_engines=1), driver="events")
    assert outcome.settings["scheduler"] == "CostSwap()"
    assert not any(request.error for request in outcome.requests)
