"""Calls of tools as JSON that is read while it is written: a name first, then its arguments in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["CallsReader", "Part", "PartKind", "ToolFormat", "joined", "opening_of"]

ToolFormat: TypeAlias = Literal["hermes", "mistral"]
"""`"hermes"`: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Qwen and Hermes write it;
`"mistral"`: `[TOOL_CALLS][{...}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call, up to the end."""

PartKind: TypeAlias = Literal["content", "reasoning", "call", "arguments"]

_MARKS: dict[ToolFormat | None, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    None: ("", ""),
}
_BETWEEN_CALLS = " \t\r\n,[]"
_ARGUMENTS = ("arguments", "parameters")
# Each part takes all that it may and gives nothing back: a text is read once, whatever it is.
_NAMED = re.compile(r"([\w.-]++)\s*+(?:\[CALL_ID\]\w++)?+\s*+(?:\[ARGS\])?+\s*+(?={)")
# The most characters before the arguments of a named call.
_MOST_NAME = 256


@dataclass(frozen=True, slots=True)
class Part:
    """What some text adds to an answer.

    Attributes:
        kind: `"content"` and `"reasoning"` are text, `"call"` begins a call of a function, and `"arguments"`
            goes on with the JSON of its arguments.
        text: The text, or the name of the function.
    """

    kind: PartKind
    text: str


def opening_of(tools: ToolFormat | None) -> str:
    """Return the mark that calls begin with; none if there are none."""
    return _MARKS[tools][0]


class CallsReader:
    """Reads what follows the mark that calls begin with: any number of them, up to a closing mark or the end.

    Args:
        tools: How calls are written; `None` for one call without marks.

    Attributes:
        parts: What was read since they were taken.
        raw: All that was read until the first call had begun, its mark included.
        state: `"done"` behind the closing mark; `"text"` once it is clear that no call is there.
    """

    def __init__(self, tools: ToolFormat | None) -> None:
        self.parts = list[Part]()
        self.raw, self._closing = _MARKS[tools]
        self.state: Literal["reading", "done", "text"] = "reading"
        self._tools, self._opening = tools, self.raw
        self._held = ""
        self._reader: _CallReader | _NamedCallReader | None = None
        self._begun = False

    def push(self, text: str, *, last: bool) -> str:
        """Take the next text, and return what is left of it behind the end."""
        self._held += text
        before = self._held
        while self._held and self.state == "reading":
            if self._reader is not None:
                self._read(self._reader)
            elif not self._go_between(last=last):
                break
        if not self._begun:
            self.raw += before[: len(before) - len(self._held)]
        if last and self.state == "reading":
            self.state = "done" if self._begun else "text"
        if self.state == "reading":
            return ""
        rest, self._held = self._held, ""
        return rest

    def _read(self, reader: _CallReader | _NamedCallReader) -> None:
        self._held = reader.push(self._held)
        self._begun |= reader.begun
        self.parts += reader.parts
        reader.parts = []
        if reader.state != "reading":
            self._reader = None
        if reader.state == "broken" and not self._begun:
            self.state = "text"

    def _go_between(self, *, last: bool) -> bool:
        """Take one thing that is no part of a call; return whether there was one."""
        held = self._held
        for mark in filter(None, (self._opening, self._closing)):
            if held.startswith(mark):
                self._held = held.removeprefix(mark)
                if mark == self._closing:
                    self.state = "done" if self._begun else "text"
                return True
            if mark.startswith(held) and not last:
                return False
        if held[0] in _BETWEEN_CALLS:
            self._held = held.lstrip(held[0])
        elif held[0] == "{":
            self._reader = _CallReader()
        elif self._tools == "mistral":
            self._reader = _NamedCallReader()
        elif not self._begun:
            self.state = "text"
        else:
            at = held.find(self._closing, 1) if self._closing else -1
            self._held = held[at:] if at > 0 else held[max(1, len(held) - len(self._closing) + 1) :]
        return True


class _Extent:
    """Finds the end of one JSON value, which begins with the first text that it is given."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def end(self, text: str) -> int | None:
        """Return where the value ends in the next text; `None` if it goes on behind it."""
        for at, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
                    if not self._depth:
                        return at + 1
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1 if not self._depth else at
            elif not self._depth and (character == "," or character.isspace()):
                return at
        return None


class _CallReader:
    """Reads one `{"name": ..., "arguments": ...}`, in either order.

    Its call begins once the name is known and the arguments begin; before that it may still turn out to be
    none. Arguments that are an object come as they are written, others once they are complete: a string is
    taken for the JSON that it has.

    Attributes:
        parts: What was read since they were taken.
        begun: Whether the call has begun.
        state: `"broken"` once it is no call, or ends otherwise than JSON does; `"done"` behind its end.
    """

    def __init__(self) -> None:
        self.parts = list[Part]()
        self.begun = False
        self.state: Literal["reading", "done", "broken"] = "reading"
        self._expects: Literal["object", "key", "colon", "value", "comma"] = "object"
        self._extent: _Extent | None = None
        self._streams = False
        self._key, self._kept = "", list[str]()
        self._name: str | None = None
        self._arguments: str | None = None

    def push(self, text: str) -> str:
        """Take the next text, and return what is left of it behind the end."""
        while text and self.state == "reading":
            if self._extent is not None:
                text = self._read_value(self._extent, text)
            elif text[0].isspace():
                text = text.lstrip()
            elif self._expects in ("key", "value") and not (self._expects == "key" and text[0] != '"'):
                self._begin_value(text[0])
            else:
                text = text[1:] if self._read_mark(text[0]) else text
        return text

    def _read_mark(self, mark: str) -> bool:
        """Take a mark between values; return whether it may stand there."""
        match self._expects, mark:
            case "object", "{":
                self._expects = "key"
            case "colon", ":":
                self._expects = "value"
            case "comma", ",":
                self._expects = "key"
            case (("key" | "comma"), "}"):
                self._end()
            case _:
                self.state = "broken"
                return False
        return True

    def _begin_value(self, first: str) -> None:
        self._extent, self._kept = _Extent(), []
        is_next = self._expects == "value" and self._key in _ARGUMENTS and not self.begun
        self._streams = is_next and first == "{" and self._name is not None
        if self._streams:
            self._begin()

    def _read_value(self, extent: _Extent, text: str) -> str:
        end = extent.end(text)
        read, rest = (text, "") if end is None else (text[:end], text[end:])
        if self._streams:
            self.parts.append(Part("arguments", read))
        else:
            self._kept.append(read)
        if end is not None:
            self._extent = None
            self._take_value("".join(self._kept))
        return rest

    def _take_value(self, text: str) -> None:
        if self._expects == "key":
            key = _string(text)
            self._key, self._expects = key or "", "colon"
            self.state = self.state if key is not None else "broken"
            return
        self._expects = "comma"
        if self._key == "name" and self._name is None:
            self._name = _string(text)
            if self._name is None:
                self.state = "broken"
        elif self._key in _ARGUMENTS and not self._streams and self._arguments is None:
            given = _string(text)
            self._arguments = text if given is None else given
        if self._name is not None and self._arguments is not None and not self.begun:
            self._begin()
            self.parts.append(Part("arguments", self._arguments))

    def _begin(self) -> None:
        assert self._name is not None, "a call begins once its name is known"
        self.begun = True
        self.parts.append(Part("call", self._name))

    def _end(self) -> None:
        if not self.begun and self._name is not None:
            self._begin()
            self.parts.append(Part("arguments", "{}"))
        self.state = "done" if self.begun else "broken"


class _NamedCallReader:
    """Reads one `name[ARGS]{...}`, as newer models of Mistral's write calls; otherwise as `_CallReader`."""

    def __init__(self) -> None:
        self.parts = list[Part]()
        self.begun = False
        self.state: Literal["reading", "done", "broken"] = "reading"
        self._held = ""
        self._extent = _Extent()

    def push(self, text: str) -> str:
        """Take the next text, and return what is left of it behind the end."""
        if not self.begun:
            self._held += text
            found = _NAMED.match(self._held, 0, _MOST_NAME + 1)
            if found is None:
                self.state = "broken" if len(self._held) > _MOST_NAME else "reading"
                return ""
            text, self.begun = self._held[found.end() :], True
            self.parts.append(Part("call", found[1]))
        end = self._extent.end(text)
        read, rest = (text, "") if end is None else (text[:end], text[end:])
        self.parts.append(Part("arguments", read))
        self.state = "reading" if end is None else "done"
        return rest


def _string(text: str) -> str | None:
    """Return the string that a JSON text stands for; `None` if it stands for none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def joined(parts: Sequence[Part]) -> list[Part]:
    """Return parts with neighbours of one kind as one, and none without text; calls stay apart."""
    made = list[Part]()
    for part in parts:
        if made and part.kind == made[-1].kind and part.kind != "call":
            made[-1] = Part(part.kind, made[-1].text + part.text)
        elif part.text or part.kind == "call":
            made.append(part)
    return made
