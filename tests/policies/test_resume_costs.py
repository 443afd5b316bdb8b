"""What is stored of requests is copied, not computed: policies count it so, and as before without a store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotswap import InstanceId, ModelId, RequestId, RunningView, TimesView, WaitingView
from hotswap.policies import CostSwap, ElasticQuota
from hotswap.policies.resume_costs import resume_s
from tests.policies.views import fleet, model, serving, swaps, waiting

RUN = RunningView(id=RequestId("r"), model=ModelId("a"), instance=InstanceId("e0"), num_tokens=8000)
WAIT = WaitingView(id=RequestId("w"), model=ModelId("b"), num_tokens=4000)
TIMES = TimesView(prefill_start_s=0.1, prefill_token_s=1e-3, restore_token_s=1e-5)


def test_tokens_that_are_stored_are_copied_and_the_others_computed() -> None:
    assert resume_s(TIMES, [RUN, WAIT]) == TIMES.prefill_s(12_000)
    stored = replace(WAIT, stored_tokens=3000)
    assert resume_s(TIMES, [stored]) == pytest.approx(0.1 + 1.0 + 0.03)


def test_of_a_running_request_as_much_is_expected_as_evicted_ones_have_found() -> None:
    assert resume_s(replace(TIMES, kept_share=0.75), [RUN]) == pytest.approx(0.1 + 2.0 + 0.06)
    assert resume_s(TIMES, [replace(RUN, stored_tokens=6000)]) == pytest.approx(0.1 + 2.0 + 0.06)


@pytest.mark.parametrize("rule", [ElasticQuota(), ElasticQuota(prefill_token_s=1e-3)])
def test_turns_are_longer_by_copies_in_place_of_prefills(rule: ElasticQuota) -> None:
    models = [model("a", 1), model("b", 1, waiting=1)]
    view = replace(fleet([serving("e0", "a", 1)], models), running=(RUN,), waiting=(WAIT,), times=TIMES)
    kept = replace(
        view,
        waiting=(replace(WAIT, stored_tokens=3999),),
        times=replace(TIMES, kept_share=1.0),
    )
    computed_s, copied_s = rule.quotas_s(view), rule.quotas_s(kept)
    for name, num_tokens in (("a", 8000), ("b", 4000)):
        assert copied_s[ModelId(name)] < computed_s[ModelId(name)] - 0.9e-3 * num_tokens


def test_an_eviction_costs_less_where_the_evicted_requests_are_copied() -> None:
    """A request of 8,000 tokens is computed for eight seconds, or copied in a tenth of one."""
    models = [model("a", 1), model("b", 1, waiting=1)]
    view = fleet([serving("e0", "a", 1)], models, now_s=100.0, waiting=[waiting("b", 20.0)])
    long = replace(RUN, num_remaining=1 << 20, since_s=10.0)
    view = replace(view, running=(long,), times=TIMES)

    def first_swap_s(kept_share: float) -> int:
        times = replace(TIMES, kept_share=kept_share)
        return next(
            waited
            for waited in range(1, 99)
            if swaps(CostSwap().plan(replace(view, times=times, waiting=(waiting("b", 100.0 - waited),))))
        )

    assert first_swap_s(1.0) < first_swap_s(0.0)
