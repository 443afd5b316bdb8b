"""OpenAI's client of npm, over a real server, gets what the Python clients get."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase

import anyio
import pytest

from tests.door.clients.environment import needs_npm_client, node_modules
from tests.door.test_openai import door
from tests.patience import PATIENCE_S
from tests.runtime import alphabet


@needs_npm_client
async def test_the_npm_client_gets_all_that_it_knows(tmp_path: Path) -> None:
    source = alphabet.checkpoint(tmp_path / "alphabet")
    async with door(source, tmp_path, max_waiting=1) as (fleet, url):
        (end,) = await fleet.models.encode("m", "<|end|>", add_special_tokens=False)
        script = Path(__file__).with_name("client.mjs")
        with anyio.fail_after(PATIENCE_S):
            ran = await anyio.run_process(
                ["node", str(script), str(node_modules()), url, str(end)], check=False
            )
            while fleet.view().running:  # noqa: ASYNC110 - until the server has seen who has left
                await anyio.sleep(0.01)
        assert ran.returncode == 0, ran.stderr.decode()
        told = json.loads(ran.stdout)
    assert told.pop("aborted") >= 1
    assert told == {
        "whole": [ascii_lowercase, "stop", 27],
        "stream": [ascii_lowercase[:13], True, True],
        "samples": [True, True],
        "logprobs": 8,
        "chatLogprobs": list("abcd"),
        "tool": ["tool_calls", "a", {"b": "c"}],
        "streamedTool": {"b": "c"},
        "json": {"b": "c"},
        "models": ["m"],
        "errors": [
            ["NotFoundError", 404, "model_not_found", "model"],
            ["BadRequestError", 400, "unknown_parameter", "what"],
            ["BadRequestError", 400, "context_length_exceeded", "prompt"],
            ["BadRequestError", 400, "invalid_value", "temperature"],
        ],
        "retried": [ascii_lowercase] * 6,
    }


@pytest.mark.skipif(not Path("/usr/bin/curl").exists(), reason="needs curl")
async def test_curl_shows_a_stream_as_it_comes(tmp_path: Path) -> None:
    source = alphabet.checkpoint(tmp_path / "alphabet")
    body = json.dumps({"model": "m", "prompt": "x", "temperature": 0, "max_tokens": 3, "stream": True})
    async with door(source, tmp_path) as (_, url):
        command = ["curl", "-sN", f"{url}/completions", "-H", "content-type: application/json", "-d", body]
        ran = await anyio.run_process(command)
    *events, end = [line for line in ran.stdout.decode().splitlines() if line]
    assert end == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "yz"
