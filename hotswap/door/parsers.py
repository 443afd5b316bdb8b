"""Reading what a model writes: calls of tools and reasoning, told from the answer as it streams.

How they are written is each model's own: a `ToolFormat` or a reasoning format is named for it (`Served`).
Text is passed on as soon as it can be no beginning of a mark, and a call as soon as its name is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hotswap.door.calls import CallsReader, Part, ToolFormat, joined, opening_of

__all__ = ["OPENS_REASONING", "AnswerParser", "Parsed", "ReasoningFormat", "ToolCall", "gathered"]

ReasoningFormat: TypeAlias = Literal["think"]
"""`"think"`: `<think>...</think>` before the answer; templates may have written the first mark."""

# Readers copy what they have not read yet at every step, so that they are given a little at a time.
_PIECE = 1024

OPENS_REASONING, _CLOSES_REASONING = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function, its arguments as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole answer, told apart."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])


def gathered(parts: Sequence[Part]) -> Parsed:
    """Return what parts are together."""
    texts, calls = {"content": "", "reasoning": ""}, list[ToolCall]()
    for part in parts:
        if part.kind == "call":
            calls.append(ToolCall(part.text, ""))
        elif part.kind == "arguments":
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + part.text)
        else:
            texts[part.kind] += part.text
    return Parsed(texts["content"], texts["reasoning"], calls)


class AnswerParser:
    """Tells one answer apart; `push` its text as it comes, and its end.

    Reasoning comes first, or there is none. Blanks beside calls and reasoning are left out. What begins like
    a call and turns out to be none before its arguments begin is text; behind that it stays a call, and its
    arguments may end anywhere, as those of an answer that was cut off.

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
        self._tools: ToolFormat | None = tools
        self._may_reason = reasoning is not None and not is_call
        self._is_reasoning = begins_reasoning
        self._calls = CallsReader(None) if is_call else None
        self._held = self._blank = ""
        self._behind_mark = False
        self._parts = list[Part]()
        self.num_calls = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._is_reasoning

    def push(self, text: str, *, last: bool = False) -> list[Part]:
        """Take the next text, and return what it adds, in order; all that is held once it is the `last`."""
        for at in range(0, max(len(text), 1), _PIECE):
            self._held += text[at : at + _PIECE]
            while self._step(last=last and at + _PIECE >= len(text)):
                pass
        if last and not self._behind_mark:
            self._parts.append(Part("content", self._blank))
        parts, self._parts = joined(self._parts), []
        self.num_calls += sum(part.kind == "call" for part in parts)
        return parts

    def _step(self, *, last: bool) -> bool:
        """Take what is before the next mark, or the mark; return whether there may be another."""
        if self._is_reasoning:
            return self._reason(last=last)
        if self._calls is not None:
            return self._call(self._calls, last=last)
        if self._may_reason:
            begun = self._held.lstrip()
            if begun.startswith(OPENS_REASONING):
                self._held, self._is_reasoning = begun.removeprefix(OPENS_REASONING), True
                return True
            if OPENS_REASONING.startswith(begun) and not last:
                return False
            self._may_reason = not begun
        return self._text(last=last)

    def _text(self, *, last: bool) -> bool:
        """Pass text of the answer on, up to a call."""
        mark = opening_of(self._tools)
        before, found, after = self._held.partition(mark) if mark else (self._held, "", "")
        end = len(before) - (0 if found or last else _open_end(before, mark))
        text = self._blank + before[:end]
        self._write(text.lstrip() if self._behind_mark else text)
        self._held = after if found else before[end:]
        if found:
            self._calls = CallsReader(self._tools)
        return bool(found)

    def _write(self, text: str) -> None:
        """Add text of the answer; blanks at its end wait for what follows."""
        whole = text.rstrip()
        self._blank = text[len(whole) :]
        if whole:
            self._parts.append(Part("content", whole))
            self._behind_mark = False

    def _call(self, calls: CallsReader, *, last: bool) -> bool:
        """Read on in calls; return whether they have ended."""
        self._held = calls.push(self._held, last=last)
        if calls.parts:
            self._blank, self._behind_mark = "", True
        self._parts += calls.parts
        calls.parts = []
        if calls.state == "reading":
            return False
        self._calls = None
        if calls.state == "text":
            self._write(self._blank + calls.raw)
        return True

    def _reason(self, *, last: bool) -> bool:
        mark = _CLOSES_REASONING
        before, found, after = self._held.partition(mark)
        end = len(before) - (0 if found or last else _open_end(before, mark))
        self._parts.append(Part("reasoning", before[:end]))
        self._held = after if found else before[end:]
        if found:
            self._is_reasoning = self._may_reason = False
            self._blank, self._behind_mark = "", True
        return bool(found)


def _open_end(text: str, mark: str) -> int:
    """Return how long an end of a text is that may be the beginning of a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((length for length in lengths if mark.startswith(text[-length:])), 0)
