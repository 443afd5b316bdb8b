"""Bodies are checked in steps of their length, and what no JSON can answer is refused by its place."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from pydantic import BaseModel, ValidationError, model_validator

from hotswap.door.body import checked
from hotswap.door.errors import refusal_of
from hotswap.door.openapi import ENDPOINTS
from hotswap.door.protocol import CompletionBody, Strict
from hotswap.offline.virtual_time import virtual_time
from tests.door.test_messages import door

BODIES = sorted({of.body for of in ENDPOINTS.values() if of.body is not None}, key=lambda body: body.__name__)
SAID = [{"role": "user", "content": "ab"}]


def lists_of(schema: object) -> Iterator[Mapping[str, Any]]:
    """The schemas of all lists in a schema of pydantic's."""
    if isinstance(schema, dict):
        entries = cast("dict[str, Any]", schema)
        if entries.get("type") == "list":
            yield entries
        for name, entry in entries.items():
            if name != "metadata":
                yield from lists_of(entry)
    elif isinstance(schema, list | tuple):
        for entry in cast("list[Any]", schema):
            yield from lists_of(entry)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_every_list_of_a_body_is_refused_by_its_first_wrong_entry(body: type[BaseModel]) -> None:
    for found in lists_of(body.__pydantic_core_schema__):
        assert found.get("fail_fast"), found


def test_a_body_of_many_wrong_entries_makes_few_errors() -> None:
    with pytest.raises(ValidationError) as found:
        CompletionBody.model_validate({"model": "a", "prompt": [-1] * 300_000})
    assert found.value.error_count() < 10
    assert refusal_of(found.value).param == "prompt"


def test_of_many_unknown_fields_none_is_named() -> None:
    unknown = {f"x{number}": 1 for number in range(2000)}
    with pytest.raises(ValidationError) as found:
        CompletionBody.model_validate({"model": "a", "prompt": "x", **unknown})
    refusal = refusal_of(found.value)
    assert (refusal.status, refusal.param) == (400, None)
    assert "2,000 places" in refusal.message


SCHEMA = {"type": "object", "properties": {"x": {"maximum": "NUMBER"}}}
SHORT = {"max_tokens": 2}
TOOL = {"type": "function", "name": "f", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "name": "f", "schema": SCHEMA}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": "NUMBER"}}
ODD: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {"prompt": "a", "temperature": "NUMBER"}, "temperature"),
    ("/v1/chat/completions", {"messages": SAID, "tools": [CHAT_TOOL]}, "tools.0.function.parameters"),
    (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [CHAT_TOOL], "tool_choice": "none"},
        "tools.0.function.parameters",
    ),
    ("/v1/chat/completions", {"messages": [{**SAID[0], "x": "NUMBER"}]}, "messages[0].x"),
    (
        "/v1/responses",
        {
            "input": "a",
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
            "tool_choice": "none",
        },
        "tools.0.parameters",
    ),
    ("/v1/responses", {"input": "a", "text": {"format": FORMAT}}, "text.format.schema"),
    (
        "/v1/messages",
        {"max_tokens": 2, "messages": SAID, "tools": [{"name": "f", "input_schema": SCHEMA}]},
        "",
    ),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "assistant", "content": [CALL]}]}, ""),
]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize(("path", "fields", "param"), ODD)
@virtual_time
async def test_numbers_that_json_does_not_have_are_refused(
    path: str, fields: dict[str, Any], param: str, number: str
) -> None:
    async with door() as (_, client):
        body = json.dumps({"model": "a", **fields}).replace('"NUMBER"', number)
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        told = answer.json()
        if path == "/v1/messages":
            assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        else:
            assert told["error"]["param"] == param


@virtual_time
async def test_what_is_refused_is_shown_in_a_few_characters() -> None:
    async with door() as (_, client):
        answer = await client.post(
            "/v1/responses", json={"model": "a", "input": "a", "prompt": {"id": "x" * 100_000}}
        )
        assert answer.json()["error"]["param"] == "prompt"
        assert len(answer.text) < 500


class Noted(Strict):
    """A body that notes where it was checked."""

    x: str
    thread: int = 0

    @model_validator(mode="after")
    def _note(self) -> Noted:
        self.thread = threading.get_ident()
        return self


async def test_a_long_body_is_checked_beside_the_event_loop() -> None:
    for size, is_beside in ((10, False), (100_000, True)):
        body = await checked(Noted, json.dumps({"x": "a" * size}).encode())
        assert (body.thread != threading.get_ident()) is is_beside
