"""Least expected time to first token: what it counts, and that the least of all is taken."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import (
    AdapterId,
    FleetView,
    InstanceId,
    InstanceState,
    InstanceView,
    ModelId,
    Request,
    Residency,
    StoreView,
    TierView,
    TimesView,
    WaitingView,
)
from hotswap.errors import ConfigError
from hotswap.policies import LeastTimeRouter
from hotswap.policies.routers.candidates import candidates
from hotswap.testing.strategies import routings
from tests.policies.views import empty, fleet, many_hosts, model, request, serving

# A thousand tokens a second, so that a token is a millisecond.
ROUTER = LeastTimeRouter(
    prefill_tokens_per_s=1000, step_tokens=100, request_s=0.001, adapter_s=0.015, blocks_s=1.0, swap_s=0.2
)


def busy(name: str, *, prefill: int = 0, running: int = 0, unseen: int = 0) -> InstanceView:
    """An instance that has so much to compute, so many decoding, and so many more on their way to it."""
    instance = serving(name, "a", running + unseen)
    return replace(instance, num_running=running, num_prefill_tokens=prefill)


def holding(instance: InstanceView, adapter: str) -> InstanceView:
    return replace(instance, adapters=(AdapterId(adapter),))


def route(*instances: InstanceView, adapter: str | None = None, tokens: int = 10) -> str | None:
    return ROUTER.route(request("a", adapter=adapter, tokens=tokens), fleet(instances, [model("a")]))


def expected_s(
    instance: InstanceView, *, adapter: str | None = None, tokens: int = 10, store: StoreView | None = None
) -> float:
    view = replace(fleet([instance], [model("a")]), store=store or StoreView())
    return ROUTER.expected_s(request("a", adapter=adapter, tokens=tokens), instance, view)


# ------------------------------------------------------------------ the sum


@given(routings())
def test_no_candidate_would_answer_sooner(routing: tuple[Request, FleetView]) -> None:
    asked, view = routing
    answer = ROUTER.route(asked, view)
    able = [i for i in view.serving(asked.model) if i.max_tokens is None or asked.num_tokens < i.max_tokens]
    if fitting := [i for i in able if not i.swapping] or able:
        seconds = {i.id: ROUTER.expected_s(asked, i, view) for i in fitting}
        assert answer is not None
        assert seconds[answer] == min(seconds.values())


@given(
    many_hosts(),
    st.integers(1, 700),
    st.sampled_from([None, "x"]),
    st.builds(
        LeastTimeRouter,
        prefill_tokens_per_s=st.sampled_from([1000.0, 20_000.0, 1e6]),
        step_tokens=st.sampled_from([16, 100, 2048]),
        request_s=st.sampled_from([0.0, 0.0002, 0.1]),
        blocks_s=st.sampled_from([0.0, 0.01, 1.0]),
    ),
)
def test_none_of_many_candidates_would_answer_sooner(
    hosts: list[InstanceView], tokens: int, adapter: str | None, router: LeastTimeRouter
) -> None:
    asked, view = request("a", adapter=adapter, tokens=tokens), fleet(hosts, [model("a")])
    answer = router.route(asked, view)
    seconds = {i.id: router.expected_s(asked, i, view) for i in candidates(asked, view)}
    assert (answer is None) == (not seconds)
    if answer is not None:
        assert seconds[answer] == pytest.approx(min(seconds.values()), rel=1e-8)


def test_what_is_summed() -> None:
    assert expected_s(busy("e0")) == pytest.approx(0.010)
    assert expected_s(busy("e0", prefill=80)) == pytest.approx(0.090)
    assert expected_s(busy("e0", prefill=80, running=5)) == pytest.approx(0.090 + 0.005)
    assert expected_s(busy("e0", prefill=95, running=5)) == pytest.approx(0.105 + 2 * 0.005)  # two steps
    assert expected_s(busy("e0", unseen=2)) == pytest.approx(0.030)
    assert expected_s(busy("e0"), adapter="x") == pytest.approx(0.025)
    assert expected_s(holding(busy("e0"), "x"), adapter="x") == pytest.approx(0.010)
    blocks = replace(busy("e0"), num_kv_blocks=10, num_free_kv_blocks=1)
    assert expected_s(blocks, tokens=16) == pytest.approx(0.016)
    assert expected_s(blocks, tokens=17) == pytest.approx(1.017)


def test_one_long_prompt_weighs_more_than_many_decodes() -> None:
    assert route(busy("e0", prefill=5000, running=1), busy("e1", running=20)) == "e1"
    assert route(busy("e0", prefill=10, running=1), busy("e1", running=20)) == "e0"


def test_an_adapter_is_worth_what_its_load_takes() -> None:
    assert route(busy("e0"), holding(busy("e1", prefill=14), "x"), adapter="x") == "e1"
    assert route(busy("e0"), holding(busy("e1", prefill=16), "x"), adapter="x") == "e0"
    assert route(busy("e0"), holding(busy("e1", prefill=14), "x")) == "e0"


def test_a_burst_that_no_engine_has_seen_yet_is_spread() -> None:
    loads = [0, 0, 0]
    for _ in range(30):
        answer = route(*[busy(f"e{number}", unseen=load) for number, load in enumerate(loads)])
        assert answer is not None
        loads[int(answer[1:])] += 1
    assert loads == [10, 10, 10]


def test_ties_go_to_the_fewest_requests_then_the_smaller_id() -> None:
    waits = replace(busy("e0"), num_requests=1, num_waiting=1)  # nothing to compute, and yet one more
    assert route(waits, busy("e2"), busy("e1")) == "e1"


# ------------------------------------------------------------------ tokens that need not be computed


def returning(
    *instances: InstanceView, tokens: int = 1000, stored: int = 0, copy_s: float = 0.0
) -> tuple[Request, FleetView]:
    """A request that left `e0` ten seconds ago with so many tokens, of which so many are stored."""
    asked = replace(request("a", tokens=tokens - 1), generated=(1,))
    waits = WaitingView(
        id=asked.id,
        model=asked.model,
        num_tokens=tokens,
        stored_tokens=stored,
        waiting_since_s=90.0,
        last_instance=InstanceId("e0"),
    )
    times = TimesView(restore_token_s=copy_s)
    return asked, replace(fleet(instances, [model("a")], now_s=100.0), waiting=(waits,), times=times)


def keeping(instance: InstanceView, since_s: float = 80.0) -> InstanceView:
    return replace(instance, kept_since_s=since_s)


def test_a_request_goes_back_to_its_blocks_unless_that_takes_longer_than_computing_them() -> None:
    for prefill, answer in ((0, "e0"), (998, "e0"), (1000, "e1")):
        assert ROUTER.route(*returning(keeping(busy("e0", prefill=prefill)), busy("e1"))) == answer
    # Blocks of those that left at the time have been given to others, or the engine does not tell.
    for last in (keeping(busy("e0", prefill=1), 95.0), busy("e0", prefill=1)):
        assert ROUTER.route(*returning(last, busy("e1"))) == "e1"
    # The same of a request without a token, of which no instance has anything.
    asked, view = returning(keeping(busy("e0", prefill=1)), busy("e1"))
    assert ROUTER.route(replace(asked, generated=()), view) == "e1"
    assert ROUTER.route(asked, replace(view, waiting=())) == "e1"


def test_a_burst_goes_back_where_each_computes_one_token() -> None:
    for unseen, answer in ((998, "e0"), (1000, "e1")):
        last = replace(keeping(busy("e0", unseen=unseen)), max_requests=2000)
        assert ROUTER.route(*returning(last, busy("e1"))) == answer


def test_it_goes_back_only_where_it_could_go_at_all() -> None:
    kept = keeping(busy("e0"))
    for closed in (
        replace(kept, model=ModelId("b")),
        replace(kept, draining=True),
        replace(kept, max_requests=0),
        replace(kept, swapping=True, target=ModelId("b")),
        replace(kept, num_kv_blocks=10, request_kv_blocks=10),
    ):
        assert ROUTER.route(*returning(closed, busy("e1"))) == "e1"
    assert ROUTER.route(*returning(busy("e1"))) == "e1", "it is gone"


def test_stored_tokens_are_copied_if_that_is_sooner() -> None:
    last, other = keeping(busy("e0")), busy("e1", running=5)

    def seconds(instance: InstanceView, stored: int, copy_s: float) -> float:
        asked, view = returning(last, other, stored=stored, copy_s=copy_s)
        return ROUTER.expected_s(asked, instance, view)

    assert seconds(other, 0, 1e-5) == pytest.approx(1.0 + 10 * 0.005)
    assert seconds(other, 900, 1e-5) == pytest.approx(0.1 + 0.009 + 0.005)  # ten steps are one
    assert seconds(other, 900, 1e-2) == pytest.approx(1.0 + 10 * 0.005)
    assert seconds(other, 1000, 0.0) == pytest.approx(0.001 + 0.005), "the last token is always computed"
    assert seconds(last, 900, 1e-5) == pytest.approx(0.001), "nothing is copied to where the blocks are"
    turned = replace(last, model=ModelId("b"))
    store = StoreView(
        tiers=(TierView(name="host", bytes_per_s=1e9),),
        residency=(Residency(model=ModelId("a"), tier="host", size_bytes=10**9),),
    )
    asked, view = returning(turned, stored=900, copy_s=1e-5)
    assert ROUTER.expected_s(asked, turned, replace(view, store=store)) == pytest.approx(1.2 + 0.1 + 0.009)


@pytest.mark.parametrize("count", [3, 12], ids=["few", "many"])
def test_of_instances_that_are_as_soon_one_on_the_node_of_the_blocks_is_chosen(count: int) -> None:
    def routed(
        node: str, *, copy_s: float = 1e-5, prefill: int = 0, near: InstanceView | None = None
    ) -> str | None:
        others = [replace(busy(f"e{at:02}"), node=f"n{at % 2}") for at in range(1, count)]
        last = near or replace(busy("z", prefill=prefill), node="n9")
        asked, view = returning(*others, last, stored=900, copy_s=copy_s)
        return ROUTER.route(asked, replace(view, waiting=(replace(view.waiting[0], stored_node=node),)))

    assert routed("") == routed("n7") == routed("n1") == "e01"
    assert routed("n0") == "e02"
    assert routed("n9") == "z"
    assert routed("n9", prefill=1) == "e01", "it is later there"
    assert routed("n9", copy_s=1.0) == "e01", "they are sooner computed"
    assert routed("n9", near=replace(busy("z"), node="n9", draining=True)) == "e01"


@given(routings(), st.integers(0, 200), st.sampled_from([0.0, 1e-5, 1.0]), st.floats(0, 200), st.booleans())
def test_no_candidate_would_answer_a_returning_request_sooner(
    routing: tuple[Request, FleetView], stored: int, copy_s: float, left_s: float, has_tokens: bool
) -> None:
    first, view = routing
    asked = replace(first, generated=(1,) if has_tokens else ())
    for last in (None, *(instance.id for instance in view.instances)):
        waits = WaitingView(
            id=asked.id,
            model=asked.model,
            num_tokens=asked.num_tokens,
            stored_tokens=stored,
            stored_node="" if last is None else view.instance(last).node,
            waiting_since_s=left_s,
            last_instance=last,
        )
        shown = replace(view, waiting=(waits,), times=TimesView(restore_token_s=copy_s))
        answer = ROUTER.route(asked, shown)
        seconds = {i.id: ROUTER.expected_s(asked, i, shown) for i in candidates(asked, shown)}
        assert (answer is None) == (not seconds)
        if answer is not None:
            assert seconds[answer] == pytest.approx(min(seconds.values()), rel=1e-8)


# ------------------------------------------------------------------ the order of the multi-model post


def test_the_order_of_the_post_comes_out_in_its_seconds() -> None:
    """Model and adapter 0, model 15 ms, warm 2.5 s, cold 23 s: 140 GB over 55 GB/s and over 6.1 GB/s."""
    size_bytes = 140_000_000_000
    tiers = (TierView(name="host", bytes_per_s=55e9), TierView(name="disk", bytes_per_s=6.1e9))
    cold = StoreView(
        tiers=tiers, residency=(Residency(model=ModelId("a"), tier="disk", size_bytes=size_bytes),)
    )
    warm = replace(cold, residency=(replace(cold.residency[0], tier="host"), *cold.residency))
    router = replace(ROUTER, swap_s=0.0, prefill_tokens_per_s=inf)

    def seconds(instance: InstanceView, store: StoreView) -> float:
        view = replace(fleet([instance], [model("a"), model("b")]), store=store)
        return router.expected_s(request("a", adapter="x"), instance, view)

    assert seconds(holding(busy("e0"), "x"), cold) == 0
    assert seconds(busy("e0"), cold) == pytest.approx(0.015)
    assert seconds(serving("e0", "b"), warm) == pytest.approx(2.5, abs=0.1)
    assert seconds(empty("e0"), cold) == pytest.approx(23, abs=0.1)


def test_where_a_swap_is_needed_it_takes_what_the_store_says() -> None:
    assert expected_s(empty("e0", preloaded="a")) == pytest.approx(0.210)
    assert expected_s(empty("e0")) == inf  # the store does not have it
    lost = replace(empty("e0", preloaded="a"), state=InstanceState.LOST)
    assert expected_s(lost) == inf
    assert route(empty("e0", preloaded="a")) is None  # which is not the router's to ask for


@pytest.mark.parametrize(
    "values",
    [
        {"prefill_tokens_per_s": 0},
        {"step_tokens": 0},
        {"request_s": -1.0},
        {"adapter_s": inf},
        {"blocks_s": float("nan")},
        {"swap_s": -0.1},
    ],
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        LeastTimeRouter(**values)
