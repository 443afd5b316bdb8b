"""The real clients of OpenAI, over a real server, get what the fleet gives."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import anyio
import openai
import pytest
from anyio import to_thread
from openai.types.chat import ChatCompletionToolParam

from hotswap import Fleet, Model, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.backends.torch import TorchEngine
from hotswap.door import create_app, listen
from tests.runtime import alphabet

GREEDY: dict[str, Any] = {"model": "m", "temperature": 0}
HELLO: list[Any] = [{"role": "user", "content": "Say the alphabet."}]
# No other fields: the model would write the alphabet as the name of one.
ONLY: dict[str, object] = {"type": "object", "required": ["b"], "additionalProperties": False}
B = {**ONLY, "properties": {"b": {"const": "c"}}}
ADD: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "a", "description": "Says one letter.", "parameters": B},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet.checkpoint(tmp_path_factory.mktemp("alphabet"))


@asynccontextmanager
async def door(source: Path, root: Path, **options: Any) -> AsyncGenerator[tuple[Fleet, str]]:
    """A server of the alphabet, and its address."""
    fleet = Fleet(
        engines=[TorchEngine("e0", threads=1, kv_tokens=2048)],
        store=NvmeStore(root / "store"),
        models=[Model("m", source)],
        interval_s=0.1,
        **options,
    )
    async with fleet, listen(create_app(fleet), port=0) as port:
        yield fleet, f"http://127.0.0.1:{port}/v1"


async def test_an_async_client_chats(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (fleet, url), client_of(url) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        done = await client.chat.completions.create(messages=HELLO, **GREEDY)
        assert done.choices[0].message.content == ascii_lowercase
        assert done.choices[0].finish_reason == "stop"
        right = await fleet.chat("m", HELLO)
        assert done.usage is not None
        assert done.usage.prompt_tokens == right.usage.prompt_tokens
        assert done.usage.completion_tokens == len(right.tokens)
        assert done.usage.prompt_tokens_details is not None
        assert done._request_id == done.id
        # As a stream, with usage, a stop string and a limit.
        stream = await client.chat.completions.create(
            messages=HELLO, stream=True, stream_options={"include_usage": True}, stop="n", **GREEDY
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == ascii_lowercase[:13]
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        limited = await client.chat.completions.create(messages=HELLO, max_completion_tokens=3, **GREEDY)
        assert (limited.choices[0].message.content, limited.choices[0].finish_reason) == ("abc", "length")


async def test_an_async_client_gets_log_probabilities_samples_and_json(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (_, url), client_of(url) as client:
        done = await client.chat.completions.create(
            messages=HELLO, logprobs=True, top_logprobs=2, max_tokens=4, **GREEDY
        )
        told = done.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        assert [entry.token for entry in told.content] == list("abcd")
        assert all(entry.top_logprobs[0].token == entry.token for entry in told.content)
        several = [
            await client.completions.create(
                model="m", prompt="x", n=3, max_tokens=8, temperature=5.0, seed=7, logprobs=0
            )
            for _ in range(2)
        ]
        assert [choice.text for choice in several[0].choices] == [
            choice.text for choice in several[1].choices
        ]
        assert len({choice.text for choice in several[0].choices}) > 1
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": B}}
        answer = await client.chat.completions.create(messages=HELLO, response_format=form, **GREEDY)
        assert json.loads(answer.choices[0].message.content or "") == {"b": "c"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "a"}}])
async def test_an_async_client_calls_a_tool(source: Path, tmp_path: Path, choice: Any) -> None:
    async with door(source, tmp_path) as (_, url), client_of(url) as client:
        asked: dict[str, Any] = {"messages": HELLO, "tools": [ADD], "tool_choice": choice, **GREEDY}
        done = await client.chat.completions.create(**asked)
        assert done.choices[0].finish_reason == "tool_calls"
        (call,) = done.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("a", {"b": "c"})
        async with client.chat.completions.stream(**asked) as stream:
            pieces = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = await stream.get_final_completion()
        assert len(pieces) > 3  # as they are written
        (streamed,) = final.choices[0].message.tool_calls or []
        assert streamed.function.arguments == call.function.arguments
        # What was called goes back as a message, its arguments as text.
        messages = [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "done"},
        ]
        answer = await client.chat.completions.create(messages=messages, **GREEDY)
        assert answer.choices[0].message.content == ascii_lowercase


async def test_errors_are_of_the_clients_classes(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (_, url), client_of(url) as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="zz", prompt="x")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model="m", prompt="x", extra_body={"what": 1})
        assert (wrong.value.code, wrong.value.param) == ("unknown_parameter", "what")
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="m", prompt="x" * 9000)
        assert long.value.code == "context_length_exceeded"
        for asked in ({"temperature": -1.0}, {"max_tokens": 0}, {"extra_body": {"regex": "a("}}):
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="m", prompt="x", **asked)
            assert bad.value.param in ("temperature", "max_tokens", "regex")
        with pytest.raises(openai.BadRequestError):
            await client.embeddings.create(model="m", input="x")


async def test_a_full_queue_is_tried_again_and_comes_through(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path, max_waiting=1) as (_, url), client_of(url, max_retries=20) as client:
        texts: list[str] = []

        async def ask() -> None:
            done = await client.chat.completions.create(messages=HELLO, **GREEDY)
            texts.append(done.choices[0].message.content or "")

        async with anyio.create_task_group() as clients:
            for _ in range(6):
                clients.start_soon(ask)
        assert texts == [ascii_lowercase] * 6


async def endless(fleet: Fleet) -> dict[str, Any]:
    """What has the model go on behind the end of the alphabet, with text."""
    (end,) = await fleet.models.encode("m", "<|end|>", add_special_tokens=False)
    return {"max_tokens": 400, "logit_bias": {str(end): -100}, **GREEDY}


async def test_a_synchronous_client_streams_and_leaves(source: Path, tmp_path: Path) -> None:
    def use(url: str, long: dict[str, Any]) -> str:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            done = client.completions.create(prompt="x", max_tokens=2, **GREEDY)
            stream = client.completions.create(prompt="x", stream=True, **long)
            next(iter(stream))
            stream.close()
            text: str = done.choices[0].text
            return text

    async with door(source, tmp_path) as (fleet, url):
        assert await to_thread.run_sync(partial(use, url, await endless(fleet))) == "yz"
        with anyio.fail_after(60.0):
            while fleet.view().running:  # noqa: ASYNC110 - until the server has seen it
                await anyio.sleep(0.01)
        (instance,) = fleet.view().instances
        assert instance.num_running == 0


async def test_a_stream_goes_on_over_a_swap(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (fleet, url), client_of(url) as client:
        long = await endless(fleet)
        sampling = Sampling(max_tokens=400, logit_bias=long["logit_bias"])
        right = await fleet.generate("m", "abc", sampling)
        stream = await client.completions.create(prompt="abc", stream=True, **long)
        text = ""
        async for chunk in stream:
            if not text:
                await fleet.unload("e0")
            text += chunk.choices[0].text
        assert text == right.text
        assert len(fleet.swaps) == 3


@asynccontextmanager
async def client_of(url: str, *, max_retries: int = 0) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries) as client:
        yield client
