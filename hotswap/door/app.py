"""`create_app`: a fleet behind HTTP, as an application of ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from hotswap import Fleet
from hotswap.door.body import ClientLeft
from hotswap.door.chats import Chats
from hotswap.door.completions import Completions
from hotswap.door.errors import Refusal, refusal_of
from hotswap.door.generation import Door, log_fault
from hotswap.door.limits import Limits
from hotswap.door.listing import ModelListing
from hotswap.door.served import Served
from hotswap.door.texts import TextEndpoints
from hotswap.door.wire import to_json

__all__ = ["create_app"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    fleet: Fleet, *, limits: Limits | None = None, served: Mapping[str, Served] | None = None
) -> Starlette:
    """Return an application that serves an open fleet: OpenAI's endpoints.

    Run it inside of `async with fleet`, by itself or mounted in another application: it opens and closes
    nothing. It keeps no state but the fleet's.

    Args:
        fleet: What serves the requests.
        limits: What one request may take.
        served: How models are served, by their ids or other names; `Served()` holds for others.
    """
    door = Door(fleet, limits or Limits(), served or {})
    return Starlette(routes=_openai_routes(door), exception_handlers={HTTPException: _no_such_route})


def _openai_routes(door: Door) -> list[BaseRoute]:
    listing, texts = ModelListing(door), TextEndpoints(door)
    return [
        Route("/v1/models", answering(listing.all)),
        Route("/v1/models/{model:path}", answering(listing.one)),
        Route("/v1/completions", Completions(door), methods=["POST"]),
        Route("/v1/chat/completions", Chats(door), methods=["POST"]),
        Route("/v1/embeddings", answering(_no_embeddings), methods=["POST"]),
        Route("/tokenize", answering(texts.tokenize), methods=["POST"]),
        Route("/detokenize", answering(texts.detokenize), methods=["POST"]),
    ]


async def _no_embeddings(_: Request) -> Response:
    raise Refusal(
        400,
        "This server generates text and has no embeddings; ask a server of embedding models.",
        "unsupported_endpoint",
    )


def answering(handler: Handler) -> Handler:
    """Return a handler that answers by an error what `handler` raises."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientLeft:
            return Response(status_code=400)  # which reaches no client
        except Exception as exc:
            log_fault(exc)
            return _response(refusal_of(exc))

    return answer


def _response(refusal: Refusal) -> Response:
    return Response(to_json(refusal.body), refusal.status, refusal.headers, "application/json")


async def _no_such_route(request: Request, exc: Exception) -> Response:
    """Answer a path or a method that there is not, as other errors are answered."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not served"
    headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else {}
    return _response(Refusal(status, f"{what}; see the documentation.", "unknown_url", headers=headers))
