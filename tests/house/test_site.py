"""The site of docs/: its API has every module that programs import; its references say what fields are for.

That it builds, with every page, link, anchor and public name, is proven by `make check-docs`.
"""

from __future__ import annotations

import re

from docs.hooks import reference
from tests.house.test_public_names import NAMES
from tests.house.tree import ROOT


def test_the_api_has_every_pinned_module() -> None:
    assert NAMES.keys() <= reference.PUBLIC.keys()


def test_the_api_has_every_module_that_pages_and_examples_import() -> None:
    sources = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*.py")]
    imported = {
        module
        for path in sources
        for module in re.findall(r"^\s*from (hotswap[\w.]*) import", path.read_text("utf-8"), re.MULTILINE)
    }
    assert len(imported) > 10
    assert [module for module in imported if not _has_page(module)] == []


def _has_page(module: str) -> bool:
    """Whether a module, or the package that it is of, has a page."""
    return module in reference.PUBLIC or module.rpartition(".")[0] in reference.PUBLIC


def test_every_field_of_the_configuration_has_a_meaning() -> None:
    page = reference.pages()["reference/configuration.md"]
    rows = re.findall(r"^\| `\w+` \|.*$", page, re.MULTILINE)
    assert len(rows) > 50
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_argument_of_the_commands_has_a_meaning() -> None:
    page = reference.pages()["reference/cli.md"]
    rows = re.findall(r"^\| `.*$", page, re.MULTILINE)
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []
    assert "## `hotswap store add`" in page
