"""`/v1/messages`, as clients of Anthropic's API speak it: stateless answers to conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from hotswap import Chat, Token
from hotswap.chat import is_large
from hotswap.door.errors import Refusal
from hotswap.door.generation import Answer, Endpoint, Generation, UsageTotal, new_id
from hotswap.door.parsers import AnswerParser, Piece, ToolCall
from hotswap.door.protocol import Strict
from hotswap.door.sampling import sampling_of
from hotswap.door.served import Served, resolve
from hotswap.door.wire import named_event
from hotswap.worker_threads import run_in_thread

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


class ToolUseBlock(Strict):
    """A call that an answer has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolResultBlock(Strict):
    """What a call has given."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False
    cache_control: dict[str, Any] | None = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class Message(Strict):
    """A message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolBody(Strict):
    """A function that an answer may call."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ToolChoiceBody(Strict):
    """Whether an answer may call."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class MessagesBody(Strict):
    """The body of `/v1/messages`."""

    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int
    system: str | list[TextBlock] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    metadata: dict[str, Any] | None = None


class Messages(Endpoint):
    """Answers conversations."""

    async def prepare(self, body: bytes) -> Generation:
        asked = MessagesBody.model_validate_json(body)
        name = resolve(self.door.fleet, asked.model)
        fields = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "stop": asked.stop_sequences,
        }
        sampling = sampling_of(self.door, name, fields)
        has_tools = bool(asked.tools) and (asked.tool_choice is None or asked.tool_choice.type != "none")
        messages = [*_system(asked.system), *(line for one in asked.messages for line in _lines(one))]
        tools = [_tool(tool) for tool in asked.tools or ()] if has_tools else None

        def make() -> Chat:
            return Chat(messages, tools=tools)

        chat = await run_in_thread(make) if is_large(messages) else make()
        id = new_id("msg")
        answer = MessagesAnswer(id, asked.model, self.door.how(name), has_tools=has_tools)
        return Generation(
            id=id, name=name, prompts=(chat,), sampling=sampling, stream=asked.stream, answer=answer
        )

    def refused(self, refusal: Refusal) -> object:
        return _error(refusal)


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
    own = [{"role": message.role, "content": text, **({"tool_calls": calls} if calls else {})}]
    return [*results, *(own if text or calls or not results else [])]


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _tool(tool: ToolBody) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


class MessagesAnswer(Answer):
    """Blocks of text and of calls, each with a beginning, its parts and an end."""

    def __init__(self, id: str, model: str, served: Served, *, has_tools: bool) -> None:
        self._id, self._model = id, model
        self._parser = AnswerParser(served.tool_format if has_tools else None, served.reasoning_format)
        self._num_blocks = 0
        self._open = ""
        self._finish: str | None = None

    def begin(self) -> bytes:
        message = {**self._message(), "content": list[object](), "usage": _usage(None)}
        return named_event("message_start", {"type": "message_start", "message": message})

    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        self._finish = tokens[-1].finish_reason
        text = "".join([token.text for token in tokens])
        piece = self._parser.push(text, last=self._finish is not None)
        parts = self._part("thinking", piece.reasoning), self._part("text", piece.content)
        return b"".join((*parts, *map(self._call, piece.calls)))

    def end(self, usage: UsageTotal) -> bytes:
        delta = {"stop_reason": self._reason(), "stop_sequence": None}
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
        piece = self._parser.push("".join([token.text for token in tokens]), last=True)
        return {
            **self._message(),
            "content": _blocks(piece),
            "stop_reason": self._reason(),
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

    def _reason(self) -> str:
        if self._finish == "length":
            return "max_tokens"
        return "tool_use" if self._parser.num_calls else "end_turn"

    def _part(self, kind: Literal["text", "thinking"], text: str) -> bytes:
        if not text:
            return b""
        begun = b""
        if self._open != kind:
            begun = self._begin_block(kind, {"type": kind, kind: ""})
        return begun + self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> bytes:
        empty: dict[str, object] = {}
        block = {"type": "tool_use", "id": new_id("toolu"), "name": call.name, "input": empty}
        begun = self._begin_block("tool_use", block)
        return (
            begun + self._delta({"type": "input_json_delta", "partial_json": call.arguments}) + self._close()
        )

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


def _blocks(piece: Piece) -> list[dict[str, Any]]:
    blocks = list[dict[str, Any]]()
    if piece.reasoning:
        blocks.append({"type": "thinking", "thinking": piece.reasoning})
    if piece.content or not piece.calls:
        blocks.append({"type": "text", "text": piece.content})
    return blocks + [
        {"type": "tool_use", "id": new_id("toolu"), "name": call.name, "input": _input(call)}
        for call in piece.calls
    ]


def _input(call: ToolCall) -> object:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return {}


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
