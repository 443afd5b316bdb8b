"""Calls of tools and reasoning are told from text, however tokens split it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.door.parsers import AnswerParser, ToolCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", json.dumps({"a": 1}))


def parsed(parser: AnswerParser, parts: list[str]) -> tuple[str, str, list[ToolCall]]:
    pieces = [parser.push(part, last=at == len(parts) - 1) for at, part in enumerate(parts)]
    return (
        "".join(piece.content for piece in pieces),
        "".join(piece.reasoning for piece in pieces),
        [call for piece in pieces for call in piece.calls],
    )


CASES = [
    (" plain \n text \n", " plain \n text \n", "", []),
    (f"{CALL} and more ", "and more ", "", [ADD]),
    (CALL, "", "", [ADD]),
    (f"I will add.\n{CALL}\n{CALL}\n", "I will add.", "", [ADD, ADD]),
    ("a < b and <tool_", "a < b and <tool_", "", []),
    ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", "", []),
    (
        f'<tool_call>{{"arguments": 1}}</tool_call>{CALL}',
        '<tool_call>{"arguments": 1}</tool_call>',
        "",
        [ADD],
    ),
    ("<tool_call>{", "<tool_call>{", "", []),
    ("<think>hm < hm</think>\n\nSo: <b>", "So: <b>", "hm < hm", []),
    ("<think>endless", "", "endless", []),
    (f"<think>Add?</think>{CALL}", "", "Add?", [ADD]),
    ("text <think> is text then", "text <think> is text then", "", []),
]


@pytest.mark.parametrize(("text", "content", "reasoning", "calls"), CASES)
@given(st.data())
def test_a_text_is_parsed_alike_in_any_parts(
    text: str, content: str, reasoning: str, calls: list[ToolCall], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(text) - 1, 1)))))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(AnswerParser("hermes", "think"), parts) == (content, reasoning, calls)


def test_text_is_passed_on_as_soon_as_it_can_be_no_mark() -> None:
    parser = AnswerParser("hermes")
    assert parser.push("Hello <").content == "Hello"
    assert parser.push("b").content == " <b"


def test_calls_of_mistral_are_a_list_up_to_the_end() -> None:
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": "{}"}]'
    assert parsed(AnswerParser("mistral"), list(text)) == ("", "", [ADD, ToolCall("b", "{}")])


def test_reasoning_that_the_template_has_begun_needs_no_mark() -> None:
    parser = AnswerParser(None, "think", begins_reasoning=True)
    assert parsed(parser, ["hm</th", "ink>yes"]) == ("yes", "hm", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [('{"name": "add", "arguments": {"a": 1}}', "", [ADD]), ('{"name": "add"', '{"name": "add"', [])],
)
def test_an_answer_that_is_held_to_a_call_is_one(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parsed(AnswerParser("hermes", is_call=True), list(text)) == (content, "", calls)
