"""`/v1/responses` gives OpenAI's clients the same tokens as the fleet, and refuses what takes state."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseReasoningItem

from hotswap.door.conversation import ParserMaker
from hotswap.door.errors import Refusal
from hotswap.door.generation import UsageTotal
from hotswap.door.responses import ResponsesAnswer
from hotswap.door.responses_body import ResponsesBody, messages_of
from hotswap.door.served import Served
from hotswap.request import Token
from tests.door.test_openai import B, client_of, door, source

__all__ = ["source"]

ASKED: dict[str, Any] = {"model": "m", "input": "Say the alphabet.", "temperature": 0}
TOOL: dict[str, Any] = {"type": "function", "name": "a", "parameters": B, "strict": True}
USAGE = UsageTotal(prompt_tokens=3, generated_tokens=9, reused_tokens=1)


async def test_a_client_gets_what_the_fleet_gives(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (fleet, url), client_of(url) as client:
        whole = await client.responses.create(**ASKED, instructions="Be brief.")
        right = await fleet.chat(
            "m",
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Say the alphabet."},
            ],
        )
        assert (whole.output_text, whole.status) == (right.text, "completed")
        assert whole.usage is not None
        assert whole.usage.input_tokens == right.usage.prompt_tokens
        assert whole.usage.output_tokens == len(right.tokens)
        cut = await client.responses.create(**ASKED, max_output_tokens=3)
        assert (cut.output_text, cut.status) == ("abc", "incomplete")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": B}}
        answer = await client.responses.create(**ASKED, text=form)
        assert json.loads(answer.output_text) == {"b": "c"}


async def test_a_stream_has_the_events_that_a_client_builds_the_response_of(
    source: Path, tmp_path: Path
) -> None:
    async with door(source, tmp_path) as (_, url), client_of(url) as client:
        async with client.responses.stream(**ASKED) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == ascii_lowercase
        kinds = [event.type for event in events]
        assert list(dict.fromkeys(kinds)) == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.completed",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert kinds.count("response.output_text.delta") > 5


async def test_a_function_is_called_and_its_result_goes_back(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (_, url), client_of(url) as client:
        for choice in ("required", {"type": "function", "name": "a"}):
            asked: dict[str, Any] = {**ASKED, "tools": [TOOL], "tool_choice": choice}
            whole = await client.responses.create(**asked)
            (call,) = whole.output
            assert isinstance(call, ResponseFunctionToolCall)
            assert (call.name, json.loads(call.arguments)) == ("a", {"b": "c"})
            stream = await client.responses.create(**asked, stream=True)
            events = [event async for event in stream]
            deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == call.arguments
            assert len(deltas) > 3
        items: list[Any] = [
            {"role": "user", "content": [{"type": "input_text", "text": "Say one letter."}]},
            call.to_dict(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "done"},
        ]
        answer = await client.responses.create(model="m", input=items, temperature=0, tools=[])
        assert answer.output_text == ascii_lowercase


REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": {"id": "c"}}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"max_tool_calls": 3}, "max_tool_calls"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
    ({"input": [{"type": "item_reference", "id": "x"}]}, None),
    ({"max_output_tokens": 0}, None),
    ({"extra_body": {"what": 1}}, "what"),
]


async def test_what_it_does_not_do_is_refused_by_its_name(source: Path, tmp_path: Path) -> None:
    async with door(source, tmp_path) as (fleet, url), client_of(url) as client:
        for fields, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as wrong:
                await client.responses.create(**{**ASKED, **fields})
            assert wrong.value.code
            assert wrong.value.param is not None, fields
            assert param is None or wrong.value.param == param
        assert fleet.swaps == ()


def written(text: str, finish: str = "stop") -> tuple[bytes, Response]:
    """The events of an answer that comes letter by letter, and the response at once."""
    maker = ParserMaker(served=Served(reasoning_format="think"), has_tools=True)
    tokens = [Token(id=1, index=at, text=letter) for at, letter in enumerate(text)]
    tokens.append(Token(id=0, index=len(text), finish_reason=finish))  # type: ignore[arg-type]
    base = {"id": "resp-1", "object": "response", "output": []}
    answer = ResponsesAnswer(base, maker)
    events = answer.begin() + b"".join(answer.chunk(0, [token]) for token in tokens) + answer.end(USAGE)
    whole: Any = ResponsesAnswer(base, maker).whole([tokens], USAGE)
    return events, Response.construct(**whole)


def told(events: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: ")]


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    events, whole = written(
        '<think>Hm.</think>So:<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    )
    reasoning, message, call = whole.output
    assert isinstance(reasoning, ResponseReasoningItem)
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Hm."
    assert message.type == "message"
    assert whole.output_text == "So:"
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.name, call.arguments) == ("f", '{"x": 1}')
    streamed = told(events)
    done = [event["item"]["type"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call"]
    deltas = [e["delta"] for e in streamed if e["type"] == "response.function_call_arguments.delta"]
    assert deltas == list('{"x": 1}')
    # The reasoning is counted by its tokens, its mark included.
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens == 3 + len("</think>")


LETTERS = st.text('<>/ thinktool_call{}":,ab', max_size=20)
PIECES = st.sampled_from(
    ["<think>", "</think>", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>']
)


@given(st.lists(PIECES | LETTERS, max_size=6), st.sampled_from(["stop", "length"]))
def test_a_response_at_once_is_the_one_that_a_stream_ends_with(texts: list[str], finish: str) -> None:
    events, whole = written("".join(texts), finish)
    streamed = told(events)[-1]["response"]
    assert without_ids(streamed) == without_ids(whole.to_dict())


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    items = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "output": items}


def test_an_answer_without_text_is_an_empty_message() -> None:
    events, whole = written("", "length")
    assert (whole.output_text, whole.status) == ("", "incomplete")
    assert told(events)[-1]["type"] == "response.incomplete"


def test_an_error_ends_a_stream_by_an_event() -> None:
    answer = ResponsesAnswer({"id": "resp-1"}, ParserMaker(served=Served()))
    (event,) = told(answer.failure(Refusal(502, "An engine failed.", "engine_error")))
    assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
    assert event["response"]["error"] == {"code": "engine_error", "message": "An engine failed."}


def test_reasoning_and_calls_belong_to_the_message_of_their_answer() -> None:
    thought = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    body = {
        "model": "m",
        "instructions": "Do.",
        "input": [
            {"role": "user", "content": "x"},
            thought,
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]},
            call,
            {**call, "call_id": "d"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
    }
    system, user, answer, result = messages_of(ResponsesBody.model_validate(body))
    assert (system["content"], user["content"], result["content"]) == ("Do.", "x", "1")
    assert (answer["content"], answer["reasoning_content"]) == ("So:", "Hm.")
    assert [one["id"] for one in answer["tool_calls"]] == ["c", "d"]
