"""What guides say is so: errors and lines of the log as in the code, figures as in the reports."""

from __future__ import annotations

import json
import re
from statistics import median
from typing import Any

import pytest

from hotswap import errors
from tests.docs.pages import DOCS
from tests.house.tree import ROOT, modules


def test_every_error_has_a_row_below_the_class_that_says_what_to_do() -> None:
    page = (DOCS / "errors.md").read_text("utf-8")
    rows: dict[str, str] = {}
    heading = ""
    for line in page.splitlines():
        if line.startswith("## "):
            (heading,) = re.findall(r"`(\w+)`", line)
        if row := re.match(r"\| `(\w+)` \|", line):
            rows[row[1]] = heading
    groups = {"HotswapError", "ConfigError", "RequestError", "InstanceError", "StoreError"}
    assert rows.keys() == set(errors.__all__) - groups
    assert [
        name for name, of in rows.items() if not issubclass(getattr(errors, name), getattr(errors, of))
    ] == []


def test_every_line_of_the_log_is_one_that_the_code_writes() -> None:
    # As it is written, with the pieces of a long line joined.
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text("utf-8")) for path in modules())
    rows = re.findall(r"^\| `(.+?)` \|", (DOCS / "debug.md").read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 15

    def pattern(line: str) -> str:
        return r"[^\n]*".join(re.escape(part.strip()) for part in line.split("..."))

    assert [line for line in rows if not re.search(pattern(line), source)] == []


def report_of(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def test_what_kv_blocks_save_is_what_was_measured() -> None:
    page, report = (DOCS / "kv.md").read_text("utf-8"), report_of("kv")
    (figures,) = re.findall(
        r"([\d,]+) tokens are restored in (\d+) ms and computed again in ([\d.]+) s, "
        r"([\d,]+) in (\d+) ms and ([\d.]+) s. Saving takes at most (\d+) %",
        page,
    )
    for tokens, restored_ms, computed_s in (figures[:3], figures[3:6]):
        number = tokens.replace(",", "")
        assert median(report["restore_cpu_s"][number]) * 1000 == pytest.approx(int(restored_ms), rel=0.06)
        assert median(report["reprefill_cpu_s"][number]) == pytest.approx(float(computed_s), rel=0.02)
    saved = [value for name, value in report["ratios"].items() if name.startswith("save_over_reprefill")]
    assert max(saved) <= int(figures[6]) / 100


def test_what_adapters_cost_is_what_was_measured() -> None:
    page, models = (DOCS / "adapters.md").read_text("utf-8"), report_of("adapters")["models"]
    text = " ".join(page.split())
    (figures,) = re.findall(r"([\d.]+) to ([\d.]+) times as long .*? up to ([\d.]+) times", text)
    (loads_ms,) = re.findall(r"A load from files takes (\d+) to (\d+) ms", text)

    def steps(size: str) -> list[float]:
        """How much longer a decode step of twenty requests is with twenty adapters than without."""
        found = [
            made["step_s"]["decode"] for name in models for made in models[name].values() if size in name
        ]
        return [median(decode["20"]) / median(decode["0"]) for decode in found]

    loads = [
        made["load_from_files_s"]["median"] * 1000
        for name in models
        for made in models[name].values()
        if "x12" in name
    ]
    assert [min(steps("x12")), max(steps("x12")), max(steps("x4"))] == pytest.approx(
        [float(figure) for figure in figures], rel=0.02
    )
    assert [min(loads), max(loads)] == pytest.approx([int(ms) for ms in loads_ms], rel=0.06)
