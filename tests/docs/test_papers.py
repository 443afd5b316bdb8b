"""Tables of docs/papers.md are those of the reports in benchmarks/results."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

from tests.docs.pages import DOCS
from tests.house.tree import ROOT

PAGE = (DOCS / "papers.md").read_text("utf-8")


def report(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its head."""
    (section,) = re.findall(rf"^#+ {heading}.*?\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    end = next((at for at, line in enumerate(lines) if at > 1 and line.startswith("|---")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:end]]


def test_engines_for_unseen_loads_are_those_found() -> None:
    loads = list(report("unseen")["loads"].values())
    table = rows("Unseen loads")
    assert len(table) == len(loads) == 8
    names = ("CostSwap (default)", "WeightedLoadSwap, tuned", "ElasticQuota", "ShepherdSwap", "KeepAliveSwap")
    for (what, *cells), load in zip(table, loads, strict=True):
        found = load["engines"]
        assert what == load["what"]
        assert cells == [", ".join(map(str, found[name])) if name in found else "" for name in names]


def test_shares_of_the_forecast_are_those_played() -> None:
    loads = list(report("forecast")["loads"].values())
    for (_, *cells), load in zip(rows("Forecast"), loads, strict=False):
        played = [load["policies"][name] for name in ("CostSwap (default)", "Forecast")]
        assert cells == [", ".join(f"{seed['attainment']:.3f}" for seed in seeds) for seeds in played]


def test_waits_after_a_burst_are_those_played() -> None:
    played = report("papers")["snowflake"]
    names = [
        "weighted loads",
        "weighted loads, 3 sigmas",
        "horizontal autoscaling",
        "static pinning",
        "keep-alive",
    ]
    for (_, p50, p99, _), name in zip(rows("Snowflake"), names, strict=True):
        for cell, key in ((p50, "ttft_p50_s"), (p99, "ttft_p99_s")):
            assert abs(float(cell) - median(played[name][key])) <= _half_a_digit(cell)


def _half_a_digit(cell: str) -> float:
    """How far a value may be from the cell that it was rounded to; reports are rounded, too."""
    return 0.5 * 10.0 ** -len(cell.partition(".")[2]) + 1e-9
