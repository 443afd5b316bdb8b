"""Reading what a model writes: calls of tools and reasoning, told from the answer as it streams.

How they are written is each model's own: a `ToolFormat` or a reasoning format is named for it (`Served`).
Text is passed on as soon as it can be no beginning of a mark, and a call once it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

__all__ = ["AnswerParser", "ReasoningFormat", "ToolCall", "ToolFormat"]

ToolFormat: TypeAlias = Literal["hermes", "mistral"]
"""`"hermes"`: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, as Qwen and Hermes write it;
`"mistral"`: `[TOOL_CALLS][{...}, ...]` up to the end."""

ReasoningFormat: TypeAlias = Literal["think"]
"""`"think"`: `<think>...</think>` before the answer; templates may have written the first mark."""

_MARKS: Mapping[str, tuple[str, str]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "think": ("<think>", "</think>"),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What some text adds to an answer: at most one of its parts of each kind, and whole calls."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class AnswerParser:
    """Tells one answer apart; `push` its text as it comes, and its end.

    Reasoning comes first, or there is none. Blanks beside calls and reasoning are left out. A call that is no
    JSON, or has no name, is text.

    Args:
        tools: How calls are written; `None` if there are none.
        reasoning: How reasoning is written; `None` if there is none.
        begins_reasoning: Whether the prompt has ended with the mark that begins reasoning.
        is_call: Whether the whole answer is one call, as a grammar has it.
    """

    def __init__(
        self,
        tools: ToolFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        begins_reasoning: bool = False,
        is_call: bool = False,
    ) -> None:
        self._tools, self._is_call = tools, is_call
        self._may_reason = reasoning is not None and not is_call
        self._inside: Literal["", "think", "call"] = "think" if begins_reasoning else ""
        self._held = self._blank = ""
        self._behind_mark = False
        self._content, self._reasoning = list[str](), list[str]()
        self._calls = list[ToolCall]()
        self.num_calls = 0

    def push(self, text: str, *, last: bool = False) -> Piece:
        """Take the next text, and return what it adds; all that is held once it is the `last`."""
        self._held += text
        if not self._is_call:
            while self._step(last=last):
                pass
        elif last and (made := _calls(f"[{self._held}]")) is not None:
            self._calls = made
        elif last:
            self._content.append(self._held)
        if last and not self._behind_mark:
            self._content.append(self._blank)
        piece = Piece("".join(self._content), "".join(self._reasoning), tuple(self._calls))
        self._content, self._reasoning, self._calls = [], [], []
        self.num_calls += len(piece.calls)
        return piece

    def _step(self, *, last: bool) -> bool:
        """Take what is before the next mark, or the mark; return whether there may be another."""
        if self._inside == "think":
            return self._reason(last=last)
        if self._inside == "call":
            return self._call(last=last)
        if self._may_reason:
            opening = _MARKS["think"][0]
            begun = self._held.lstrip()
            if begun.startswith(opening):
                self._held, self._inside = begun.removeprefix(opening), "think"
                return True
            if opening.startswith(begun) and not last:
                return False
            self._may_reason = not begun
        return self._text(last=last)

    def _text(self, *, last: bool) -> bool:
        """Pass text of the answer on, up to a call."""
        mark = _MARKS[self._tools][0] if self._tools else ""
        before, found, after = self._held.partition(mark) if mark else (self._held, "", "")
        end = len(before) - (0 if found or last else _open_end(before, mark))
        text = self._blank + before[:end]
        text = text.lstrip() if self._behind_mark else text
        whole = text.rstrip()
        self._blank = text[len(whole) :]
        if whole:
            self._content.append(whole)
            self._behind_mark = False
        self._held = after if found else before[end:]
        if found:
            self._pass_mark("call")
        return bool(found)

    def _reason(self, *, last: bool) -> bool:
        mark = _MARKS["think"][1]
        before, found, after = self._held.partition(mark)
        end = len(before) - (0 if found or last else _open_end(before, mark))
        self._reasoning.append(before[:end])
        self._held = after if found else before[end:]
        if found:
            self._may_reason = False
            self._pass_mark("")
        return bool(found)

    def _call(self, *, last: bool) -> bool:
        assert self._tools is not None, "only what has a format has marks"
        opening, closing = _MARKS[self._tools]
        body, found, after = self._held.partition(closing) if closing else (self._held, "", "")
        if not found and not last:
            return False
        if (made := _calls(body if self._tools == "mistral" else f"[{body}]")) is None:
            self._content.append(opening + body + found)
            self._behind_mark = False
        else:
            self._calls += made
        self._held, self._inside = after, ""
        return bool(found)

    def _pass_mark(self, inside: Literal["", "call"]) -> None:
        self._inside, self._blank, self._behind_mark = inside, "", True


def _open_end(text: str, mark: str) -> int:
    """Return how long an end of a text is that may be the beginning of a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)


def _calls(text: str) -> list[ToolCall] | None:
    """Return the calls of a JSON list; `None` if it is none."""
    try:
        entries: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    made = [_call_of(entry) for entry in cast("list[object]", entries)] if isinstance(entries, list) else []
    return None if not made or None in made else cast("list[ToolCall]", made)


def _call_of(entry: object) -> ToolCall | None:
    if not isinstance(entry, dict):
        return None
    fields = cast("dict[str, Any]", entry)
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters", {}))
    if not isinstance(name, str):
        return None
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
