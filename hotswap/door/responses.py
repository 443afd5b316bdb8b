"""`/v1/responses`, OpenAI's newer endpoint of conversations, without state: nothing of one is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hotswap import Chat, Sampling, Token
from hotswap.door.body import checked, of_body
from hotswap.door.calls import Part
from hotswap.door.conversation import ParserMaker, for_prompt, with_objects
from hotswap.door.errors import Refusal, invalid
from hotswap.door.generation import Answer, Endpoint, Generation, UsageTotal, new_id
from hotswap.door.keys import KeyUse
from hotswap.door.responses_body import (
    ResponsesBody,
    called_schema,
    check_stateless,
    format_schema,
    messages_of,
    tools_of,
)
from hotswap.door.sampling import sampling_of
from hotswap.door.wire import named_event

__all__ = ["Responses", "ResponsesAnswer"]

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty", "ignore_eos")


class Responses(Endpoint):
    """Answers conversations that come whole with each request."""

    async def prepare(self, body: bytes, use: KeyUse) -> Generation:
        asked = await checked(ResponsesBody, body)
        check_stateless(asked)
        name = self.named(use, asked.model, asked.adapter, priority=asked.priority)
        schema, called = format_schema(asked), called_schema(asked)
        if schema is not None and called is not None:
            raise invalid(
                "tool_choice", "tool_choice asks for a call, and text.format for an answer; give one."
            )
        has_tools = bool(asked.tools) and asked.tool_choice != "none"
        served = self.door.how(name)
        parsers = ParserMaker(served=served, has_tools=has_tools, is_call=called is not None)
        fields = {key: getattr(asked, key) for key in _SAMPLED}
        fields |= {"max_tokens": asked.max_output_tokens, "json_schema": called or schema}
        sampling = sampling_of(self.door, name, fields | parsers.sampling)
        chat = await of_body(body, partial(_chat, asked, has_tools=has_tools))
        parsers = await for_prompt(parsers, self.door.fleet, name, chat)
        id = new_id("resp")
        return Generation(
            id=id,
            name=name,
            prompts=(chat,),
            sampling=sampling,
            stream=asked.stream,
            answer=ResponsesAnswer(_base(id, self.door.now(), asked, sampling), parsers),
            priority=asked.priority,
            timeout_s=asked.timeout_s,
        )


def _chat(asked: ResponsesBody, *, has_tools: bool) -> Chat:
    variables: dict[str, Any] = dict(asked.chat_template_kwargs or {})
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        variables.setdefault("reasoning_effort", asked.reasoning.effort)
    return Chat(
        [with_objects(message) for message in messages_of(asked)],
        tools=tools_of(asked) if has_tools else None,
        chat_template_kwargs=variables,
    )


def _base(id: str, created_at: int, asked: ResponsesBody, sampling: Sampling) -> dict[str, Any]:
    """The fields that a response has from its beginning."""
    told = asked.model_dump(include={"tools", "tool_choice", "text", "reasoning"}, by_alias=True)
    return {
        "id": id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": asked.model,
        "output": list[object](),
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": told["reasoning"] or {"effort": None, "summary": None},
        "service_tier": asked.service_tier or "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": told["text"] or {"format": {"type": "text"}},
        "tool_choice": told["tool_choice"] or "auto",
        "tools": told["tools"] or [],
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": asked.user,
    }


class ResponsesAnswer(Answer):
    """Items of reasoning, of text and of calls, each with a beginning, its parts and an end.

    Args:
        base: The fields that the response has from its beginning.
        parsers: What tells its items apart.
    """

    def __init__(self, base: Mapping[str, Any], parsers: ParserMaker) -> None:
        self._base, self._parser = base, parsers.make()
        self._items = list[dict[str, Any]]()
        self._open = ""
        self._text = ""  # of the item that is open
        self._number = 0
        self._num_reasoning = 0
        self._finish: str | None = None

    def begin(self) -> bytes:
        return self._event("response.created", response=self._base) + self._event(
            "response.in_progress", response=self._base
        )

    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        self._finish, written = tokens[-1].finish_reason, b""
        for token in tokens:
            parts = self._parser.push(token.text, last=token.finish_reason is not None)
            self._num_reasoning += self._parser.is_reasoning
            written += b"".join(map(self._part, parts))
        return written

    def end(self, usage: UsageTotal) -> bytes:
        written = b"" if self._items else self._begin_item("message", _message(new_id("msg")))
        written += self._close(last=True)
        response = self._response(usage)
        return written + self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code, "message": refusal.message}
        failed = {**self._base, "status": "failed", "error": error, "output": self._items}
        return self._event("response.failed", response=failed)

    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        (tokens,) = choices
        self.chunk(0, tokens)
        self.end(usage)
        return self._response(usage)

    # ------------------------------------------------------------------ items

    def _part(self, part: Part) -> bytes:
        """Go on with the item that is open, or begin that of a part."""
        match part.kind:
            case "call":
                call = {"call_id": new_id("call"), "name": part.text, "arguments": ""}
                item = {"id": new_id("fc"), "type": "function_call", "status": "in_progress", **call}
                return self._begin_item("function_call", item)
            case "arguments":
                return self._delta("function_call_arguments", part.text)
            case "reasoning":
                begun = b""
                if self._open != "reasoning":
                    begun = self._begin_item("reasoning", _reasoning(new_id("rs")))
                return begun + self._delta("reasoning_text", part.text)
            case "content":
                is_open = self._open == "message"
                begun = b"" if is_open else self._begin_item("message", _message(new_id("msg")))
                return begun + self._delta("output_text", part.text)

    def _begin_item(self, kind: str, item: dict[str, Any]) -> bytes:
        written = self._close()
        self._open, self._text = kind, ""
        self._items.append(item)
        written += self._event("response.output_item.added", output_index=self._at, item=item)
        if kind != "function_call":
            written += self._event("response.content_part.added", **self._place, part=self._content_part())
        return written

    def _delta(self, kind: str, text: str) -> bytes:
        self._text += text
        more = {"logprobs": list[object]()} if kind == "output_text" else {}
        return self._event(f"response.{kind}.delta", **self._place, delta=text, **more)

    def _close(self, *, last: bool = False) -> bytes:
        """End the item that is open; the last one may have been cut off."""
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        item = {**self._items[-1]}
        if kind != "reasoning":
            item["status"] = "incomplete" if last and self._finish == "length" else "completed"
        if kind == "function_call":
            item["arguments"] = self._text
            done = {"name": item["name"], "arguments": self._text}
            written = self._event("response.function_call_arguments.done", **self._place, **done)
        else:
            part = self._content_part(kind)
            item["content"] = [part]
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            more = {} if kind == "reasoning" else {"logprobs": list[object]()}
            written = self._event(f"response.{name}.done", **self._place, text=self._text, **more)
            written += self._event("response.content_part.done", **self._place, part=part)
        self._items[-1] = item
        return written + self._event("response.output_item.done", output_index=self._at, item=item)

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    @property
    def _place(self) -> dict[str, Any]:
        """Where the item that is open stands."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": self._at}
        return place if item["type"] == "function_call" else {**place, "content_index": 0}

    def _content_part(self, kind: str | None = None) -> dict[str, Any]:
        if (kind or self._open) == "reasoning":
            return {"type": "reasoning_text", "text": self._text}
        none = list[object]()
        return {"type": "output_text", "text": self._text, "annotations": none, "logprobs": none}

    # ------------------------------------------------------------------ the response

    def _response(self, usage: UsageTotal) -> dict[str, Any]:
        cut_off = self._finish == "length"
        return {
            **self._base,
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.reused_tokens},
                "output_tokens": usage.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
                "total_tokens": usage.prompt_tokens + usage.generated_tokens,
            },
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number - 1, **fields})


def _message(id: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": list[object](),
    }


def _reasoning(id: str) -> dict[str, Any]:
    return {"id": id, "type": "reasoning", "summary": list[object](), "content": list[object]()}
