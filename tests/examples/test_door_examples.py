"""The examples that serve over HTTP do what they say."""

from __future__ import annotations

import pytest

from examples import call_by_url, mount_in_fastapi


async def test_a_door_is_mounted_in_fastapi(capsys: pytest.CaptureFixture[str]) -> None:
    await mount_in_fastapi.main()
    assert capsys.readouterr().out.splitlines() == [
        "smollm-135m: 4 tokens",
        "qwen-0.5b: 4 tokens",
        "busy: {'smollm-135m': 0, 'qwen-0.5b': 0}",
    ]


async def test_openais_client_and_a_program_with_the_url_alone_are_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await call_by_url.main()
    assert capsys.readouterr().out.splitlines() == [
        "smollm-135m: 4 tokens",
        "qwen-0.5b: 4 tokens",
        "llama-405b: model_not_found",
        "by the URL alone: ['smollm-135m', 'qwen-0.5b'], 4 tokens",
    ]
