"""The code blocks of a page, for tests that run them or hold them against files."""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.tree import ROOT

DOCS = ROOT / "docs"
_BLOCK = re.compile(r"(?:<!-- excerpt: (\S+) -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path | str, language: str) -> list[str]:
    """The blocks of a language that the page does not mark as excerpts, in order."""
    found = _BLOCK.findall((DOCS / page).read_text("utf-8"))
    return [code for source, of, code in found if of == language and not source]


def excerpts(page: Path) -> list[tuple[str, str]]:
    """The blocks that are marked as excerpts: the file, from the root of the project, and the code."""
    return [(source, code) for source, _, code in _BLOCK.findall(page.read_text("utf-8")) if source]
