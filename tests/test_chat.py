"""A chat is checked where it is made: it is JSON, of bounded size, in the form that templates expect."""

from __future__ import annotations

import json
import pickle
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import Chat, InvalidRequest

USER = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": [1, None, 2.5, True]}}}


class Text(str):
    """A string with a method that a template could call."""

    def erase(self) -> None: ...


def test_a_chat_is_a_copy() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = Chat(messages, tools=tools, chat_template_kwargs={"x": [1]})
    messages[0]["content"][0]["text"] = "b"
    messages.append(USER)
    tools[0]["function"] = {"name": "g"}
    assert chat.messages == ({"role": "user", "content": [{"type": "text", "text": "a"}]},)
    assert chat.tools == ({"type": "function", "function": {"name": "f"}},)
    assert chat == Chat(
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        tools=[{"type": "function", "function": {"name": "f"}}],
        chat_template_kwargs={"x": [1]},
    )


def full() -> Chat:
    return Chat(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "tool_calls": [CALL]},
        ],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"required": ["x"]}}}],
        documents=[{"title": "t", "text": "x"}],
        chat_template_kwargs={"x": [1, {"y": None}]},
    )


def containers(value: Any) -> list[Any]:
    """All objects and lists in a value, itself included."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [value] * isinstance(value, dict | list) + [one for entry in inner for one in containers(entry)]


CHANGES_OF_OBJECTS: list[Any] = [
    lambda value: value.__setitem__("role", "x"),
    lambda value: value.__delitem__(next(iter(value))),
    lambda value: value.__ior__({"role": "x"}),
    lambda value: value.clear(),
    lambda value: value.pop(next(iter(value))),
    lambda value: value.popitem(),
    lambda value: value.setdefault("new", 1),
    lambda value: value.update(role="x"),
]
CHANGES_OF_LISTS: list[Any] = [
    lambda value: value.__setitem__(0, "x"),
    lambda value: value.__setitem__(slice(0, 1), "x"),
    lambda value: value.__delitem__(0),
    lambda value: value.__iadd__(["x"]),
    lambda value: value.__imul__(2),
    lambda value: value.append("x"),
    lambda value: value.clear(),
    lambda value: value.extend(["x"]),
    lambda value: value.insert(0, "x"),
    lambda value: value.pop(),
    lambda value: value.remove(value[0]),
    lambda value: value.reverse(),
    lambda value: value.sort(),
]


@pytest.mark.parametrize("made", [lambda chat: chat, deepcopy, lambda chat: pickle.loads(pickle.dumps(chat))])
def test_a_chat_and_its_copies_cannot_be_changed(made: Any) -> None:
    chat, before = made(full()), repr_of(full())
    assert chat == full()
    inside = containers((chat.messages, chat.tools, chat.documents, chat.chat_template_kwargs))
    assert len(inside) == 17
    for value in inside:
        for change in CHANGES_OF_OBJECTS if isinstance(value, dict) else CHANGES_OF_LISTS:
            with pytest.raises(TypeError, match="read-only"):
                change(value)
    assert repr_of(chat) == before


def repr_of(chat: Chat) -> str:
    return repr((chat.messages, chat.tools, chat.documents, chat.chat_template_kwargs))


def test_equal_chats_are_the_same_key() -> None:
    one, other = full(), full()
    assert one is not other
    assert {one: "found"}[other] == "found"
    assert len({one, other, replace(one, add_generation_prompt=False), Chat([USER])}) == 3


def test_a_changed_chat_is_made_by_replace_and_checked_as_any_other() -> None:
    chat = full()
    open_ended = replace(chat, add_generation_prompt=False, continue_final_message=True)
    assert open_ended.messages == chat.messages
    assert (open_ended.continue_final_message, chat.continue_final_message) == (True, False)
    shorter = replace(chat, messages=(USER,))
    assert shorter.num_characters < chat.num_characters == open_ended.num_characters
    with pytest.raises(InvalidRequest, match="messages is empty"):
        replace(chat, messages=())


def test_texts_are_plain_ones() -> None:
    chat = Chat([{Text("role"): Text("user"), "content": Text("hi")}])
    assert [type(key) for key in chat.messages[0]] == [str, str]
    assert [type(value) for value in chat.messages[0].values()] == [str, str]


def test_what_is_none_is_not_there() -> None:
    chat = Chat([{"role": "assistant", "content": None, "name": None, "tool_calls": [CALL]}])
    assert chat.messages == ({"role": "assistant", "tool_calls": [CALL]},)


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages is empty"),
        (None, "messages is None"),
        ("hi", "messages is 'hi'"),
        (USER, "messages is {"),
        ([USER, "hi"], r"messages\[1\] is 'hi'"),
        ([USER, None], r"messages\[1\] is None"),
        ([{"content": "hi"}], r"messages\[0\]\.role is None"),
        ([{"role": 3, "content": "hi"}], r"messages\[0\]\.role is 3"),
        ([{"role": "", "content": "hi"}], r"messages\[0\]\.role is ''"),
        ([{"role": "x" * 65, "content": "hi"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is 5"),
        ([{"role": "user", "content": b"hi"}], r"messages\[0\]\.content is b'hi'"),
        ([{"role": "user", "content": {"text": "hi"}}], r"messages\[0\]\.content"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\]\.content\[0\] is 'hi'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"content\[0\] is 'image_url'"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\]\.text is 1"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\]\.content has a lone surrogate"),
        ([{"role": "user", "content": "a", "b\udfff": 1}], "lone surrogate"),
        ([{"role": "user", "content": "a", "x": float("nan")}], r"messages\[0\]\.x is nan"),
        ([{"role": "user", "content": "a", "x": [object()]}], r"messages\[0\]\.x\[0\]"),
        ([{"role": "user", "content": "a", "x": 10**400}], r"messages\[0\]\.x is 1000"),
        ([{"role": "user", "content": "a", 5: 1}], r"messages\[0\] has the key 5"),
        ([{"role": "user", "content": "a", "name": 1}], r"messages\[0\]\.name is 1"),
        ([{"role": "tool", "content": "a", "tool_call_id": 1}], "tool_call_id is 1"),
        ([{"role": "assistant", "tool_calls": "f()"}], r"tool_calls is 'f\(\)'"),
        ([{"role": "assistant", "tool_calls": ["f"]}], r"tool_calls\[0\] is 'f'"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], r"tool_calls\[0\]\.function is 'f'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}], r"tool_calls\[0\] is 1"),
    ],
)
def test_a_wrong_message_is_refused_by_the_name_of_its_field(messages: Any, named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Chat(messages)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tools": {}}, "tools is"),
        ({"tools": ["f"]}, r"tools\[0\] is 'f'"),
        ({"tools": [print]}, r"tools\[0\] is <built-in"),
        ({"tools": [{"function": {"name": 3}}]}, r"tools\[0\] is 3"),
        ({"documents": "text"}, "documents is 'text'"),
        ({"documents": ["text"]}, r"documents\[0\] is 'text'"),
        ({"add_generation_prompt": 1}, "add_generation_prompt is 1"),
        ({"continue_final_message": "content"}, "continue_final_message is 'content'"),
        ({"continue_final_message": True}, "both true"),
        ({"chat_template_kwargs": [1]}, r"chat_template_kwargs is \[1\]"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs has 'chat_template'"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has 'messages'"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs has 'a b'"),
        ({"chat_template_kwargs": {"f": print}}, r"chat_template_kwargs\.f is"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        Chat([USER], **options)


def test_a_chat_is_of_bounded_size() -> None:
    deep: Any = "x"
    for _ in range(1000):
        deep = [deep]
    loop: list[Any] = []
    loop.append(loop)
    for field in (deep, loop, [0] * 200_000, "x" * (9 << 20)):
        with pytest.raises(InvalidRequest, match="field"):
            Chat([{**USER, "field": field}])
    with pytest.raises(InvalidRequest, match=r"messages\[63\]\.content"):
        Chat([{"role": "user", "content": "x" * (1 << 17)}] * 100)


def test_what_it_shows_of_itself_is_short() -> None:
    assert repr(Chat([USER] * 3, tools=[CALL])) == "<Chat [3 messages, 1 tools]>"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


@given(
    JSON | st.binary() | st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), JSON))
)
def test_any_value_is_taken_or_refused_and_nothing_else(messages: Any) -> None:
    try:
        chat = Chat(messages)
    except InvalidRequest:
        return
    json.dumps(chat.messages, allow_nan=False).encode()
    assert hash(chat) == hash(replace(chat))
    assert all(isinstance(message["role"], str) for message in chat.messages)


@given(
    place=st.sampled_from(["messages", "tools", "documents", "chat_template_kwargs"]),
    before=st.text(),
    alone=st.sampled_from(["", "\ud800", "\udfff", "\ud83d\ude00"]),
    as_key=st.booleans(),
)
def test_text_with_a_lone_surrogate_is_refused_wherever_it_stands(
    place: str, before: str, alone: str, as_key: bool
) -> None:
    text = before + alone
    value: dict[str, Any] = {text: 1} if as_key else {"field": [text]}
    fields: dict[str, Any] = {
        "messages": [{**USER, "x": value}],
        "tools": [{"function": {"name": "f", "parameters": value}}],
        "documents": [value],
        "chat_template_kwargs": {"x": value},
    }
    chosen = {"messages": [USER]} | {place: fields[place]}
    if alone:
        with pytest.raises(InvalidRequest, match=rf"^{place}\b.* has a lone surrogate at character"):
            Chat(**chosen)
    else:
        Chat(**chosen)
