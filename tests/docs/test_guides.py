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


def test_what_a_move_of_a_hybrid_costs_is_what_was_measured() -> None:
    (figures,) = re.findall(
        r"paused for ([\d.]+) ms over a decode step at (\d+) tokens and for ([\d.]+) ms at ([\d,]+)",
        (DOCS / "engine.md").read_text("utf-8"),
    )
    measured = report_of("migrate-hybrid")["over_step_s"]
    for pause_ms, tokens in (figures[:2], figures[2:]):
        found = measured[tokens.replace(",", "")]
        assert median(found) * 1000 == pytest.approx(float(pause_ms), abs=0.06)


def test_what_a_collection_of_garbage_stops_is_what_was_measured() -> None:
    page, report = (DOCS / "operations.md").read_text("utf-8"), report_of("texts")
    (figures,) = re.findall(r"stopped the loop for (\d+) ms, of which its own work was at most (\d+)", page)
    assert round(median(report["gap_s"]["messages"]) * 1000) == int(figures[0])
    assert round(max(report["busy_s"]["messages"]) * 1000) <= int(figures[1])


def test_what_gpus_do_is_what_was_measured() -> None:
    report = report_of("gpu-nvidia-h100-80gb-hbm3")
    (figures,) = re.findall(
        r"(\d+) ms a step on an H100 .* which it could read in ([\d.]+) ms",
        (DOCS / "engine.md").read_text("utf-8"),
    )
    bf16 = next(tokens for tokens in report["tokens"] if tokens["weights"] == "bf16")
    assert round(1000 / bf16["tokens_per_s"]["1"]) == int(figures[0])
    read_ms = 1000 * bf16["weight_bytes"] / report["ceilings"]["read_bytes_per_s"]
    assert read_ms == pytest.approx(float(figures[1]), abs=0.05)
    (gigabytes,) = re.findall(r"H100 or H200 \| (\d+) GB/s", (DOCS / "sizing.md").read_text("utf-8"))
    loaded_s = median(report["swap"]["as an engine loads, 256 MiB at a time, s"])
    assert report["swap"]["bytes"] / loaded_s / 1e9 == pytest.approx(int(gigabytes), rel=0.03)


def test_what_stores_reach_is_what_was_measured() -> None:
    (reached,) = re.findall(
        r"the store reaches \[([\d.]+) to ([\d.]+) of it\]", (DOCS / "sizing.md").read_text("utf-8")
    )
    cold = report_of("load")["cases"][0]["cold"]
    ratios = [cold[name]["ratio"] for name in ("hotswap", "hotswap_gone", "hotswap_fresh")]
    assert [min(ratios), max(ratios)] == pytest.approx([float(ratio) for ratio in reached], abs=0.006)
