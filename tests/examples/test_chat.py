"""A new user's first page: two chat models answer at a temperature, and say what it took."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase

import pytest

from examples import chat
from tests.runtime import alphabet


async def test_two_models_answer_and_remember(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = [
        alphabet.checkpoint(tmp_path / name, generation={"do_sample": True, "top_k": 20, "eos_token_id": 1})
        for name in ("ada", "bea")
    ]
    answers = await chat.main(checkpoints, tmp_path / "store")
    said = capsys.readouterr().out.splitlines()
    assert list(answers) == ["ada", "bea"]
    for name, (first, second) in answers.items():
        assert first.text == second.text == ascii_lowercase
        assert first.seed is not None
        assert second.usage.reused_tokens >= first.usage.prompt_tokens
        assert said.count(f"{name}: {ascii_lowercase}") == 3
    assert sum("of which were computed before" in line for line in said) == 6
