"""The table of architectures says what the machine it was not made on finds too."""

from __future__ import annotations

import pytest
import transformers

from benchmarks.coverage import PAGE, SLICE, VARIANTS, Outcome, cover, told_of

TEXT = PAGE.read_text(encoding="utf-8")
ROWS = told_of(TEXT)
BY_NAME = {variant.name: variant for variant in VARIANTS}


@pytest.mark.parametrize("name", SLICE)
def test_the_table_holds(name: str) -> None:
    row = cover(BY_NAME[name])
    assert row.outcome in (Outcome.EXACT, Outcome.REFUSED)
    assert str(row) == ROWS[name]


def test_the_table_has_no_wrong_tokens() -> None:
    assert [row for row in ROWS.values() if f"| {Outcome.WRONG} |" in row] == []
    assert "\n## Wrong" not in TEXT


def test_the_table_is_of_the_installed_transformers() -> None:
    assert f"transformers {transformers.__version__}" in TEXT


def test_the_table_is_whole() -> None:
    assert sorted(ROWS) == sorted(BY_NAME)
