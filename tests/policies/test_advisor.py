"""The advisor: what it says agrees with itself, and with a device that is followed step by step."""

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import ModelId
from hotswap.abc import ModelCard
from hotswap.errors import ConfigError
from hotswap.policies.planning import SharedModel, SharingAdvisor, SharingMethod
from hotswap.policies.planning.sharing import switching

GB = 10**9
ADVISOR = SharingAdvisor(memory_bytes=80 * GB, host_bytes=500 * GB)

RATES = st.floats(0.001, 0.5)


def shared(
    name: str,
    *,
    weight: float = 16,
    rate: float = 0.05,
    base: str | None = None,
    adapter_bytes: int = 0,
    kv_bytes: int = 131_072,
) -> SharedModel:
    card = ModelCard(
        id=ModelId(name),
        weight_bytes=int(weight * GB),
        max_context_tokens=8192,
        kv_bytes_per_token=kv_bytes,
    )
    return SharedModel(
        card=card,
        requests_per_s=rate,
        tokens_in=500,
        tokens_out=200,
        base=ModelId(base) if base else None,
        adapter_bytes=adapter_bytes,
    )


def variants(count: int, *, rate: float = 0.05) -> list[SharedModel]:
    return [shared(f"v{n}", base="llama", adapter_bytes=GB // 5, rate=rate) for n in range(count)]


# ------------------------------------------------------------------ memory


def test_each_method_needs_the_memory_that_it_uses_at_once() -> None:
    models = [shared("a", weight=30, kv_bytes=0), shared("b", weight=20, kv_bytes=0), shared("c", kv_bytes=0)]
    report = ADVISOR.advise(models)
    needed = {w.method: (w.device_bytes // GB, w.host_bytes // GB, w.num_instances) for w in report.methods}
    assert needed == {
        SharingMethod.DEDICATED: (30, 0, 3),
        SharingMethod.ADAPTER_POOL: (0, 0, 1),
        SharingMethod.SPATIAL: (66, 0, 1),
        SharingMethod.OVERLAPPED: (50, 66, 1),
        SharingMethod.WARM: (30, 66, 1),
        SharingMethod.COLD: (30, 0, 1),
    }
    assert [w.method for w in report.methods if w.obstacle] == [SharingMethod.ADAPTER_POOL]


@given(st.integers(1, 200), st.integers(0, 200))
def test_what_does_not_fit_is_said_and_never_best(memory: int, host: int) -> None:
    advisor = SharingAdvisor(memory_bytes=memory * GB, host_bytes=host * GB)
    report = advisor.advise([shared("a", weight=40), shared("b", weight=30)])
    for each in report.methods:
        fits = each.device_bytes <= memory * GB and each.host_bytes <= host * GB
        assert bool(each.obstacle) != fits or each.method is SharingMethod.ADAPTER_POOL
    best = report.best()
    assert best is None or not best.obstacle
    assert str(report).endswith("no method is possible" if best is None else f"cheapest: {best.method}")


def test_kv_cache_counts_with_the_traffic() -> None:
    quiet, busy = (
        ADVISOR.advise([shared("a", rate=rate)]).method(SharingMethod.WARM) for rate in (0.01, 2.0)
    )
    assert quiet.device_bytes == 16 * GB + 700 * 131_072  # one request, whole
    assert busy.device_bytes == 16 * GB + int(2 * (0.025 + 6) * 600 * 131_072)  # 12 requests, half way


# ------------------------------------------------------------------ switches


@given(RATES, RATES)
def test_the_slower_the_switch_the_more_it_adds_and_costs(rate_a: float, rate_b: float) -> None:
    report = ADVISOR.advise([shared("a", rate=rate_a), shared("b", rate=rate_b)])
    methods = [report.method(w) for w in (SharingMethod.OVERLAPPED, SharingMethod.WARM, SharingMethod.COLD)]
    assert [w.switch_s for w in methods] == sorted(w.switch_s for w in methods)
    assert [w.load for w in methods] == sorted(w.load for w in methods)


def test_one_model_alone_switches_never() -> None:
    report = ADVISOR.advise([shared("a")])
    for each in report.methods:
        if each.method is not SharingMethod.ADAPTER_POOL:
            assert (each.switches_per_h, each.added_s, each.switch_s) == (0, 0, 0)
            assert each.usd_per_h == ADVISOR.usd_per_device_h


def test_too_much_traffic_is_said() -> None:
    report = ADVISOR.advise([shared("a", rate=8), shared("b", rate=8)])
    assert "of an instance's time" in report.method(SharingMethod.SPATIAL).obstacle
    best = report.best()
    assert best is not None
    assert best.method is SharingMethod.DEDICATED


@pytest.mark.parametrize(("rates", "service_s"), [((0.01, 0.02), 0.0), ((0.003, 0.001, 0.002), 8.0)])
def test_switches_as_they_come_are_those_of_a_device_that_is_followed(
    rates: tuple[float, ...], service_s: float
) -> None:
    """It serves one model's requests together, and turns to another when they have ended."""
    random, switch_s = Random(7), [0.2, 0.3, 0.5]
    num_requests, num_switches, switching_s, waited_s = 60_000, 0, 0.0, 0.0
    now_s, serves, busy_until_s = 0.0, 0, 0.0
    for wanted in random.choices(range(len(rates)), weights=rates, k=num_requests):
        now_s += random.expovariate(sum(rates))
        starts_s = now_s
        if wanted != serves:
            starts_s = max(now_s, busy_until_s) + switch_s[wanted]
            num_switches, switching_s, serves = num_switches + 1, switching_s + switch_s[wanted], wanted
        waited_s += starts_s - now_s
        busy_until_s = max(busy_until_s, starts_s + service_s)
    count = len(rates)
    expected = switching(rates, switch_s[:count], [service_s] * count, turn_s=0.1)
    assert expected.switches_per_s == pytest.approx(num_switches / now_s, rel=0.03)
    assert expected.lost_share == pytest.approx(switching_s / now_s, rel=0.03)
    assert expected.added_s == pytest.approx(waited_s / num_requests, rel=0.05)


@pytest.mark.parametrize(("service_s", "turn_s"), [(10.0, 1.0), (0.0, 10.0)])
def test_requests_that_come_too_often_make_models_take_turns(service_s: float, turn_s: float) -> None:
    """A switch every five seconds would cut requests of ten, or turns that are to be ten."""
    often = switching([0.2, 0.2], [0.5, 0.5], [service_s] * 2, turn_s=turn_s)
    assert often.switches_per_s == pytest.approx(1 / (turn_s + 0.5))
    seldom = switching([0.02, 0.02], [0.5, 0.5], [service_s] * 2, turn_s=turn_s)
    assert seldom.switches_per_s == pytest.approx(0.02)


@pytest.mark.parametrize("service_s", [0.0, 1.0, 4.0, 9.5])
@pytest.mark.parametrize("num_models", [2, 5])
def test_waits_in_turns_are_those_of_a_device_that_is_followed(num_models: int, service_s: float) -> None:
    turn_s, switch_s = 4.0, 1.5
    round_s = num_models * (turn_s + switch_s)
    off_s = round_s - turn_s
    random, num_requests, added_s = Random(7), 40_000, 0.0
    for _ in range(num_requests):
        at_s, remaining_s = random.random() * round_s, service_s  # its model is on from 0 to `turn_s`
        if at_s >= turn_s:
            added_s, at_s = added_s + round_s - at_s, 0.0
        while remaining_s > turn_s - at_s:
            remaining_s, at_s, added_s = remaining_s - (turn_s - at_s), 0.0, added_s + off_s
    expected = switching([9.0] * num_models, [switch_s] * num_models, [service_s] * num_models, turn_s=turn_s)
    assert expected.added_s == pytest.approx(added_s / num_requests, rel=0.03)
    assert expected.switches_per_s == pytest.approx(num_models / round_s)
    assert expected.lost_share == pytest.approx(switch_s / (turn_s + switch_s))


def test_models_side_by_side_slow_each_other_while_both_have_requests() -> None:
    """Followed by drawing: whether another model's request is running, moment by moment."""
    advisor = replace(ADVISOR, contention=3.0)
    added_s = [
        advisor.advise([shared("a", rate=rate), shared("b", rate=rate)]).method(SharingMethod.SPATIAL).added_s
        for rate in (1e-6, 0.05, 10.0)
    ]
    alone_s = 500 / 20_000 + 200 * 0.03
    random, num_moments = Random(7), 40_000
    busy = sum(random.expovariate(0.05) < alone_s for _ in range(num_moments)) / num_moments
    assert added_s[0] == pytest.approx(0.0, abs=1e-3)
    assert added_s[1] == pytest.approx((3.0 - 1.0) * alone_s * busy, rel=0.03)
    assert added_s[2] == pytest.approx((3.0 - 1.0) * alone_s)


# ------------------------------------------------------------------ adapters


def test_variants_of_one_base_are_best_as_a_pool() -> None:
    best = ADVISOR.advise(variants(20)).best()
    assert best is not None
    assert best.method is SharingMethod.ADAPTER_POOL
    assert best.switches_per_h == 0  # all of them fit
    assert best.host_bytes == 20 * (GB // 5)


def test_the_base_may_be_served_too_and_strangers_may_not() -> None:
    def obstacle(*more: SharedModel) -> str:
        return ADVISOR.advise([*variants(3), *more]).method(SharingMethod.ADAPTER_POOL).obstacle

    assert obstacle(shared("llama")) == ""
    assert "not variants of one base" in obstacle(shared("mistral"))
    assert "not variants of one base" in obstacle(shared("x", base="mistral", adapter_bytes=1))


def test_of_more_adapters_than_fit_the_least_popular_are_fetched() -> None:
    popular, rare = variants(2, rate=0.2), variants(3, rate=0.01)
    models = [*popular, *rare]
    whole = ADVISOR.advise(models).method(SharingMethod.ADAPTER_POOL)
    room_for_two = replace(ADVISOR, memory_bytes=whole.device_bytes - 3 * (GB // 5))
    pool = room_for_two.advise(models).method(SharingMethod.ADAPTER_POOL)
    assert pool.obstacle == ""
    assert pool.switches_per_h == pytest.approx(3600 * 3 * 0.01)
    assert pool.added_s > whole.added_s


# ------------------------------------------------------------------ the report


def test_the_report_reads_as_a_table() -> None:
    lines = str(ADVISOR.advise([shared("a"), shared("b")])).splitlines()
    assert len(lines) == 8
    assert lines[0].split() == ["method", "devices", "host", "switch", "switches", "added", "load", "cost"]
    assert lines[2] == "adapter pool          not possible: the models are not variants of one base"
    for line in (*lines[3:7], lines[1]):
        assert len(line) == len(lines[0])
        assert line.endswith(" USD/h")
    assert lines[-1] == "cheapest: spatial"


def test_a_limit_on_what_may_be_added_counts_before_the_price() -> None:
    report = ADVISOR.advise([shared("a"), shared("b")])
    limited = report.best(max_added_s=0.0)
    assert limited is not None
    assert limited.method is SharingMethod.DEDICATED
    assert report.best(max_added_s=-1.0) is None


@pytest.mark.parametrize(
    "values",
    [{"memory_bytes": 0}, {"contention": 0.5}, {"turn_s": -1.0}, {"tokens_per_s": float("nan")}],
)
def test_a_senseless_setting_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(values))} is "):
        SharingAdvisor(**{"memory_bytes": GB, "host_bytes": GB, **values})


def test_senseless_traffic_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^requests_per_s of 'a' is "):
        shared("a", rate=inf)
    with pytest.raises(ConfigError, match=r"^adapter_bytes of 'a' is "):
        shared("a", base="b")
    with pytest.raises(ConfigError, match="at least one SharedModel"):
        ADVISOR.advise([])
