"""The table of kinds of checkpoints says what the engines do; the tests of vLLM look at its column."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.coverage import FACTS, PAGE, kinds_table
from tests.backends.quantized.kinds import KINDS
from tests.backends.quantized.verdicts import ENGINES, GGUF, make_engine, verdict, write

TOLD: dict[str, dict[str, str]] = json.loads(FACTS.read_text())["kinds"]


@pytest.mark.parametrize("kind", [*KINDS, *GGUF])
@pytest.mark.parametrize("name", ["TorchEngine", "LlamaCppEngine"])
async def test_an_engine_does_what_the_table_says(name: str, kind: str, tmp_path: Path) -> None:
    for needed in ("xllamacpp", "gguf"):
        if find_spec(needed) is None and (name == "LlamaCppEngine" or kind in GGUF):
            pytest.skip(f"{needed} is not installed")
    async with make_engine(name) as engine:
        assert await verdict(engine, write(tmp_path / "source", kind), tmp_path / "root") == TOLD[kind][name]


def test_the_page_has_the_table_and_no_kind_is_refused_in_a_swap() -> None:
    assert kinds_table() in PAGE.read_text(encoding="utf-8")
    assert list(TOLD) == [*KINDS, *GGUF]
    for row in TOLD.values():
        assert list(row) == list(ENGINES)
        assert {*row.values()} <= {"served", "refused at the import", "refused before a swap"}
