"""`/v1/responses`, OpenAI's newer endpoint of conversations, without state: nothing of one is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hotswap import Chat, Sampling, Token
from hotswap.door.body import checked, of_body
from hotswap.door.calls import Part, PartKind, joined
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

_ITEMS: dict[PartKind, str] = {
    "content": "message",
    "reasoning": "reasoning",
    "call": "function_call",
    "arguments": "function_call",
}
_DELTAS = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
}
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
        self._items = _Items()
        self._number = 0
        self._num_reasoning = 0
        self._finish: str | None = None

    def begin(self) -> bytes:
        return self._event("response.created", response=self._base) + self._event(
            "response.in_progress", response=self._base
        )

    def chunk(self, index: int, tokens: Sequence[Token]) -> bytes:
        return b"".join(map(self._part, self._parts(tokens)))

    def end(self, usage: UsageTotal) -> bytes:
        written = b"" if self._items.all else self._begin_item("message")
        written += self._close(cut_off=self._finish == "length")
        response = self._response(usage)
        return written + self._event(f"response.{response['status']}", response=response)

    def failure(self, refusal: Refusal) -> bytes:
        error = {"code": refusal.code, "message": refusal.message}
        failed = {**self._base, "status": "failed", "error": error, "output": self._items.all}
        return self._event("response.failed", response=failed)

    def whole(self, choices: Sequence[Sequence[Token]], usage: UsageTotal) -> object:
        (tokens,) = choices
        items = self._items
        for part in joined(self._parts(tokens)):
            if (kind := _ITEMS[part.kind]) != items.open or part.kind == "call":
                items.close()
                items.begin(kind, part.text)
            if part.kind != "call":
                items.write(part.text)
        if not items.all:
            items.begin("message")
        items.close(cut_off=self._finish == "length")
        return self._response(usage)

    # ------------------------------------------------------------------ events

    def _parts(self, tokens: Sequence[Token]) -> list[Part]:
        """Tell the text of tokens apart, and count those of reasoning."""
        self._finish, parts = tokens[-1].finish_reason, list[Part]()
        for token in tokens:
            parts += self._parser.push(token.text, last=token.finish_reason is not None)
            self._num_reasoning += self._parser.is_reasoning
        return parts

    def _part(self, part: Part) -> bytes:
        """Go on with the item that is open, or begin that of a part."""
        kind = _ITEMS[part.kind]
        if part.kind == "call":
            return self._begin_item(kind, part.text)
        begun = b"" if self._items.open == kind else self._begin_item(kind)
        return begun + self._delta(_DELTAS[kind], part.text)

    def _begin_item(self, kind: str, name: str = "") -> bytes:
        written, items = self._close(), self._items
        item = items.begin(kind, name)
        written += self._event("response.output_item.added", output_index=items.at, item=item)
        if kind != "function_call":
            written += self._event("response.content_part.added", **items.place, part=items.part)
        return written

    def _delta(self, kind: str, text: str) -> bytes:
        self._items.write(text)
        more = {"logprobs": list[object]()} if kind == "output_text" else {}
        return self._event(f"response.{kind}.delta", **self._items.place, delta=text, **more)

    def _close(self, *, cut_off: bool = False) -> bytes:
        """End the item that is open."""
        items = self._items
        if not (kind := items.open):
            return b""
        text, part, place = items.text, items.part, items.place
        item = items.close(cut_off=cut_off)
        if kind == "function_call":
            done = {"name": item["name"], "arguments": text}
            written = self._event("response.function_call_arguments.done", **place, **done)
        else:
            more = {} if kind == "reasoning" else {"logprobs": list[object]()}
            written = self._event(f"response.{_DELTAS[kind]}.done", **place, text=text, **more)
            written += self._event("response.content_part.done", **place, part=part)
        return written + self._event("response.output_item.done", output_index=items.at, item=item)

    # ------------------------------------------------------------------ the response

    def _response(self, usage: UsageTotal) -> dict[str, Any]:
        cut_off = self._finish == "length"
        return {
            **self._base,
            "status": "incomplete" if cut_off else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
            "output": self._items.all,
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


class _Items:
    """The items of an answer, the last of which may be open.

    Attributes:
        all: The items, as responses have them.
        open: The type of the last one while it is open.
    """

    def __init__(self) -> None:
        self.all = list[dict[str, Any]]()
        self.open = ""
        self._texts = list[str]()  # of the item that is open

    @property
    def at(self) -> int:
        """The number of the last item."""
        return len(self.all) - 1

    @property
    def text(self) -> str:
        """What the item that is open has so far."""
        return "".join(self._texts)

    @property
    def place(self) -> dict[str, Any]:
        """Where the item that is open stands."""
        place = {"item_id": self.all[-1]["id"], "output_index": self.at}
        return place if self.open == "function_call" else {**place, "content_index": 0}

    @property
    def part(self) -> dict[str, Any]:
        """The content of the item that is open."""
        if self.open == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        none = list[object]()
        return {"type": "output_text", "text": self.text, "annotations": none, "logprobs": none}

    def begin(self, kind: str, name: str = "") -> dict[str, Any]:
        """Open an item of a type, of a call by the name of its function, and return it."""
        self.open, self._texts = kind, []
        self.all.append(_empty(kind, name))
        return self.all[-1]

    def write(self, text: str) -> None:
        """Add text to the item that is open."""
        self._texts.append(text)

    def close(self, *, cut_off: bool = False) -> dict[str, Any]:
        """End the item that is open, and return it as it has become; without one nothing happens."""
        if not self.open:
            return {}
        item = {**self.all[-1]}
        if self.open != "reasoning":
            item["status"] = "incomplete" if cut_off else "completed"
        if self.open == "function_call":
            item["arguments"] = self.text
        else:
            item["content"] = [self.part]
        self.open, self.all[-1] = "", item
        return item


def _empty(kind: str, name: str) -> dict[str, Any]:
    none = list[object]()
    if kind == "reasoning":
        return {"id": new_id("rs"), "type": kind, "summary": none, "content": none}
    if kind == "message":
        item = {"id": new_id("msg"), "type": kind, "status": "in_progress"}
        return {**item, "role": "assistant", "content": none}
    call = {"call_id": new_id("call"), "name": name, "arguments": ""}
    return {"id": new_id("fc"), "type": kind, "status": "in_progress", **call}
