"""What endpoints of conversations share: the prompt that a template makes, and how answers are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hotswap import Chat, Fleet
from hotswap.door.errors import invalid
from hotswap.door.parsers import OPENS_REASONING, AnswerParser
from hotswap.door.served import Name, Served

__all__ = ["CallForm", "ParserMaker", "call_schema", "for_prompt", "with_objects"]

# Of so many tokens at the end of a prompt the text is looked at.
_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class CallForm:
    """A function that an answer may call: its name, and the schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserMaker:
    """Makes the parser of each choice.

    Attributes:
        served: How the model writes calls and reasoning.
        has_tools: Whether answers may call.
        is_call: Whether a whole answer is a call.
        begins_reasoning: Whether the prompt ends with the mark that begins reasoning.
    """

    served: Served
    has_tools: bool = False
    is_call: bool = False
    begins_reasoning: bool = False

    @property
    def is_needed(self) -> bool:
        """Whether answers may have anything but text."""
        calls = self.has_tools and self.served.tool_format is not None
        return self.is_call or calls or self.served.reasoning_format is not None

    @property
    def sampling(self) -> dict[str, Any]:
        """What generating takes so that marks are seen: many models write them by special tokens."""
        return {"skip_special_tokens": False} if self.is_needed and not self.is_call else {}

    def make(self) -> AnswerParser:
        """Return a parser for one choice."""
        return AnswerParser(
            self.served.tool_format if self.has_tools else None,
            self.served.reasoning_format,
            begins_reasoning=self.begins_reasoning,
            is_call=self.is_call,
        )


async def for_prompt(
    parsers: ParserMaker, fleet: Fleet, name: Name, chat: Chat, **encoding: Any
) -> ParserMaker:
    """Return what makes the parsers of the answers to a chat.

    A model that reasons has its prompt looked at, since templates may begin the reasoning. `encoding` are
    further arguments of `encode`; errors are its.
    """
    if parsers.served.reasoning_format is None or parsers.is_call:
        return parsers
    tokens = await fleet.models.encode(name.model, chat, adapter=name.adapter, **encoding)
    end = await fleet.models.decode(
        name.model, tokens[-_END_TOKENS:], adapter=name.adapter, skip_special_tokens=False
    )
    return replace(parsers, begins_reasoning=end.rstrip().endswith(OPENS_REASONING))


def with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as templates want it: OpenAI's newer roles, and arguments that are text, by others."""
    changed = dict(message)
    if changed.get("role") == "developer":
        changed["role"] = "system"
    calls: object = changed.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_called(call) for call in cast("list[object]", calls)]
    return changed


def _called(call: object) -> object:
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    function: object = fields.get("function")
    if not isinstance(function, dict):
        return fields
    named = cast("dict[str, Any]", function)
    try:
        arguments: object = json.loads(named["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return fields
    if not isinstance(arguments, dict):
        return fields
    return {**fields, "function": {**named, "arguments": cast("dict[str, Any]", arguments)}}


def call_schema(tools: Sequence[CallForm], only: str | None) -> dict[str, Any]:
    """Return the schema that holds a whole answer to a call, of one function if `only` names it.

    Raises:
        Refusal: there are no tools, or none of that name.
    """
    wanted = [tool for tool in tools if only is None or tool.name == only]
    if not wanted:
        raise invalid("tool_choice", "tool_choice asks for a call, and tools has no such function.")
    schemas: list[dict[str, Any]] = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in wanted
    ]
    return schemas[0] if len(schemas) == 1 else {"type": "object", "anyOf": schemas}
