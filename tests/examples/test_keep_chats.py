"""Two chats that take turns on one engine have little of their history computed again."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import keep_chats
from tests.runtime import alphabet


async def test_two_chats_find_their_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = [alphabet.checkpoint(tmp_path / name, generation={"top_k": 20}) for name in ("ada", "bea")]
    used = await keep_chats.main(checkpoints, tmp_path / "store")
    assert len(used) == 6
    for earlier, later in zip(used, used[2:], strict=False):  # of the same chat
        assert later.prompt_tokens > earlier.prompt_tokens
        # The answer is written into the next prompt by the template, perhaps in other tokens.
        assert later.reused_tokens >= earlier.prompt_tokens - 32
    assert "KV blocks" in capsys.readouterr().out
