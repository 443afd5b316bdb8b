"""`make check` finds modules that import each other in a circle, wherever in a module the import stands."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.house.circles import circles
from tests.house.tree import ROOT

CONFIG = """
[tool.importlinter]
root_packages = ["planted"]
contract_types = ["circles: tests.house.circles.NoCircles"]

[[tool.importlinter.contracts]]
name = "No circles"
type = "circles"
ignore_imports = [{ignored}]
"""
LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
FOR_TYPES = "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    {}\n"


def linted(folder: Path, files: Mapping[str, str], *ignored: str) -> tuple[bool, str]:
    """Whether a package of these files passes, and what is printed of it."""
    (folder / "pyproject.toml").write_text(CONFIG.format(ignored=", ".join(map(repr, ignored))))
    for name, text in {"__init__.py": "", **files}.items():
        path = folder / "planted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {LINT}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Contracts: " in done.stdout, done.stdout + done.stderr
    return done.returncode == 0, " ".join(done.stdout.split())


@pytest.mark.parametrize(
    "back",
    [
        "from planted.a import A\n",
        "import planted.a\n",
        "from planted import a\n",
        "from . import a\n",
        "def late():\n    from planted.a import A\n",
        FOR_TYPES.format("from planted.a import A"),
        FOR_TYPES.format("from .a import A"),
    ],
)
def test_a_circle_of_two_is_found(tmp_path: Path, back: str) -> None:
    passes, told = linted(tmp_path, {"a.py": "import planted.b\n", "b.py": back})
    assert not passes
    assert "2 modules import each other in a circle: - planted.a -> planted.b (l. 1)" in told
    assert f"- planted.b -> planted.a (l. {back.count(chr(10))})" in told


def test_a_package_and_a_module_in_it_are_a_circle(tmp_path: Path) -> None:
    files = {
        "x/__init__.py": "from planted.x.y import Y\n",
        "x/y.py": FOR_TYPES.format("from planted.x import X"),
    }
    passes, told = linted(tmp_path, files)
    assert not passes
    assert "- planted.x -> planted.x.y (l. 1) - planted.x.y -> planted.x (l. 4)" in told


def test_a_package_that_exports_what_its_modules_have_is_none(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from planted.a import A\n",
        "a.py": "from planted.b import B\n",
        "b.py": "B = 1\n",
    }
    assert linted(tmp_path, files)[0]


def test_of_modules_that_reach_each_other_one_shortest_circle_is_shown() -> None:
    imports = {"a": "b", "b": "c", "c": "ad", "d": "ce", "e": "", "f": "g", "g": "h", "h": "fa"}
    assert circles(imports) == [("c", "d"), ("f", "g", "h")]
    assert circles({"a": "bc", "b": "c", "c": ""}) == []


def test_an_import_that_is_ignored_must_close_a_circle(tmp_path: Path) -> None:
    ignored = "planted.b -> planted.a"
    files = {"a.py": "import planted.b\n", "b.py": "import planted.a\n"}
    assert linted(tmp_path, files, ignored)[0]
    for mended in ({"a.py": "", "b.py": "import planted.a\n"}, {"a.py": "import planted.b\n", "b.py": ""}):
        passes, told = linted(tmp_path, mended, ignored)
        assert not passes
        assert f"{ignored} is in no circle" in told


def test_the_project_is_held_to_it_with_imports_for_types() -> None:
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    assert "circles" in [contract["type"] for contract in linter["contracts"]]
    assert {"hotswap", "benchmarks", "examples", "tests"} <= set(linter["root_packages"])
    assert not linter.get("exclude_type_checking_imports")
    assert "lint-imports" in (ROOT / "Makefile").read_text(encoding="utf-8")
