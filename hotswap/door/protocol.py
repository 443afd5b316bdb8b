"""What clients may send to OpenAI's endpoints; a field that is not here is refused by its name."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

__all__ = [
    "ChatBody",
    "CompletionBody",
    "Detokenization",
    "GenerationBody",
    "JsonObject",
    "ListOf",
    "StreamOptions",
    "Strict",
    "Tokenization",
]

_T = TypeVar("_T")


def _writable(value: dict[str, Any]) -> dict[str, Any]:
    """Return an object that JSON can write; readers take NaN, and numbers of any size."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError as exc:
        raise PydanticCustomError("not_json", "has a number that JSON does not have") from exc
    return value


ListOf = Annotated[list[_T], Field(fail_fast=True)]
"""A list that is refused by its first wrong entry; one error for each would be a hundred times the body."""

JsonObject = Annotated[dict[str, Any], AfterValidator(_writable)]
"""An object of any fields, which answers, templates and grammars can write as JSON."""

Tokens = ListOf[Annotated[int, Field(ge=0)]]


class Strict(BaseModel):
    """A part of a body: no other fields, and values of JSON's own types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Strict):
    """What a stream tells beside its text."""

    include_usage: bool = False
    include_obfuscation: bool = False  # of no effect: chunks are not padded


class JsonSchema(Strict):
    """A schema that an answer follows."""

    name: str
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerationBody(Strict):
    """What completions and chats have in common; values are checked by `Sampling`.

    Fields beside OpenAI's are those of `Sampling` by their own names, and `adapter`, `priority` and
    `timeout_s`, which requests of a fleet have.
    """

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    regex: str | None = None
    grammar: str | None = None
    adapter: str | None = None
    priority: int = 0
    timeout_s: float | None = Field(None, gt=0)
    add_special_tokens: bool | None = None
    # What OpenAI's clients send for its own service; of no effect here.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`; one prompt, or several."""

    prompt: str | Tokens | ListOf[str] | ListOf[Tokens]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    response_format: ResponseFormat | None = None


class ToolChoiceFunction(Strict):
    """The function that an answer calls."""

    name: str


class ToolChoice(Strict):
    """An answer that calls one function."""

    type: Literal["function"]
    function: ToolChoiceFunction


class FunctionTool(Strict):
    """A function that an answer may call."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool; functions are the only ones."""

    type: Literal["function"]
    function: FunctionTool


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`; `messages` are checked by `Chat`."""

    messages: ListOf[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    documents: ListOf[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    modalities: ListOf[Literal["text"]] | None = None


class Tokenization(Strict):
    """The body of `/tokenize`: a text or a chat."""

    model: str
    prompt: str | None = None
    messages: ListOf[dict[str, Any]] | None = None
    adapter: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class Detokenization(Strict):
    """The body of `/detokenize`."""

    model: str
    tokens: Tokens
    adapter: str | None = None
    skip_special_tokens: bool = False
