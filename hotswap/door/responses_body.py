"""What clients may send to `/v1/responses`, and the conversation that it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Discriminator, Field, Tag

from hotswap.checks import shown
from hotswap.door.conversation import CallForm, call_schema
from hotswap.door.errors import Refusal, invalid
from hotswap.door.protocol import JsonObject, ListOf, StreamOptions, Strict

__all__ = ["ResponsesBody", "called_schema", "check_stateless", "format_schema", "messages_of", "tools_of"]


class TextPart(Strict):
    """Text of a message, or of what a call has given."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: ListOf[Any] | None = None  # of no effect, as are the log-probabilities of an earlier answer
    logprobs: ListOf[Any] | None = None


class MessageItem(Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Strict):
    """A call that an answer has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: None = None


class CallOutputItem(Strict):
    """What a call has given."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[TextPart]
    id: str | None = None
    status: str | None = None


class ReasoningText(Strict):
    """A part of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning of an answer, as it was told."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: ListOf[Any] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None


def _kind(item: object) -> str:
    kind: object = None
    if isinstance(item, dict):
        kind = cast("dict[str, object]", item).get("type", "message")
    return f"<{kind}>"  # no name, so that places in a body are told without it


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_kind),
]


class FunctionTool(Strict):
    """A function that an answer may call; tools of OpenAI's own service are not served."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionChoice(Strict):
    """An answer that calls one function."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """How an answer is written."""

    format: TextFormat | None = None
    verbosity: str | None = None  # of no effect: templates know none


class ReasoningOptions(Strict):
    """How much an answer is thought about, where a template knows of that."""

    effort: str | None = None
    summary: str | None = None  # of no effect: reasoning is told as it is
    generate_summary: str | None = None


class ResponsesBody(Strict):
    """The body of `/v1/responses`. Fields of `Sampling` beside OpenAI's have their own names."""

    model: str
    input: str | ListOf[Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    adapter: str | None = None
    priority: int = 0
    timeout_s: float | None = Field(None, gt=0)
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    # What OpenAI's clients send for its own service; of no effect here.
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # What this server does not do, refused by `check_stateless` unless it asks for nothing.
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    include: ListOf[str] | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    truncation: str | None = None


_STATELESS = "this server keeps no responses; send the whole conversation as input"
_REFUSED = {
    "store": _STATELESS,
    "background": "responses are given on the connection that asks for them",
    "previous_response_id": _STATELESS,
    "conversation": _STATELESS,
    "prompt": "this server keeps no prompts; send instructions and input",
    "include": "there is nothing to include; /v1/chat/completions gives log-probabilities",
    "max_tool_calls": "functions are called by clients alone",
    "top_logprobs": "/v1/chat/completions gives log-probabilities",
    "truncation": "the start of a conversation is not left out; shorten it",
}


def check_stateless(asked: ResponsesBody) -> None:
    """Raise a `Refusal` for what a server without state does not do."""
    for name, why in _REFUSED.items():
        if (value := getattr(asked, name)) and value != "disabled":
            raise Refusal(400, f"{name} is {shown(value)}, but {why}.", "unsupported_parameter", param=name)


def called_schema(asked: ResponsesBody) -> dict[str, Any] | None:
    """Return the schema of a call that the answer has to be; `None` where the model may choose."""
    choice = asked.tool_choice
    if not (choice == "required" or isinstance(choice, FunctionChoice)):
        return None
    forms = [CallForm(tool.name, tool.parameters) for tool in asked.tools or ()]
    return call_schema(forms, choice.name if isinstance(choice, FunctionChoice) else None)


def format_schema(asked: ResponsesBody) -> dict[str, Any] | None:
    """Return the JSON schema that the answer follows; `None` if it is free.

    Raises:
        Refusal: the form has no schema.
    """
    form = asked.text.format if asked.text is not None else None
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.schema_ is None:
        raise invalid("text.format", "text.format has no schema; give the one that the answer follows.")
    return form.schema_


def tools_of(asked: ResponsesBody) -> list[dict[str, Any]]:
    """Return the functions as templates want them."""
    return [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in asked.tools or ()
    ]


def messages_of(asked: ResponsesBody) -> list[dict[str, Any]]:
    """Return the conversation as messages: reasoning and calls belong to the message of their answer."""
    lines = list[dict[str, Any]]()
    if asked.instructions:
        lines.append({"role": "system", "content": asked.instructions})
    if isinstance(asked.input, str):
        return [*lines, {"role": "user", "content": asked.input}]
    is_open = False  # whether the last message may still get the text of its answer
    for item in asked.input:
        if isinstance(item, CallOutputItem):
            lines.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            is_open = False
        elif isinstance(item, MessageItem):
            if is_open and item.role == "assistant":
                lines[-1]["content"] = _text(item.content)
            else:
                lines.append({"role": item.role, "content": _text(item.content)})
            is_open = False
        else:
            if not lines or lines[-1]["role"] != "assistant" or isinstance(item, ReasoningItem):
                lines.append({"role": "assistant", "content": ""})
            is_open = isinstance(item, ReasoningItem)
            _add_to(lines[-1], item)
    return lines


def _add_to(line: dict[str, Any], item: CallItem | ReasoningItem) -> None:
    if isinstance(item, ReasoningItem):
        line["reasoning_content"] = "\n".join(part.text for part in item.content or ())
        return
    function = {"name": item.name, "arguments": item.arguments}
    call = {"id": item.call_id, "type": "function", "function": function}
    line["tool_calls"] = [*line.get("tool_calls", ()), call]


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
