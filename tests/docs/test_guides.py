"""What guides say of the code is so: errors, and lines of the log."""

from __future__ import annotations

import re

from hotswap import errors
from tests.docs.pages import DOCS
from tests.house.tree import modules


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
