"""`/openapi.json`: what the endpoints take and answer, as OpenAPI 3.1, from the types of their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from hotswap.door.errors import is_retried
from hotswap.door.loading import LoadAdapterBody, ModelBody, UnloadAdapterBody
from hotswap.door.messages import MessagesBody
from hotswap.door.operators import (
    CancelBody,
    DrainBody,
    InstanceBody,
    MigrateBody,
    ReloadBody,
    ReplaceBody,
    RollBody,
    SwapBody,
)
from hotswap.door.protocol import ChatBody, CompletionBody, Detokenization, Tokenization
from hotswap.door.responses_body import ResponsesBody
from hotswap.door.wire import to_json

__all__ = ["ENDPOINTS", "Described", "document", "openapi"]

_EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One endpoint.

    Attributes:
        does: What it does.
        body: The type of its body; `None` if it has none.
        answer: The schema of an answer of 200, a name of `_ANSWERS`.
        media: The type of that answer.
        streams: Whether a body may ask for events instead.
        statuses: Those of errors, beside those that all have.
        query: The parameters of its query, and what they are.
    """

    does: str
    body: type[BaseModel] | None = None
    answer: str = "AnyAnswer"
    media: str = "application/json"
    streams: bool = False
    statuses: tuple[int, ...] = ()
    query: Mapping[str, str] | None = None


_GENERATES = (400, 404, 408, 409, 413, 415, 429, 502, 503, 504)
_READS_BODY = (400, 404, 408, 409, 413, 415, 502, 503)
_FOR_OPERATORS = (400, 404, 409, 503)


def _verb(does: str, body: type[BaseModel]) -> Described:
    return Described(does=does, body=body, statuses=(*_READS_BODY, 429, 504))


ENDPOINTS: dict[tuple[str, str], Described] = {
    ("get", "/v1/models"): Described(
        does="List models and adapters.", answer="ModelListAnswer", statuses=(503,)
    ),
    ("get", "/v1/models/{model}"): Described(
        does="Tell of a model.", answer="ModelAnswer", statuses=(404, 503)
    ),
    ("post", "/v1/completions"): Described(
        does="Continue prompts.",
        body=CompletionBody,
        answer="CompletionAnswer",
        streams=True,
        statuses=_GENERATES,
    ),
    ("post", "/v1/chat/completions"): Described(
        does="Answer a conversation.",
        body=ChatBody,
        answer="CompletionAnswer",
        streams=True,
        statuses=_GENERATES,
    ),
    ("post", "/v1/responses"): Described(
        does="Answer a conversation, in the form of OpenAI's responses, without state.",
        body=ResponsesBody,
        answer="ResponseAnswer",
        streams=True,
        statuses=_GENERATES,
    ),
    ("post", "/v1/messages"): Described(
        does="Answer a conversation, in the form of Anthropic's messages.",
        body=MessagesBody,
        answer="MessageAnswer",
        streams=True,
        statuses=_GENERATES,
    ),
    ("post", "/tokenize"): Described(
        does="Encode a text or a conversation.",
        body=Tokenization,
        answer="TokenizedAnswer",
        statuses=(*_READS_BODY, 429),
    ),
    ("post", "/detokenize"): Described(
        does="Decode token ids.",
        body=Detokenization,
        answer="DetokenizedAnswer",
        statuses=(*_READS_BODY, 429),
    ),
    ("post", "/admin/swap"): _verb("Turn an instance to a model, or unload it.", SwapBody),
    ("post", "/admin/drain"): _verb("Empty an instance of requests; it stays closed.", DrainBody),
    ("post", "/admin/reopen"): _verb("Let requests come to an instance again.", InstanceBody),
    ("post", "/admin/migrate"): _verb("Move a request.", MigrateBody),
    ("post", "/admin/roll"): _verb("Give a model new weights.", RollBody),
    ("post", "/admin/replace"): _verb("Put a new engine in the place of another.", ReplaceBody),
    ("post", "/admin/reload"): _verb("Apply what has changed in the file of the server.", ReloadBody),
    ("post", "/admin/cancel"): _verb("End a request.", CancelBody),
    ("get", "/admin/view"): Described(does="Show the fleet.", statuses=_FOR_OPERATORS),
    ("get", "/admin/swaps"): Described(does="Show the last swaps.", statuses=_FOR_OPERATORS),
    ("get", "/admin/migrations"): Described(does="Show the last moves.", statuses=_FOR_OPERATORS),
    ("get", "/admin/events"): Described(
        does="Tell the fleet's events as they happen, behind a number if one is given.",
        answer="EventAnswer",
        media=_EVENTS,
        statuses=_FOR_OPERATORS,
        query={"after": "The number of the last event that is known."},
    ),
    ("get", "/models"): Described(does="List the models.", answer="ModelListAnswer", statuses=(503,)),
    ("post", "/models/load"): _verb("Load a model, as llama.cpp's router does.", ModelBody),
    ("post", "/models/unload"): _verb("Unload a model, as llama.cpp's router does.", ModelBody),
    ("get", "/models/sse"): Described(
        does="Tell the loads of models, as llama.cpp's router does.",
        answer="EventAnswer",
        media=_EVENTS,
        statuses=_FOR_OPERATORS,
    ),
    ("post", "/v1/load_lora_adapter"): Described(
        does="Let requests name an adapter, as vLLM does.",
        body=LoadAdapterBody,
        answer="Text",
        media="text/plain",
        statuses=(*_READS_BODY, 403),
    ),
    ("post", "/v1/unload_lora_adapter"): Described(
        does="Let no new request name an adapter, as vLLM does.",
        body=UnloadAdapterBody,
        answer="Text",
        media="text/plain",
        statuses=_READS_BODY,
    ),
    ("get", "/live"): Described(does="Say that the process answers."),
    ("get", "/health"): Described(does="Say whether the fleet is open.", statuses=(503,)),
    ("get", "/ready"): Described(
        does="Say whether requests should come here; 503 has the reasons.",
        statuses=(404,),
        query={"model": "The model that is asked about."},
    ),
    ("get", "/metrics"): Described(
        does="Give the metrics as Prometheus reads them.",
        answer="Text",
        media="text/plain",
        statuses=(404,),
    ),
}
"""What is served, by its method and path; endpoints that refuse everything are left out."""

_WHOLE, _TEXT = {"type": "integer"}, {"type": "string"}


def _object(**properties: object) -> dict[str, object]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list(of: object) -> dict[str, object]:
    return {"type": "array", "items": of}


_ANSWERS: dict[str, object] = {
    "AnyAnswer": {"type": "object"},
    "Text": _TEXT,
    # Of streams, that of each event.
    "EventAnswer": {"type": "object", "required": ["data"], "properties": {"data": _TEXT, "event": _TEXT}},
    "Error": _object(
        error=_object(
            message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]}
        )
    ),
    "MessageError": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "ModelAnswer": _object(
        id=_TEXT,
        object={"const": "model"},
        created=_WHOLE,
        owned_by=_TEXT,
        root=_TEXT,
        parent={"type": ["string", "null"]},
        max_model_len=_WHOLE,
        status=_object(value={"enum": ["loaded", "loading", "unloading", "unloaded", "failed"]}),
        hotswap={"type": "object"},
    ),
    "ModelListAnswer": _object(
        object={"const": "list"}, data=_list({"$ref": "#/components/schemas/ModelAnswer"})
    ),
    "CompletionAnswer": _object(
        id=_TEXT,
        object={"enum": ["text_completion", "chat.completion"]},
        created=_WHOLE,
        model=_TEXT,
        choices=_list(_object(index=_WHOLE, finish_reason=_TEXT)),
        usage=_object(prompt_tokens=_WHOLE, completion_tokens=_WHOLE, total_tokens=_WHOLE),
    ),
    "ResponseAnswer": _object(
        id=_TEXT, object={"const": "response"}, model=_TEXT, output=_list({"type": "object"})
    ),
    "MessageAnswer": _object(
        id=_TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=_TEXT,
        content=_list({"type": "object"}),
        usage=_object(input_tokens=_WHOLE, output_tokens=_WHOLE),
    ),
    "TokenizedAnswer": _object(count=_WHOLE, max_model_len=_WHOLE, tokens=_list(_WHOLE)),
    "DetokenizedAnswer": _object(prompt=_TEXT),
}


# Of answers that clients try again by themselves: one of these says when, or that they need not.
_RETRY_HEADERS = {
    "retry-after": {"description": "Seconds after which to try again.", "schema": _WHOLE},
    "retry-after-ms": {"description": "The same in milliseconds, where it is known.", "schema": _WHOLE},
    "x-should-retry": {
        "description": "Trying again is of no use; there is no retry-after then.",
        "schema": {"const": "false"},
    },
}


async def openapi(_: Request) -> Response:
    """Give the document."""
    return Response(_text(), media_type="application/json")


@cache
def _text() -> bytes:
    return to_json(document())


def document() -> dict[str, Any]:
    """Return the document of all endpoints."""
    bodies = sorted(
        {of.body for of in ENDPOINTS.values() if of.body is not None}, key=lambda kind: kind.__name__
    )
    _, made = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), described in ENDPOINTS.items():
        paths.setdefault(path, {})[method] = _operation(path, described)
    return {
        "openapi": "3.1.0",
        "info": {"title": "hotswap", "version": version("hotswap")},
        "paths": paths,
        "security": [{}, {"bearer": []}, {"key": []}],
        "components": {
            "schemas": {**made["$defs"], **_ANSWERS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, described: Described) -> dict[str, Any]:
    content = {described.media: {"schema": _ref(described.answer)}}
    if described.streams:
        content[_EVENTS] = {"schema": _ref("EventAnswer")}
    error = _ref("MessageError" if path == "/v1/messages" else "Error")
    errors = {"application/json": {"schema": {"anyOf": [error, _ref("Error")]}}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    for status in sorted({401, 403, 405, 421, *described.statuses}):
        responses[str(status)] = {"description": "An error.", "content": errors}
        if is_retried(status):
            responses[str(status)]["headers"] = _RETRY_HEADERS
    if path == "/ready":
        not_ready = {"application/json": {"schema": _ref("AnyAnswer")}}
        responses["503"] = {"description": "Not ready, and why.", "content": not_ready}
    operation: dict[str, Any] = {"summary": described.does, "responses": responses}
    named = [("path", "model", "The model.")] if "{model}" in path else []
    named += [("query", name, what) for name, what in (described.query or {}).items()]
    if named:
        operation["parameters"] = [
            {"in": where, "name": name, "description": what, "required": where == "path", "schema": _TEXT}
            for where, name, what in named
        ]
    if described.body is not None:
        body = {"application/json": {"schema": _ref(described.body.__name__)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
