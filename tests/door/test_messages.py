"""`/v1/messages` gives the same tokens as the fleet, in the form of Anthropic's clients."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from hotswap import Adapter, Chat, Fleet, ModelId, Sampling
from hotswap.abc import ChatTemplate, TextSettings, Tokenizer
from hotswap.door import create_app
from hotswap.door.conversation import ParserMaker
from hotswap.door.errors import Refusal
from hotswap.door.generation import UsageTotal
from hotswap.door.messages import MessagesAnswer
from hotswap.door.served import Served
from hotswap.door.wire import to_json
from hotswap.offline.virtual_time import virtual_time
from hotswap.request import Token
from tests.door.support import client_of
from tests.runtime.support import Idle, idle, sim_fleet, store_of
from tests.runtime.test_text import WithTokenizer

PATH = "/v1/messages"


class Plain:
    """A template that writes contents one after another."""

    def render(self, chat: Chat) -> str:
        return "".join(message["content"] for message in chat.messages)


class Ascii:
    """One token is one character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token % 128) for token in tokens)


class Guarding(Ascii):
    """Notes the threads in which it makes templates safe."""

    def __init__(self) -> None:
        self.threads = set[int]()

    def guarding(self, template: ChatTemplate) -> ChatTemplate:
        self.threads.add(threading.get_ident())
        return template


class WithTemplate(WithTokenizer):
    async def text_settings(self, model: ModelId) -> TextSettings:
        return TextSettings(chat_template=Plain())

    async def adapter_settings(self, adapter: Adapter) -> TextSettings:
        return TextSettings()


@asynccontextmanager
async def door(tokenizer: Tokenizer | None = None) -> AsyncGenerator[tuple[Fleet, httpx.AsyncClient]]:
    async with sim_fleet("a", store=WithTemplate(store_of("a"), tokenizer), scheduler=Idle()) as fleet:
        await fleet.swap("e0", to="a")
        async with client_of(create_app(fleet)) as client:
            yield fleet, client
        idle(fleet)


def asked(**fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    return {"model": "a", "system": "cd", "messages": said, "max_tokens": 20, "temperature": 0, **fields}


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


@virtual_time
async def test_a_message_has_what_the_fleet_gives() -> None:
    async with door() as (fleet, client):
        right = await fleet.generate("a", "cdab", Sampling(max_tokens=20))
        whole = (await client.post(PATH, json=asked())).json()
        assert whole["content"] == [{"type": "text", "text": right.text}]
        assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "a")
        assert whole["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[right.finish_reason]
        assert whole["usage"]["output_tokens"] == len(right.tokens)
        told = events_of((await client.post(PATH, json=asked(stream=True))).text)
        assert [name for name, _ in told if name != "content_block_delta"] == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert all(value["type"] == name for name, value in told)
        deltas = [value["delta"]["text"] for name, value in told if name == "content_block_delta"]
        assert "".join(deltas) == right.text


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (asked(model="zz"), 404, "not_found_error"),
        (asked(what=1), 400, "invalid_request_error"),
        (asked(max_tokens=0), 400, "invalid_request_error"),
        (asked(messages=[{"role": "user", "content": [{"type": "image"}]}]), 400, "invalid_request_error"),
    ],
)
@virtual_time
async def test_errors_have_the_form_of_its_clients(body: dict[str, Any], status: int, kind: str) -> None:
    async with door() as (_, client):
        response = await client.post(PATH, json=body)
        assert response.status_code == status
        assert response.json()["type"] == "error"
        assert response.json()["error"]["type"] == kind


@virtual_time
async def test_a_stop_sequence_is_named() -> None:
    async with door(Ascii()) as (fleet, client):
        right = await fleet.generate("a", "cdab", Sampling(max_tokens=20))
        stop = right.text[5:7]
        body = asked(stop_sequences=["no such text", stop])
        whole = (await client.post(PATH, json=body)).json()
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
        assert whole["content"][0]["text"] == right.text[: right.text.index(stop)]
        told = events_of((await client.post(PATH, json={**body, "stream": True})).text)
        (last,) = [value for name, value in told if name == "message_delta"]
        assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
        other = (await client.post(PATH, json=asked())).json()
        assert other["stop_sequence"] is None


@virtual_time
async def test_calls_and_their_results_go_to_the_template() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "b"}]}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    async with door() as (fleet, client):
        answer = (await client.post(PATH, json=asked(messages=said))).json()
        right = await fleet.generate("a", "cdab", Sampling(max_tokens=20))
        assert answer["content"][0]["text"] == right.text


@virtual_time
async def test_reasoning_that_the_prompt_begins_is_told_apart() -> None:
    async with door(Ascii()) as (fleet, _):
        served = {"a": Served(reasoning_format="think")}
        said = [{"role": "user", "content": "ab<think>\n"}]
        right = await fleet.generate("a", "ab<think>\n", Sampling(max_tokens=20, skip_special_tokens=False))
        async with client_of(create_app(fleet, served=served)) as client:
            body = {"model": "a", "messages": said, "max_tokens": 20, "temperature": 0}
            chat = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            assert (chat["reasoning_content"], chat["content"]) == (right.text, "")
            thought = (await client.post(PATH, json=body)).json()["content"]
            assert thought[0]["thinking"] == right.text
            assert [block["type"] for block in thought] == ["thinking", "text"]


@virtual_time
async def test_templates_are_made_safe_beside_the_event_loop() -> None:
    tokenizer = Guarding()
    async with door(tokenizer) as (_, client):
        assert (await client.post(PATH, json=asked())).status_code == 200
    assert tokenizer.threads
    assert threading.get_ident() not in tokenizer.threads


def test_a_call_is_a_block_of_its_own() -> None:
    text = 'So.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    answer = MessagesAnswer("msg-1", "a", ParserMaker(served=Served(), has_tools=True))
    parts = [Token(id=1, index=at, text=letter) for at, letter in enumerate(text)]
    parts.append(Token(id=0, index=len(text), finish_reason="stop"))
    usage = UsageTotal(prompt_tokens=3, generated_tokens=9, reused_tokens=1)
    written = answer.begin() + b"".join(answer.chunk(0, [token]) for token in parts) + answer.end(usage)
    told = events_of(written.decode())
    started = [value["content_block"]["type"] for name, value in told if name == "content_block_start"]
    assert started == ["text", "tool_use"]
    assert [value["index"] for name, value in told if name == "content_block_stop"] == [0, 1]
    # The arguments come as they are written, a token at a time.
    deltas = [value["delta"] for name, value in told if name == "content_block_delta"]
    assert [d["partial_json"] for d in deltas if d["type"] == "input_json_delta"] == list('{"x": 1}')
    (last,) = [value for name, value in told if name == "message_delta"]
    assert last["delta"]["stop_reason"] == "tool_use"
    assert last["usage"] == {"input_tokens": 2, "cache_read_input_tokens": 1, "output_tokens": 9}
    refusal = Refusal(502, "An engine failed.", "engine_error")
    assert events_of(answer.failure(refusal).decode())[0][1]["error"]["type"] == "api_error"


@pytest.mark.parametrize(
    "arguments", ['{"x": NaN}', '{"x": 1e400}', '{"x": ' + "9" * 5000 + "}", "[1]", "[" * 5000, '{"x']
)
def test_arguments_that_are_no_object_of_json_end_no_answer(arguments: str) -> None:
    answer = MessagesAnswer("msg-1", "a", ParserMaker(served=Served(tool_format="mistral"), has_tools=True))
    text = f'[TOOL_CALLS][{{"name": "f", "arguments": {json.dumps(arguments)}}}]'
    usage = UsageTotal(prompt_tokens=3, generated_tokens=9, reused_tokens=1)
    whole = answer.whole([[Token(id=1, index=0, text=text, finish_reason="stop")]], usage)
    (block,) = json.loads(to_json(whole))["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "f", {})
