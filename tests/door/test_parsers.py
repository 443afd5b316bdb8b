"""Calls of tools and reasoning are told from text, however tokens split it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.door.calls import Part, ToolFormat
from hotswap.door.parsers import AnswerParser, ToolCall, gathered

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ADD = ToolCall("add", json.dumps({"a": 1}))


def parsed(parser: AnswerParser, parts: list[str]) -> tuple[str, str, list[ToolCall]]:
    found = [piece for at, part in enumerate(parts) for piece in parser.push(part, last=at == len(parts) - 1)]
    answer = gathered(found)
    assert parser.num_calls == len(answer.calls)
    return answer.content, answer.reasoning, answer.calls


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
    ("a \n<tool_call>no json", "a \n<tool_call>no json", "", []),
    ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", "", [ADD]),
    ('<tool_call>{"name": "add"}</tool_call>x', "x", "", [ToolCall("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": {"a', "", "", [ToolCall("add", '{"a')]),
    (CALL.replace("1", '"</tool_call>\\"}"'), "", "", [ToolCall("add", '{"a": "</tool_call>\\"}"}')]),
    (CALL.replace("{", '{"id": [1, "}"], ', 1), "", "", [ADD]),
    (CALL.replace("}\n</", "} what </") + "then", "then", "", [ADD]),
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
    assert gathered(parser.push("Hello <")).content == "Hello"
    assert gathered(parser.push("b")).content == " <b"


@pytest.mark.parametrize(
    ("parser", "before"),
    [
        (AnswerParser("hermes"), '<tool_call>{"name": "add", "arguments": '),
        (AnswerParser("mistral"), '[TOOL_CALLS][{"name": "add", "arguments": '),
        (AnswerParser("mistral"), "[TOOL_CALLS]add[ARGS]"),
        (AnswerParser(is_call=True), '{"name": "add", "arguments": '),
    ],
)
def test_arguments_are_passed_on_as_they_are_written(parser: AnswerParser, before: str) -> None:
    assert parser.push(before) == []
    assert parser.push('{"a') == [Part("call", "add"), Part("arguments", '{"a')]
    for letter in '": 1}':
        assert parser.push(letter) == [Part("arguments", letter)]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": "{}"}]',
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]\n[TOOL_CALLS][{"name": "b"}]',
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]b[CALL_ID]x1[ARGS]{}',
        '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]b{}',
    ],
)
def test_calls_of_mistral_go_up_to_the_end(text: str) -> None:
    for parts in (list(text), [text]):
        assert parsed(AnswerParser("mistral"), parts) == ("", "", [ADD, ToolCall("b", "{}")])


@given(st.text('<>/[]{}":,\\ think_calTOL_CSarguments1', max_size=60), st.data())
def test_no_text_is_lost_or_fails(text: str, data: st.DataObject) -> None:
    formats: list[ToolFormat | None] = ["hermes", "mistral", None]
    tools = data.draw(st.sampled_from(formats))
    answer = AnswerParser(tools, data.draw(st.sampled_from(["think", None])))
    content, reasoning, calls = parsed(answer, [*text, ""])
    if not calls and not reasoning:
        assert content == text


MANY = 100_000


@pytest.mark.parametrize("tools", ["hermes", "mistral", None])
@pytest.mark.parametrize(
    "text",
    [
        "[TOOL_CALLS]add" + " " * MANY,
        "[TOOL_CALLS]" + "a" * MANY + "[ARGS]",
        "[TOOL_CALLS]" + "a[CALL_ID]" * MANY,
        "[TOOL_CALLS]" + ", " * MANY,
        "<tool_call>" + ", " * MANY,
        '<tool_call>{"id": "' + "a" * MANY,
        "<tool_call>{" + '"a": 1, ' * MANY,
        "<tool_call>" * MANY,
        "<think" + "<" * MANY,
        " " * MANY,
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_text_is_read_in_steps_of_its_length(tools: ToolFormat | None, text: str) -> None:
    # In steps of the square of its length none of these would end.
    assert parsed(AnswerParser(tools, "think"), [text]) == (text, "", [])


def test_what_follows_a_call_is_read_in_steps_of_its_length() -> None:
    text = CALL.removesuffix("</tool_call>") + "{ ," * MANY
    assert parsed(AnswerParser("hermes"), [text]) == ("", "", [ADD])


@pytest.mark.parametrize("size", [250, 251, 252, 300])
def test_the_name_of_a_call_is_as_long_in_one_part_as_in_many(size: int) -> None:
    text = "[TOOL_CALLS]" + "a" * size + "[ARGS]{}"
    assert parsed(AnswerParser("mistral"), [text]) == parsed(AnswerParser("mistral"), list(text))


def test_reasoning_that_the_template_has_begun_needs_no_mark() -> None:
    parser = AnswerParser(None, "think", begins_reasoning=True)
    assert parsed(parser, ["hm</th", "ink>yes"]) == ("yes", "hm", [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [('{"name": "add", "arguments": {"a": 1}}', "", [ADD]), ('{"name": "add"', '{"name": "add"', [])],
)
def test_an_answer_that_is_held_to_a_call_is_one(text: str, content: str, calls: list[ToolCall]) -> None:
    assert parsed(AnswerParser("hermes", is_call=True), list(text)) == (content, "", calls)
