"""The benchmarks of the engine and of the fleet's overhead run, and say what their readers expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import engine, overhead
from benchmarks.route_overhead import LIMIT_GROWTH, LIMIT_US, RouteSettings, missed
from tests.patience import PATIENCE_S


@pytest.mark.slow
def test_the_engine_report_has_every_figure_of_those_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = engine.Settings(
        contestants=("hotswap", "vllm_eager"),
        dtypes=("fp32",),
        batches=(1, 2),
        prompt=8,
        output=4,
        repeats=1,
        hidden=64,
        layers=2,
        mixed={"streams": 2, "prompt": 4, "output": 40, "long_prompts": 1, "long_prompt": 64, "budget": 64},
        vllm_python=tmp_path / "missing",
        directory=tmp_path,
        timeout_s=PATIENCE_S,
    )
    report = engine.measure(settings)
    tokens = report["tokens_per_cpu_s"]["fp32"]
    assert set(tokens) == {"hotswap"}
    assert {batch: len(figures) for batch, figures in tokens["hotswap"].items()} == {"1": 1, "2": 1}
    assert {policy: len(figures) for policy, figures in report["itl_p99_s"].items()} == {
        "splitfuse": 1,
        "prefill_first": 1,
    }
    assert set(report["unavailable"]) == {"vllm_eager fp32"}


def test_a_hybrid_is_compared_by_its_decodes_with_what_serves_it() -> None:
    settings = engine._settings(engine._parse(["--hybrid", "--full"]))
    assert settings.hybrid
    assert settings.mixed is None
    assert settings.contestants == ("hotswap", "vllm_eager", "vllm_compiled", "hf_generate")
    layers = engine._config(settings).layer_types
    assert (layers.count("conv"), layers.count("full_attention")) == (10, 6)
    assert engine._settings(engine._parse(["--hybrid", "--contestants", "hotswap"])).contestants == (
        "hotswap",
    )


def test_vllm_is_the_better_of_its_modes_batch_by_batch() -> None:
    tokens = {"vllm_eager": {"1": [1.0, 2.0], "8": [9.0]}, "vllm_compiled": {"1": [3.0, 3.0], "8": [5.0]}}
    engine._choose_vllm(tokens)
    assert tokens["vllm"] == {"1": [3.0, 3.0], "8": [9.0]}


def test_the_overhead_is_the_difference_of_the_two_cases() -> None:
    routes = RouteSettings(engines=(4, 8), requests=10, repeats=2)
    report = overhead.measure(overhead.Settings(batch=2, tokens=8, repeats=3, routes=routes))
    for fleet, alone, added in zip(report["fleet_s"], report["engine_s"], report["added_s"], strict=True):
        assert added == fleet - alone
    assert len(report["added_s"]) == 3
    assert {kind: list(by_engines) for kind, by_engines in report["route_us"].items()} == {
        "push": ["4", "8"],
        "wrapped": ["4", "8"],
    }
    assert all(len(rounds) == 2 for kind in report["route_us"].values() for rounds in kind.values())


@pytest.mark.parametrize(
    ("few", "many", "misses"),
    [
        ([20.0, 21.0], [25.0, 26.0], False),
        ([30.0, 30.0], [LIMIT_US + 1, LIMIT_US + 1], True),
        ([10.0, 10.0], [10 * LIMIT_GROWTH + 1] * 2, True),
    ],
)
def test_a_route_misses_its_limits_by_its_time_or_by_its_growth(
    few: list[float], many: list[float], misses: bool
) -> None:
    within = {"8": [20.0, 20.0], "512": [20.0, 20.0]}
    assert missed({"push": within, "wrapped": {"8": few, "512": many}}) == misses
    assert missed({"push": {"8": few, "512": many}, "wrapped": within}) == misses
