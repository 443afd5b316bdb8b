"""The README's code runs, its links lead to files, its commands exist."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from examples.demo.checkpoints import Checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
EXAMPLES = (ROOT / "docs" / "examples.md").read_text("utf-8")


def test_the_composition_serves_and_swaps(
    checkpoints: tuple[Checkpoint, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    llama, qwen, _ = checkpoints
    for written, here in (
        ("/models/llama", llama.path),
        ("/models/qwen", qwen.path),
        ("/var/cache/hotswap", tmp_path),
    ):
        assert written in code
        code = code.replace(written, str(here))
    exec(compile(code, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert len(said) > 200
    assert llama.continuation.startswith(said)


def test_every_link_leads_to_a_file() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    here = {"docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"}
    assert here <= set(links)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_example_is_named() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert {name for name in examples if f"(../examples/{name})" not in EXAMPLES} == set()


def test_every_command_and_constraint_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= targets
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
    assert all((ROOT / path).is_file() for path in re.findall(r"constraints/\w+\.txt", EXAMPLES))


def test_every_extra_of_users_is_declared_and_listed() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    declared = set(re.findall(r"^(\w+) = \[", project.partition("optional-dependencies]")[2], re.MULTILINE))
    listed = set(re.findall(r"^\| `(\w+)` \|", EXAMPLES, re.MULTILINE))
    assert {"torch", "otel", "testing"} <= listed <= declared
    assert {"hub", "plots", "ray", "remote", "top", "triton", "vllm"} <= listed


def test_its_figures_are_those_of_the_reports() -> None:
    results = ROOT / "benchmarks" / "results"
    (streams,) = re.findall(r"all streams of ([\d,]+) requests exact", README)
    report = json.loads((results / "soak.json").read_text("utf-8"))
    assert sum(report["disturbed"]["requests"].values()) == int(streams.replace(",", ""))
    assert report["wrong"] == report["errors"] == []
    (restart,) = re.findall(r"a restart takes (\d+) times as long", README)
    report = json.loads((results / "vllm_swap.json").read_text("utf-8"))
    assert round(report["ratios"]["restart_over_in_place"]) == int(restart)
    (times,) = re.findall(r"restoring 4,096 tokens takes 1/(\d+) of computing them", README)
    report = json.loads((results / "kv.json").read_text("utf-8"))
    again, restored = (median(report[name]["4096"]) for name in ("reprefill_cpu_s", "restore_cpu_s"))
    assert abs(again / restored / int(times) - 1) < 0.05
    pause_ms, over = re.findall(r"a pause of (\d+) ms at 8,192 tokens, 1/(\d+)", README)[0]
    gaps = json.loads((results / "migrate.json").read_text("utf-8"))["gap_s"]
    kv, computed = (median(gaps[method]["8192"]) for method in ("kv", "recompute"))
    assert round(kv * 1000) == int(pause_ms)
    assert abs(computed / kv / int(over) - 1) < 0.05
    (ms,) = re.findall(r"unloaded and loaded from pinned memory in (\d+) ms on the H100", README)
    report = json.loads((results / "gpu-nvidia-h100-80gb-hbm3.json").read_text("utf-8"))
    (plain,) = (row for row in report["tokens"] if row["weights"] == "bf16")
    assert abs((median(plain["unload_s"]) + median(plain["load_s"])) * 1000 - int(ms)) < 2
