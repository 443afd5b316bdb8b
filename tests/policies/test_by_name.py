"""Policies by text: what Python would make of it, and nothing that Python could do beside."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from hotswap.abc import Scheduler
from hotswap.errors import ConfigError
from hotswap.policies import AffinityRouter, Chain, Cooldown, RestoreMinReplicas, WeightedLoadSwap
from hotswap.policies.by_name import router_named, scheduler_named

OURS = """
from dataclasses import dataclass
from hotswap.abc import Scheduler

@dataclass(frozen=True, slots=True)
class Mine(Scheduler):
    patience_s: float = 1.0

    def plan(self, fleet):
        return ()
"""


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("WeightedLoadSwap()", WeightedLoadSwap()),
        ("WeightedLoadSwap(t1=8, t2=inf, b=2)", WeightedLoadSwap(t1=8, t2=inf, b=2)),
        ("WeightedLoadSwap(8, 16.5, 2, patience_s=None)", WeightedLoadSwap(8, 16.5, 2, patience_s=None)),
        ("RestoreMinReplicas", RestoreMinReplicas()),
        ("hotswap.policies:RestoreMinReplicas()", RestoreMinReplicas()),
        ("hotswap.policies.schedulers.weighted_load:WeightedLoadSwap(8, 16, 2)", WeightedLoadSwap(8, 16, 2)),
    ],
)
def test_a_text_makes_what_python_would(text: str, made: Scheduler) -> None:
    assert scheduler_named(text) == made


def test_policies_nest() -> None:
    text = "Chain(RestoreMinReplicas(), Cooldown(WeightedLoadSwap(8, 16, 2), cooldown_s=30))"
    made = Chain(RestoreMinReplicas(), Cooldown(WeightedLoadSwap(8, 16, 2), cooldown_s=30))
    assert repr(scheduler_named(text)) == repr(made)
    assert router_named("AffinityRouter()") == AffinityRouter()


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OURS)
    made = scheduler_named(f"{path}:Mine(patience_s=3)")
    assert type(made).__name__ == "Mine"
    assert "patience_s=3" in repr(made)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no policy"),
        ("WeightedLoadSwap(t1=8", "no policy"),
        ("Nothing()", "not there"),
        ("StaticPinning()", "cannot be made"),
        ("WeightedLoadSwap(t1=-1, t2=1, b=1)", "t1"),
        ("AffinityRouter()", "not a Scheduler"),
        ("42", "not a Scheduler"),
        ("nowhere.at.all:Mine()", "no module"),
        ("missing.py:Mine()", "no file"),
        ("__import__('os').abort()", "neither a value"),
        ("WeightedLoadSwap(t1=1+1, t2=3, b=1)", "neither a value"),
        ("importlib()", "not there"),
        ("WeightedLoadSwap(*[1, 2, 3])", "neither a value"),
    ],
)
def test_anything_else_is_refused_with_a_reason(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        scheduler_named(text)
