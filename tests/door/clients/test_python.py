"""OpenAI's synchronous client of Python gets what the asynchronous one gets, and leaves nothing behind."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import anyio
import openai
import pytest
from anyio import to_thread

from tests.door.test_openai import ADD, GREEDY, HELLO, B, client_of, door, endless
from tests.runtime import alphabet


def use(url: str) -> None:
    """Ask for all that the client knows."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        chats: Any = client.chat.completions
        done = chats.create(messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=4, **GREEDY)
        assert [entry.token for entry in done.choices[0].logprobs.content] == list("abcd")
        options = {"include_usage": True}
        stream = chats.create(messages=HELLO, stream=True, stream_options=options, stop="n", **GREEDY)
        *chunks, last = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ascii_lowercase[:13]
        assert last.usage.total_tokens > last.usage.completion_tokens
        drawn: dict[str, Any] = {"n": 3, "max_tokens": 8, "temperature": 5.0, "seed": 7}
        one, same = [client.completions.create(model="m", prompt="x", **drawn) for _ in range(2)]
        assert [choice.text for choice in one.choices] == [choice.text for choice in same.choices]
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": B}}
        answer = chats.create(messages=HELLO, response_format=form, **GREEDY)
        assert json.loads(answer.choices[0].message.content) == {"b": "c"}
        called = chats.create(messages=HELLO, tools=[ADD], tool_choice="required", **GREEDY)
        (call,) = called.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("a", {"b": "c"})
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="zz", prompt="x")
        with pytest.raises(openai.BadRequestError) as wrong:
            client.completions.create(model="m", prompt="x", extra_body={"what": 1})
        assert wrong.value.param == "what"


def ask_patiently(url: str, texts: list[str]) -> None:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=20) as client:
        done = client.chat.completions.create(messages=HELLO, **GREEDY)
        texts.append(done.choices[0].message.content)


async def test_a_synchronous_client_gets_all_that_it_knows(tmp_path: Path) -> None:
    source = alphabet.checkpoint(tmp_path / "alphabet")
    async with door(source, tmp_path, max_waiting=1) as (_, url):
        await to_thread.run_sync(partial(use, url))
        texts: list[str] = []
        async with anyio.create_task_group() as clients:
            for _ in range(5):
                clients.start_soon(to_thread.run_sync, partial(ask_patiently, url, texts))
        assert texts == [ascii_lowercase] * 5


async def test_a_cancelled_asynchronous_client_leaves_nothing_behind(tmp_path: Path) -> None:
    source = alphabet.checkpoint(tmp_path / "alphabet")
    async with door(source, tmp_path) as (fleet, url), client_of(url) as client:
        long = await endless(fleet)
        with anyio.CancelScope() as scope:
            async for _ in await client.completions.create(prompt="x", stream=True, **long):
                scope.cancel()
        assert scope.cancelled_caught
        with anyio.fail_after(60.0):
            while fleet.view().running:  # noqa: ASYNC110 - until the server has seen it
                await anyio.sleep(0.01)
        (instance,) = fleet.view().instances
        assert instance.num_running == 0
