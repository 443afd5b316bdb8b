"""`/v1/messages`, as clients of Anthropic's API speak it: stateless answers to conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from hotswap import Chat, Token
from hotswap.door.body import checked, of_body
from hotswap.door.calls import Part
from hotswap.door.conversation import CallForm, ParserMaker, call_schema, for_prompt
from hotswap.door.errors import Refusal
from hotswap.door.generation import Answer, Endpoint, Generation, UsageTotal, new_id
from hotswap.door.keys import KeyUse
from hotswap.door.parsers import Parsed, ToolCall, gathered
from hotswap.door.protocol import JsonObject, ListOf, Strict
from hotswap.door.sampling import sampling_of
from hotswap.door.wire import named_event

__all__ = ["Messages", "MessagesAnswer"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class TextBlock(Strict):
    """Text of a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # of no effect: all prefixes are kept


class ThinkingBlock(Strict):
    """Reasoning of an answer, as it was told."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(Strict):
    """A call that an answer has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonObject
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Strict):
    """What a call has given."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ListOf[TextBlock] = ""
    is_error: bool = False
    cache_control: dict[str, Any] | None = None


Block = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | ListOf[Block]


class ToolBody(Strict):
    """A function that an answer may call."""

    name: str
    description: str | None = None
    input_schema: JsonObject
    cache_control: dict[str, Any] | None = None


class ToolChoiceBody(Strict):
    """Whether an answer may call, or has to."""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesBody(Strict):
    """The body of `/v1/messages`."""

    model: str
    messages: ListOf[Message] = Field(min_length=1)
    max_tokens: int
    system: str | ListOf[TextBlock] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: ListOf[str] | None = None
    tools: ListOf[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    metadata: dict[str, Any] | None = None


class Messages(Endpoint):
    """Answers conversations."""

    async def prepare(self, body: bytes, use: KeyUse) -> Generation:
        asked = await checked(MessagesBody, body)
        name = self.named(use, asked.model)
        has_tools = bool(asked.tools) and (asked.tool_choice is None or asked.tool_choice.type != "none")
        called = _called(asked)
        served = self.door.how(name)
        parsers = ParserMaker(served=served, has_tools=has_tools, is_call=called is not None)
        fields = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "stop": asked.stop_sequences,
            "json_schema": called,
            **parsers.sampling,
        }
        sampling = sampling_of(self.door, name, fields)
        chat = await of_body(body, partial(_chat, asked, has_tools=has_tools))
        parsers = await for_prompt(parsers, self.door.fleet, name, chat)
        id = new_id("msg")
        return Generation(
            id=id,
            name=name,
            prompts=(chat,),
            sampling=sampling,
            stream=asked.stream,
            answer=MessagesAnswer(id, asked.model, parsers),
        )

    def refused(self, refusal: Refusal) -> object:
        return _error(refusal)


def _chat(asked: MessagesBody, *, has_tools: bool) -> Chat:
    messages = [*_system(asked.system), *(line for one in asked.messages for line in _lines(one))]
    return Chat(messages, tools=[_tool(tool) for tool in asked.tools or ()] if has_tools else None)


def _called(asked: MessagesBody) -> dict[str, Any] | None:
    """Return the schema of a call that the answer has to be; `None` where the model may choose."""
    choice = asked.tool_choice
    if choice is None or choice.type not in ("any", "tool"):
        return None
    forms = [CallForm(tool.name, tool.input_schema) for tool in asked.tools or ()]
    return call_schema(forms, (choice.name or "") if choice.type == "tool" else None)


def _system(system: str | list[TextBlock] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    text = system if isinstance(system, str) else "\n".join(block.text for block in system)
    return [{"role": "system", "content": text}]


def _lines(message: Message) -> list[dict[str, Any]]:
    """Return a message as templates want it: results of calls as messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
        for block in message.content
        if isinstance(block, ToolResultBlock)
    ]
    text = "\n".join(block.text for block in message.content if isinstance(block, TextBlock))
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in message.content
        if isinstance(block, ToolUseBlock)
    ]
    thought = "\n".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock))
    more = {"tool_calls": calls, "reasoning_content": thought}
    own = [{"role": message.role, "content": text, **{name: value for name, value in more.items() if value}}]
    return [*results, *(own if text or calls or not results else [])]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: ToolBody) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


class MessagesAnswer(Answer):
    """Blocks of text and of calls, each with a beginning, its parts and an end."""

    def __init__(self, id: str, model: str, parsers: ParserMaker) -> None:
        self._id, self._model = id, model
        self._parser = parsers.make()
        self._num_blocks = 0
        self._open = ""
        self._finish: str | None = None

    def begin(self) -> bytes:
        message = {**self._message(), "content": list[object](), "usage": _usage(None)}
        return named_event("message_start", {"type": "message_start", "message": message})

    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        self._finish = tokens[-1].finish_reason
        text = "".join([token.text for token in tokens])
        return b"".join(map(self._part, self._parser.push(text, last=self._finish is not None)))

    def end(self, usage: UsageTotal) -> bytes:
        delta = {"stop_reason": self._reason(usage), "stop_sequence": usage.stop}
        told = {"type": "message_delta", "delta": delta, "usage": _usage(usage)}
        return (
            self._close()
            + named_event("message_delta", told)
            + named_event("message_stop", {"type": "message_stop"})
        )

    def failure(self, refusal: Refusal) -> bytes:
        return named_event("error", _error(refusal))

    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        (tokens,) = choices
        self._finish = tokens[-1].finish_reason
        parsed = gathered(self._parser.push("".join([token.text for token in tokens]), last=True))
        return {
            **self._message(),
            "content": _blocks(parsed),
            "stop_reason": self._reason(usage),
            "stop_sequence": usage.stop,
            "usage": _usage(usage),
        }

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _reason(self, usage: UsageTotal) -> str:
        if self._finish == "length":
            return "max_tokens"
        if usage.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._parser.num_calls else "end_turn"

    def _part(self, part: Part) -> bytes:
        """Go on with the block that is open, or begin that of a part."""
        if part.kind == "arguments":
            return self._delta({"type": "input_json_delta", "partial_json": part.text})
        if part.kind == "call":
            return self._begin_block("tool_use", _tool_use(part.text, {}))
        kind = "thinking" if part.kind == "reasoning" else "text"
        begun = b"" if self._open == kind else self._begin_block(kind, _text_block(kind, ""))
        return begun + self._delta({"type": f"{kind}_delta", kind: part.text})

    def _begin_block(self, kind: str, block: Mapping[str, Any]) -> bytes:
        closed, self._open = self._close(), kind
        self._num_blocks += 1
        started = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}
        return closed + named_event("content_block_start", started)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        told = {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}
        return named_event("content_block_delta", told)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return named_event(
            "content_block_stop", {"type": "content_block_stop", "index": self._num_blocks - 1}
        )


def _blocks(parsed: Parsed) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if parsed.reasoning:
        blocks.append(_text_block("thinking", parsed.reasoning))
    if parsed.content or not parsed.calls:
        blocks.append(_text_block("text", parsed.content))
    return blocks + [_tool_use(call.name, _input(call)) for call in parsed.calls]


def _text_block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _tool_use(name: str, given: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_id("toolu"), "name": name, "input": given}


def _input(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call; none if the model has written no object that JSON has."""
    try:
        given: object = json.loads(call.arguments)
        json.dumps(given, allow_nan=False)
    except (ValueError, RecursionError):  # cut off, or with numbers that JSON does not have
        return {}
    return cast("dict[str, Any]", given) if isinstance(given, dict) else {}


def _usage(usage: UsageTotal | None) -> dict[str, int]:
    if usage is None:  # before the prompt's tokens are known to the answer
        return {"input_tokens": 0, "output_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens - usage.reused_tokens,
        "cache_read_input_tokens": usage.reused_tokens,
        "output_tokens": usage.generated_tokens,
    }


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = _KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}
