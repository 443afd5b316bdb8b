"""A new user's first page: two chat models answer at a temperature, and say what it took."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

import pytest

from examples import chat
from tests.runtime import alphabet


async def test_two_models_answer_remember_and_give_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance")
    checkpoints = [
        alphabet.checkpoint(tmp_path / name, generation={"do_sample": True, "top_k": 20})
        for name in ("ada", "bea")
    ]
    colors = await chat.main(checkpoints, tmp_path / "store")
    said = capsys.readouterr().out.splitlines()
    assert list(colors) == ["ada", "bea"]
    for name, answer in colors.items():
        assert answer.keys() == {"noon", "evening"}
        assert set(answer.values()) <= {"blue", "red"}
        assert said.count(f"{name}: {ascii_lowercase}") == 2
    used = [line for line in said if line.startswith("    prompt")]
    assert len(used) == 6
    # Both models have the same weights, and so the same KV blocks.
    assert [" 0 of them computed before" in line for line in used] == [True] + [False] * 5
