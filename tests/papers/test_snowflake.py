"""Chan, Zhang, Wang, "Model Hotswapping", Snowflake, 2024: the examples of the post and what it claims."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hotswap import FleetView, InstanceState
from hotswap.policies import WeightedLoadSwap
from tests.policies.views import began, empty, fleet, model, served, serving, swaps


def carried_out(rule: WeightedLoadSwap, view: FleetView) -> tuple[FleetView, list[int]]:
    """Plan and load until the rule plans nothing; the fleet then, and the swaps of each interval."""
    periods: list[int] = []
    while plan := rule.plan(view):
        periods.append(len(plan))
        view = served(began(view, plan))
    return view, periods


def replicas(view: FleetView) -> dict[str, int]:
    return {m.id: len(view.replicas(m.id)) for m in view.models}


@given(st.integers(12, 400), st.sampled_from([4, 8, 16]))
def test_three_times_less_throughput_is_three_times_the_replicas(p: int, num_instances: int) -> None:
    """The post: Model A's workload equals Model B's, "yet Model B has 3x less throughput, so we may want to
    allocate more replicas for Model B to achieve equal throughput". In numbers: three quarters of the fleet,
    with at least as many requests as these replicas, since no model gets more replicas than requests.
    """
    view = fleet([empty(f"e{n}") for n in range(num_instances)], [model("a", p), model("b", p, w=3.0)])
    after, _ = carried_out(WeightedLoadSwap(t1=0, t2=1, b=1.0, sigmas=0), view)
    assert replicas(after) == {"a": num_instances // 4, "b": 3 * num_instances // 4}


def test_a_model_of_little_traffic_gives_replicas_to_one_of_much() -> None:
    """The post: "Swap out models with low GPU utilization for those with higher workloads"."""
    view = fleet([serving(f"e{n}", "a" if n else "b") for n in range(4)], [model("a", 1), model("b", 60)])
    after, _ = carried_out(WeightedLoadSwap(t1=8, t2=6, b=2.0, sigmas=0), view)
    assert replicas(after) == {"a": 1, "b": 3}


def test_no_swaps_at_maximum_capacity() -> None:
    """t2 is "set just high enough so that models are not swapping at max capacity"."""
    view = fleet([serving(f"e{n}", "ab"[n % 2]) for n in range(8)], [model("a", 900), model("b", 40)])
    assert swaps(WeightedLoadSwap(t1=8, t2=10, b=2.0, sigmas=0).plan(view)) == []
    assert swaps(WeightedLoadSwap(t1=8, t2=10.5, b=2.0, sigmas=0).plan(view)) != []


def test_failover_restores_the_minimum_in_one_period() -> None:
    """The post: "If the minimum number [...] is not met, we quickly identify a candidate model"."""
    models = [model("a", 3, min_replicas=2), model("b", 2, min_replicas=1), model("c", 4)]
    view = fleet([serving(f"e{n}", of) for n, of in enumerate("aabcc")], models)
    lost = replace(view.instances[1], state=InstanceState.LOST, model=None)
    view = replace(view, instances=(view.instances[0], lost, *view.instances[2:]))
    after, periods = carried_out(WeightedLoadSwap(t1=8, t2=6, b=2.0, sigmas=0), view)
    assert periods == [1]
    assert replicas(after) == {"a": 2, "b": 1, "c": 1}


@given(st.integers(2, 8), st.integers(2, 8), st.integers(1, 6))
def test_a_tenfold_burst_is_met_in_one_period_and_then_all_is_quiet(
    num_a: int, num_b: int, each: int
) -> None:
    """With a fixed number of engines the loads meet: no further move would bring them closer."""
    rule = WeightedLoadSwap(t1=each, t2=1000, b=1.0, sigmas=0)
    instances = [serving(f"e{n}", "a" if n < num_a else "b") for n in range(num_a + num_b)]
    before = fleet(instances, [model("a", each * num_a), model("b", each * num_b)])
    assert rule.plan(before) == ()
    burst = replace(before, models=(model("a", 10 * each * num_a), model("b", each * num_b)))
    after, periods = carried_out(rule, burst)
    assert len(periods) == 1
    a, b = replicas(after)["a"], replicas(after)["b"]
    assert a + b == num_a + num_b
    one_more_for_a = each * num_b / (b - 1) if b > 1 else float("inf")
    assert each * num_b / b <= 10 * each * num_a / a < one_more_for_a * (a + 1) / a


@given(st.integers(2, 8), st.integers(1, 6))
def test_the_posts_loop_of_one_swap_a_period_ends_at_the_same_place(num_each: int, each: int) -> None:
    rule = WeightedLoadSwap(t1=each, t2=1000, b=1.0, sigmas=0)
    instances = [serving(f"e{n}", "ab"[n % 2]) for n in range(2 * num_each)]
    view = fleet(instances, [model("a", 10 * each * num_each), model("b", each * num_each)])
    at_once, _ = carried_out(rule, view)
    one_by_one, periods = carried_out(replace(rule, max_swaps=1), view)
    assert set(periods) <= {1}
    assert replicas(one_by_one) == replicas(at_once)
