"""`Chat`: the messages of a conversation, which a model's own template makes a prompt of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NoReturn, TypeAlias, cast

from hotswap.checks import shown
from hotswap.errors import InvalidRequest

__all__ = ["Chat", "is_large"]

_MAX_CHARACTERS = 8 << 20
_MAX_VALUES = 1 << 16
_MAX_DEPTH = 64
# So many are checked in a few milliseconds.
_FEW_VALUES, _FEW_CHARACTERS = 1_000, 1_000_000
_MAX_INT_BITS = 1024
_MAX_ROLE_CHARACTERS = 64
# What a template is given by names of their own, and what transformers takes by them.
_RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "messages",
    "tools",
)

_OBJECTS = (dict, Mapping)  # most are dicts, which is seen sooner
_LISTS = (list, tuple)

_Path: TypeAlias = "tuple[_Path, str | int] | str"


def _refuse_change(self: object, *args: object, **kwargs: object) -> NoReturn:
    raise TypeError("A chat is read-only; make another, by Chat(...) or dataclasses.replace(chat, ...).")


_refused: Any = _refuse_change


class _Object(dict[str, Any]):
    """An object of a chat: a `dict` to templates and to `json`, which can be hashed and not changed."""

    __slots__ = ()
    __setitem__ = __delitem__ = __ior__ = _refused
    clear = pop = popitem = setdefault = update = _refused

    # `dict` sets it to None, which a method may not override for type checkers; nothing changes this one.
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return type(self), (dict(self),)  # a copy or pickle is made at once, as no entry can be set later


class _List(list[Any]):
    """A list of a chat: as `_Object` is a `dict`."""

    __slots__ = ()
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refused
    append = clear = extend = insert = pop = remove = reverse = sort = _refused

    def __hash__(self) -> int:  # type: ignore[override]  # as above, of `list`
        return hash(tuple(self))

    def __reduce__(self) -> tuple[type, tuple[list[Any]]]:
        return type(self), (list(self),)


@dataclass(frozen=True, slots=True, kw_only=True, init=False, repr=False)
class Chat:
    """A conversation as a prompt: the chat template of its model says how it is written.

    It is checked and copied when it is made, so later changes of the caller's lists do not reach it. Its own
    objects and lists refuse changes by `TypeError`, and equal chats have the same hash; `dataclasses.replace`
    makes a changed one. All values are those of JSON; anything else is an `InvalidRequest` that names the
    field.

    Args:
        messages: One or more, each with a `role` and a `content`: a string, or a list of parts
            `{"type": "text", "text": ...}`. `content` may be missing beside other fields, such as
            `tool_calls`. All fields are given to the template: `tool_calls`, `tool_call_id`, `name`,
            `reasoning_content`; those that are `None` are left out, as by `apply_chat_template`. Most
            templates want the `arguments` of a tool call as an object.
        tools: Descriptions of functions as JSON schemas, in OpenAI's form.
        documents: What a template for retrieval shows the model: objects, mostly of `title` and `text`.
        add_generation_prompt: Whether the prompt ends with the beginning of an answer.
        continue_final_message: Whether the last message is left open, and the generation continues it;
            `add_generation_prompt` is false then.
        chat_template_kwargs: Further variables of the template, such as `enable_thinking`.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] | None
    documents: tuple[Mapping[str, Any], ...] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any]
    num_characters: int = field(init=False)

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        copier = _Copier()
        put = object.__setattr__
        put(self, "messages", _messages(copier.objects("messages", messages)))
        put(self, "tools", None if tools is None else _tools(copier.objects("tools", tools)))
        put(self, "documents", None if documents is None else tuple(copier.objects("documents", documents)))
        put(self, "add_generation_prompt", _flag("add_generation_prompt", add_generation_prompt))
        put(self, "continue_final_message", _flag("continue_final_message", continue_final_message))
        put(self, "chat_template_kwargs", _variables(copier, chat_template_kwargs))
        put(self, "num_characters", copier.num_characters)
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message are both true, but a prompt ends with the "
                "last message or with a new one; give add_generation_prompt=False."
            )

    def __repr__(self) -> str:
        tools = f", {len(self.tools)} tools" if self.tools else ""
        return f"<Chat [{len(self.messages)} messages{tools}]>"


def is_large(*values: object) -> bool:
    """Whether to check and copy values of a chat may take over a few milliseconds."""
    found, at, num_characters = [*values], 0, 0
    while at < len(found) <= _FEW_VALUES and num_characters <= _FEW_CHARACTERS:
        value = found[at]
        at += 1
        if isinstance(value, str):
            num_characters += len(value)
        elif isinstance(value, dict):
            found += islice(cast("dict[object, object]", value).values(), _FEW_VALUES)
        elif isinstance(value, _LISTS):
            found += cast("Sequence[object]", value)[:_FEW_VALUES]
        elif isinstance(value, Mapping):
            return True
    return len(found) > _FEW_VALUES or num_characters > _FEW_CHARACTERS


class _Copier:
    """Copies values of JSON, and bounds what all of them have together."""

    def __init__(self) -> None:
        self.num_characters = 0
        self._num_values = 0

    def objects(self, name: str, value: object) -> Iterator[_Object]:
        if not isinstance(value, list | tuple):
            raise InvalidRequest(f"{name} is {shown(value)}; give a list of objects.")
        for at, entry in enumerate(cast("Sequence[object]", value)):
            if not isinstance(entry, Mapping):
                raise InvalidRequest(f"{name}[{at}] is {shown(entry)}; give an object.")
            yield self.copy((name, at), cast("object", entry))

    def copy(self, path: _Path, value: object, depth: int = 0) -> Any:
        self._num_values += 1
        if self._num_values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise InvalidRequest(
                f"{_name(path)} is one value too many: a chat has at most {_MAX_VALUES:,}, {_MAX_DEPTH} "
                "levels deep."
            )
        if isinstance(value, str):
            return self._text(path, value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value.bit_length() <= _MAX_INT_BITS:
            return int(value)
        if isinstance(value, float) and math.isfinite(value):
            return float(value)
        if isinstance(value, _OBJECTS):
            fields = {
                self._key(path, key): self.copy((path, str(key)), entry, depth + 1)
                for key, entry in cast("Mapping[object, object]", value).items()
            }
            return _Object(fields)
        if isinstance(value, _LISTS):
            entries = enumerate(cast("Sequence[object]", value))
            return _List([self.copy((path, at), entry, depth + 1) for at, entry in entries])
        raise InvalidRequest(f"{_name(path)} is {shown(value)}; give a value of JSON.")

    def _key(self, path: _Path, key: object) -> str:
        if not isinstance(key, str):
            raise InvalidRequest(f"{_name(path)} has the key {shown(key)}; give strings as keys.")
        return self._text(path, key)

    def _text(self, path: _Path, text: str) -> str:
        self.num_characters += len(text)
        if self.num_characters > _MAX_CHARACTERS:
            raise InvalidRequest(
                f"{_name(path)} is too long: a chat has at most {_MAX_CHARACTERS:,} characters."
            )
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise InvalidRequest(
                    f"{_name(path)} has a lone surrogate at character {exc.start}, which is no text; give "
                    "valid Unicode."
                ) from exc
        return str.__str__(text)  # without the methods of a subclass, which a template could call


def _name(path: _Path) -> str:
    """How a caller writes the place of a value: `messages[1].content`, its end if it is long."""
    parts: list[str] = []
    while not isinstance(path, str):
        path, part = path
        parts.append(f"[{part}]" if isinstance(part, int) else f".{part[:40]}")
    name = path + "".join(reversed(parts))
    return name if len(name) <= 200 else f"...{name[-200:]}"


def _messages(messages: Iterator[_Object]) -> tuple[_Object, ...]:
    checked = tuple(_message(("messages", at), message) for at, message in enumerate(messages))
    if not checked:
        raise InvalidRequest("messages is empty; give at least one message.")
    return checked


def _message(path: _Path, message: _Object) -> _Object:
    # As `apply_chat_template` has it: many templates ask whether a field is there, not whether it is None.
    if None in message.values():
        message = _Object({key: value for key, value in message.items() if value is not None})
    role = message.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= _MAX_ROLE_CHARACTERS:
        raise InvalidRequest(
            f"{_name(path)}.role is {shown(role)}; give a string, like 'user', of at most "
            f"{_MAX_ROLE_CHARACTERS} characters."
        )
    if "content" in message:
        _check_content((path, "content"), message["content"])
    elif len(message) == 1:
        raise InvalidRequest(f"{_name(path)}.content is missing; give a string, or a list of text parts.")
    for key in ("name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str):
            raise InvalidRequest(f"{_name(path)}.{key} is {shown(message[key])}; give a string.")
    if "tool_calls" in message:
        _check_calls((path, "tool_calls"), message["tool_calls"])
    return message


def _check_content(path: _Path, content: object) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{_name(path)} is {shown(content)}; give a string, or a list of text parts.")
    for at, part in enumerate(cast("list[object]", content)):
        fields = part if isinstance(part, _Object) else _Object()
        if fields.get("type") != "text":
            kind = fields.get("type", part)
            raise InvalidRequest(
                f"{_name((path, at))} is {shown(kind)}, and models are given text alone; give "
                '{"type": "text", "text": ...}.'
            )
        if not isinstance(fields.get("text"), str):
            raise InvalidRequest(f"{_name((path, at))}.text is {shown(fields.get('text'))}; give a string.")


def _check_calls(path: _Path, calls: object) -> None:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{_name(path)} is {shown(calls)}; give a list of objects.")
    for at, call in enumerate(cast("list[object]", calls)):
        _check_function((path, at), call)


def _tools(tools: Iterator[_Object]) -> tuple[_Object, ...]:
    checked = tuple(tools)
    for at, tool in enumerate(checked):
        _check_function(("tools", at), tool)
    return checked


def _check_function(path: _Path, value: object) -> None:
    """Check a function, or a call of one: an object which has it as `function`, or is it."""
    if not isinstance(value, _Object):
        raise InvalidRequest(f"{_name(path)} is {shown(value)}; give an object.")
    function = value.get("function", value)
    if not isinstance(function, _Object):
        raise InvalidRequest(f"{_name(path)}.function is {shown(function)}; give an object.")
    called = function.get("name")
    if called is not None and not isinstance(called, str):
        raise InvalidRequest(f"The name of the function of {_name(path)} is {shown(called)}; give a string.")


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidRequest(f"{name} is {shown(value)}; give true or false.")


def _variables(copier: _Copier, value: object) -> _Object:
    if value is None:
        return _Object()
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"chat_template_kwargs is {shown(value)}; give an object.")
    variables = cast("_Object", copier.copy("chat_template_kwargs", cast("object", value)))
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise InvalidRequest(
                f"chat_template_kwargs has {shown(name)}, which is no further variable of a template; leave "
                "it out."
            )
    return variables
