"""`/v1/chat/completions`: answers to conversations, with calls of tools and reasoning told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hotswap import Chat, Token
from hotswap.door.body import checked, of_body
from hotswap.door.calls import Part
from hotswap.door.conversation import (
    CallForm,
    ParserMaker,
    call_schema,
    for_prompt,
    with_objects,
)
from hotswap.door.errors import invalid
from hotswap.door.generation import Endpoint, Generation, UsageTotal, new_id
from hotswap.door.keys import KeyUse
from hotswap.door.logprobs import chat_logprobs
from hotswap.door.openai_answer import OpenAIAnswer, openai_usage
from hotswap.door.parsers import AnswerParser, ToolCall, gathered
from hotswap.door.protocol import ChatBody, ToolChoice
from hotswap.door.sampling import schema_of, to_sampling
from hotswap.door.wire import TextChunks

__all__ = ["Chats"]

_TEXTS = ("content", "reasoning")


class Chats(Endpoint):
    """Answers conversations."""

    async def prepare(self, body: bytes, use: KeyUse) -> Generation:
        asked = await checked(ChatBody, body)
        name = self.named(use, asked.model, asked.adapter, priority=asked.priority)
        schema, called = schema_of(asked.response_format), _called(asked)
        if schema is not None and called is not None:
            raise invalid(
                "tool_choice",
                "tool_choice asks for a call, and response_format for an answer; give one.",
            )
        if asked.top_logprobs is not None and not asked.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true.")
        has_tools = bool(asked.tools) and asked.tool_choice != "none"
        served = self.door.how(name)
        parsers = ParserMaker(served=served, has_tools=has_tools, is_call=called is not None)
        most = asked.max_completion_tokens
        fields = {} if asked.skip_special_tokens is not None else parsers.sampling
        sampling = to_sampling(
            self.door,
            name,
            asked,
            max_tokens=asked.max_tokens if most is None else most,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
            json_schema=called or schema,
            **fields,
        )
        self.check_choices(sampling.n)
        chat = await of_body(body, partial(_chat, asked, has_tools=has_tools))
        parsers = await for_prompt(
            parsers, self.door.fleet, name, chat, add_special_tokens=asked.add_special_tokens
        )
        id = new_id("chatcmpl")
        base = {
            "id": id,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": self.door.now(),
            "model": asked.model,
        }
        answer = _ChatAnswer(
            base,
            num_choices=sampling.n,
            parsers=parsers,
            include_usage=asked.include_usage,
            logprobs=bool(asked.logprobs),
        )
        return Generation(
            id=id,
            name=name,
            prompts=(chat,),
            sampling=sampling,
            stream=asked.stream,
            answer=answer,
            priority=asked.priority,
            timeout_s=asked.timeout_s,
            add_special_tokens=asked.add_special_tokens,
        )


def _chat(asked: ChatBody, *, has_tools: bool) -> Chat:
    variables = dict(asked.chat_template_kwargs or {})
    if asked.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning_effort)
    return Chat(
        [with_objects(message) for message in asked.messages],
        tools=[tool.model_dump(exclude_none=True) for tool in asked.tools or ()] if has_tools else None,
        documents=asked.documents,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        chat_template_kwargs=variables,
    )


def _called(asked: ChatBody) -> dict[str, Any] | None:
    """Return the schema of a call that the answer has to be; `None` where the model may choose."""
    choice = asked.tool_choice
    if not (choice == "required" or isinstance(choice, ToolChoice)):
        return None
    forms = [CallForm(tool.function.name, tool.function.parameters) for tool in asked.tools or ()]
    return call_schema(forms, choice.function.name if isinstance(choice, ToolChoice) else None)


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
        last = tokens[-1]
        text = last.text if len(tokens) == 1 else "".join([token.text for token in tokens])
        finish = last.finish_reason
        if not self._parsers and not self._logprobs:
            return self._chunks.chunk(index, text, finish) if text or finish else b""
        if not self._parsers:
            return self._event(index, {"content": text}, finish, chat_logprobs(tokens))
        parser = self._parsers[index]
        num_before = parser.num_calls
        parts = parser.push(text, last=finish is not None)
        delta = _delta(parts, num_before)
        reason = _reason(finish, parser)
        if not delta and reason is None and not self._logprobs:
            return b""
        return self._event(index, delta, reason, chat_logprobs(tokens) if self._logprobs else None)

    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        written = [self._choice(index, tokens) for index, tokens in enumerate(choices)]
        return {**self.base, "choices": written, "usage": openai_usage(usage)}

    def _choice(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        text, finish = "".join([token.text for token in tokens]), tokens[-1].finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reason: str | None = finish
        if self._parsers:
            parser = self._parsers[index]
            piece = gathered(parser.push(text, last=True))
            message["content"] = piece.content or (None if piece.calls else "")
            if piece.reasoning:
                message["reasoning_content"] = piece.reasoning
            if piece.calls:
                message["tool_calls"] = [_written_call(call) for call in piece.calls]
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


def _delta(parts: Sequence[Part], num_before: int) -> dict[str, Any]:
    """Return what parts add to a message; calls go on where those before have ended."""
    parsed, calls = gathered([part for part in parts if part.kind in _TEXTS]), list[dict[str, Any]]()
    for part in parts:
        if part.kind == "call":
            calls.append({"index": num_before + _begun(calls), **_written_call(ToolCall(part.text, ""))})
        elif part.kind == "arguments":
            if not calls:  # those of a call that has begun before
                calls.append({"index": num_before - 1, "function": {"arguments": ""}})
            calls[-1]["function"]["arguments"] += part.text
    delta = {"content": parsed.content, "reasoning_content": parsed.reasoning, "tool_calls": calls}
    return {name: value for name, value in delta.items() if value}


def _begun(calls: Sequence[Mapping[str, Any]]) -> int:
    return sum("id" in call for call in calls)


def _written_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's form."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": new_id("call"), "type": "function", "function": function}
