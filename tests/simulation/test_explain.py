"""`hotswap plan`: the plan is the scheduler's own, and candidates are priced from the view."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hotswap import (
    AdapterId,
    AdapterView,
    FleetView,
    InstanceId,
    InstanceState,
    ModelId,
    RequestId,
    Residency,
    RunningView,
    StoreView,
    TierView,
    TimesView,
    WaitingView,
)
from hotswap.cli import main
from hotswap.offline import dump_view, load_view
from hotswap.policies import AdapterPool, KeepAliveSwap, StaticPinning, WeightedLoadSwap
from hotswap.simulation import explain
from tests.policies.views import empty, fleet, model, serving

RULE = WeightedLoadSwap(t1=1, t2=50, b=1.5, sigmas=0)
GB = 10**9


def view() -> FleetView:
    """One model waits; `e0` is busier than `e1`, `e2` is lost."""
    tiers = (TierView(name="host", bytes_per_s=20 * GB), TierView(name="disk", bytes_per_s=2 * GB))
    store = StoreView(tiers=tiers, residency=(Residency(model=ModelId("b"), tier="disk", size_bytes=8 * GB),))
    instances = [
        replace(serving("e0", "a"), num_requests=3),
        replace(serving("e1", "a"), num_requests=1),
        replace(serving("e2", "a"), state=InstanceState.LOST, model=None),
    ]
    base = fleet(instances, [model("a", 4), model("b", 2)])
    running = tuple(
        RunningView(
            id=RequestId(f"r{n}"), model=ModelId("a"), instance=InstanceId(on), num_tokens=100 * (n + 1)
        )
        for n, on in enumerate(("e0", "e0", "e0", "e1"))
    )
    waits = WaitingView(id=RequestId("w"), model=ModelId("b"), waiting_since_s=base.now_s - 3)
    models = (replace(base.models[0], num_running=4), replace(base.models[1], num_running=0, num_waiting=2))
    return replace(base, models=models, running=running, waiting=(waits,), store=store)


def test_the_plan_is_the_schedulers_own() -> None:
    assert explain(view(), RULE).actions == tuple(RULE.plan(view()))
    assert explain(view(), RULE).actions


def test_candidates_are_priced_cheapest_first_and_the_impossible_last() -> None:
    candidates = explain(view(), RULE).candidates[ModelId("b")]
    assert [(c.instance, c.num_evicted, c.num_recomputed, c.swap_s) for c in candidates[:2]] == [
        ("e1", 1, 400, 4.0),
        ("e0", 3, 600, 4.0),
    ]
    assert [(c.instance, c.impossible) for c in candidates[2:]] == [("e2", "is LOST")]


def test_demands_are_the_loads_of_the_swap_policy() -> None:
    first, second = explain(view(), RULE).demands
    assert (first.model, first.load, first.waited_s, first.tier, first.load_s) == (
        "b",
        float("inf"),
        3.0,
        "disk",
        4.0,
    )
    assert (second.model, second.load, second.num_replicas) == ("a", 2.0, 2)


def test_prices_are_by_measured_times_once_there_are_some() -> None:
    measured = TimesView(unload_s=0.5, load_bytes_per_s=(("disk", 1 * GB),))
    explanation = explain(replace(view(), times=measured), RULE)
    assert [c.swap_s for c in explanation.candidates[ModelId("b")][:2]] == [8.5, 8.5]
    assert explanation.demands[0].load_s == 8.0


def test_models_are_told_in_the_order_of_the_plan_and_then_of_waits() -> None:
    absent = [model(name, 1, waiting=1) for name in ("x", "y", "z")]
    waits = [
        WaitingView(id=RequestId(name), model=ModelId(name), waiting_since_s=90.0 + at)
        for at, name in enumerate(("z", "x", "y"))
    ]
    one = replace(view(), models=(*view().models[:1], *absent), waiting=tuple(waits))
    explanation = explain(one, KeepAliveSwap())
    assert [demand.model for demand in explanation.demands] == ["z", "x", "y", "a"]
    idle = replace(one, instances=(*one.instances, empty("e3")))
    ours = explain(idle, StaticPinning({"e3": "y"}))
    assert [demand.model for demand in ours.demands] == ["y", "z", "x", "a"]


def test_a_quiet_view_says_so_and_prices_what_waits() -> None:
    explanation = explain(
        view(), WeightedLoadSwap(t1=1, t2=50, b=1.5, max_swaps=1, patience_s=None, sigmas=0)
    )
    quiet = explain(replace(view(), waiting=(), models=view().models[:1]), RULE)
    assert "plans 1 action" in str(explanation)
    assert quiet.actions == ()
    assert quiet.candidates == {}


def test_the_command_explains_a_view_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "view.json"
    path.write_text(dump_view(view()))
    assert main(["plan", str(path), "--scheduler", "WeightedLoadSwap(t1=1, t2=50, b=1.5, sigmas=0)"]) == 0
    text = capsys.readouterr().out
    assert "swap e1 to b" in text
    assert "e0 (a): 3 requests evicted, 600 tokens computed again, 4 s to swap" in text
    assert (
        main(["plan", str(path), "--scheduler", "WeightedLoadSwap(t1=1, t2=50, b=1.5, sigmas=0)", "--json"])
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["actions"][0] | {"reason": ""} == {
        "action": "Swap",
        "instance": "e1",
        "model": "b",
        "deadline_s": 0.0,
        "reason": "",
    }


def test_adapters_that_an_instance_is_to_hold_are_told() -> None:
    wanted = AdapterView(id=AdapterId("sql"), model=ModelId("a"), popularity=9.0)
    instances = tuple(replace(i, max_adapters=2) for i in view().instances)
    explanation = explain(replace(view(), instances=instances, adapters=(wanted,)), AdapterPool())
    assert "have e0 hold sql, since sql is popular" in str(explanation)
    assert load_view(dump_view(replace(view(), adapters=(wanted,)))).adapters == (wanted,)


def test_a_file_that_is_no_view_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "view.json"
    path.write_text("[]")
    for place in (path, tmp_path / "none.json"):
        assert main(["plan", str(place), "--scheduler", "RestoreMinReplicas()"]) == 2
        assert str(place) in capsys.readouterr().err
