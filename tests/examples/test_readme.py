"""The README's code runs, its links lead to files, its commands exist."""

import re
from pathlib import Path

import pytest

from examples.demo.checkpoints import Checkpoint

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


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
    assert {"docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"} <= set(
        links
    )
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_example_is_named() -> None:
    examples = {path.name for path in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert {name for name in examples if f"(examples/{name})" not in README} == set()


def test_every_command_and_constraint_exists() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= targets
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
    assert all((ROOT / path).is_file() for path in re.findall(r"constraints/\w+\.txt", README))


def test_every_extra_is_declared() -> None:
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    rows = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
    extras = {extra for row in rows for extra in re.findall(r"`(\w+)`", row)}
    assert {"torch", "otel", "testing"} <= extras
    assert {extra for extra in extras if not re.search(rf"^{extra} = \[", project, re.MULTILINE)} == set()
