"""`/v1/chat/completions`: answers to conversations, with calls of tools and reasoning told apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from hotswap import Chat, Token
from hotswap.chat import is_large
from hotswap.door.errors import invalid
from hotswap.door.generation import Endpoint, Generation, UsageTotal, new_id
from hotswap.door.logprobs import chat_logprobs
from hotswap.door.openai_answer import OpenAIAnswer, openai_usage
from hotswap.door.parsers import AnswerParser, ToolCall
from hotswap.door.protocol import ChatBody, Tool, ToolChoice
from hotswap.door.sampling import schema_of, to_sampling
from hotswap.door.served import Served, resolve
from hotswap.door.wire import TextChunks
from hotswap.worker_threads import run_in_thread

__all__ = ["Chats", "ParserMaker", "call_schema", "make_chat", "written_call"]


@dataclass(frozen=True, slots=True)
class ParserMaker:
    """Makes the parser of each choice."""

    served: Served
    has_tools: bool
    is_call: bool

    @property
    def is_needed(self) -> bool:
        """Whether answers may have anything but text."""
        return self.is_call or self.has_tools or self.served.reasoning_format is not None

    def make(self) -> AnswerParser:
        """Return a parser for one choice."""
        return AnswerParser(
            self.served.tool_format if self.has_tools else None,
            self.served.reasoning_format,
            is_call=self.is_call,
        )


class Chats(Endpoint):
    """Answers conversations."""

    async def prepare(self, body: bytes) -> Generation:
        asked = ChatBody.model_validate_json(body)
        name = resolve(self.door.fleet, asked.model, asked.adapter)
        schema = schema_of(asked.response_format)
        called = call_schema(asked.tools, asked.tool_choice)
        if schema is not None and called is not None:
            raise invalid(
                "tool_choice",
                "tool_choice asks for a call, and response_format for an answer; give one.",
            )
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        if asked.top_logprobs is not None and not asked.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
        most = asked.max_completion_tokens
        sampling = to_sampling(
            self.door,
            name,
            asked,
            max_tokens=asked.max_tokens if most is None else most,
            logprobs=logprobs,
            json_schema=called or schema,
        )
        self.check_choices(sampling.n)
        id = new_id("chatcmpl")
        base = {
            "id": id,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": self.door.now(),
            "model": asked.model,
        }
        has_tools = bool(asked.tools) and asked.tool_choice != "none"
        answer = _ChatAnswer(
            base,
            num_choices=sampling.n,
            parsers=ParserMaker(self.door.how(name), has_tools, called is not None),
            include_usage=asked.include_usage,
            logprobs=logprobs is not None,
        )
        return Generation(
            id=id,
            name=name,
            prompts=(await make_chat(asked, has_tools=has_tools),),
            sampling=sampling,
            stream=asked.stream,
            answer=answer,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            add_special_tokens=asked.add_special_tokens,
        )


async def make_chat(asked: ChatBody, *, has_tools: bool) -> Chat:
    """Return the conversation of a body; a large one is checked in a worker thread.

    Raises:
        InvalidRequest: a message is none, by its place.
    """
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()] if has_tools else None
    make = partial(
        Chat,
        [_message(message) for message in asked.messages],
        tools=tools,
        documents=asked.documents,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=variables,
    )
    return await run_in_thread(make) if is_large(asked.messages) else make()


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
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


def call_schema(tools: Sequence[Tool] | None, choice: object) -> dict[str, Any] | None:
    """Return the schema that holds a whole answer to a call; `None` where the model may choose.

    Raises:
        Refusal: there are no tools, or none of that name.
    """
    if not (choice == "required" or isinstance(choice, ToolChoice)):
        return None
    wanted = [
        tool.function
        for tool in tools or ()
        if not isinstance(choice, ToolChoice) or tool.function.name == choice.function.name
    ]
    if not wanted:
        raise invalid("tool_choice", "tool_choice asks for a call, and tools has no such function.")
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "arguments": tool.parameters or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in wanted
    ]
    return schemas[0] if len(schemas) == 1 else {"type": "object", "anyOf": schemas}


class _ChatAnswer(OpenAIAnswer):
    def __init__(
        self,
        base: dict[str, Any],
        *,
        num_choices: int,
        parsers: ParserMaker,
        include_usage: bool,
        logprobs: bool,
    ) -> None:
        super().__init__(base, include_usage=include_usage)
        self._num_choices, self._logprobs = num_choices, logprobs
        self._parsers = [parsers.make() for _ in range(num_choices)] if parsers.is_needed else []
        self._chunks = TextChunks(
            base,
            before=b',"delta":{"content":',
            after=b'},"logprobs":null,"finish_reason":',
            end=self.chunk_end,
        )

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._event(index, role) for index in range(self._num_choices))

    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        text, finish = "".join([token.text for token in tokens]), tokens[-1].finish_reason
        if not self._parsers and not self._logprobs:
            return self._chunks.chunk(index, text, finish) if text or finish else b""
        if not self._parsers:
            return self._event(index, {"content": text}, finish, chat_logprobs(tokens))
        parser = self._parsers[index]
        num_before = parser.num_calls
        piece = parser.push(text, last=finish is not None)
        delta = {"content": piece.content, "reasoning_content": piece.reasoning}
        delta = {name: value for name, value in delta.items() if value}
        calls = [
            {"index": number, **written_call(call)} for number, call in enumerate(piece.calls, num_before)
        ]
        reason = _reason(finish, parser)
        if not delta and not calls and reason is None and not self._logprobs:
            return b""
        told = chat_logprobs(tokens) if self._logprobs else None
        return self._event(index, delta | ({"tool_calls": calls} if calls else {}), reason, told)

    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        written = [self._choice(index, tokens) for index, tokens in enumerate(choices)]
        return {**self.base, "choices": written, "usage": openai_usage(usage)}

    def _choice(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        text, finish = "".join([token.text for token in tokens]), tokens[-1].finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reason: str | None = finish
        if self._parsers:
            parser = self._parsers[index]
            piece = parser.push(text, last=True)
            message["content"] = piece.content or (None if piece.calls else "")
            if piece.reasoning:
                message["reasoning_content"] = piece.reasoning
            if piece.calls:
                message["tool_calls"] = [written_call(call) for call in piece.calls]
            reason = _reason(finish, parser)
        logprobs = chat_logprobs(tokens) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _event(
        self, index: int, delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: object = None
    ) -> bytes:
        return self.choice_event(
            {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        )


def _reason(finish_reason: str | None, parser: AnswerParser) -> str | None:
    return "tool_calls" if finish_reason == "stop" and parser.num_calls else finish_reason


def written_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call"), "type": "function", "function": function}
