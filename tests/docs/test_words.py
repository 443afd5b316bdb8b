"""The guides are short: the words of the tutorials and of the how-to pages of the site together."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS
from tests.house.tree import ROOT

GUIDES = ("Tutorials", "Guides")
MOST_WORDS = 20_000


def pages(section: str) -> list[str]:
    """The pages of a section of the site's navigation."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    (listed,) = re.findall(rf"^  - {section}:\n((?:      - .*\n)+)", text, re.MULTILINE)
    return re.findall(r"^      - .*: (\S+\.md)$", listed, re.MULTILINE)


def words(page: str) -> int:
    """The words of a page, those of its code and its tables included, as `wc -w` counts them."""
    return len((DOCS / page).read_text("utf-8").split())


def test_the_guides_have_few_words() -> None:
    counts = {page: words(page) for section in GUIDES for page in pages(section)}
    assert {"production.md", "tutorials/first-swap.md"} <= counts.keys()
    assert sum(counts.values()) <= MOST_WORDS, counts
