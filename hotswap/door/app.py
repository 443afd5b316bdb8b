"""`create_app`: a fleet behind HTTP, as an application of ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from starlette._utils import get_route_path  # what routes are found by
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from hotswap import Fleet, HotswapError
from hotswap.door.body import ClientLeft
from hotswap.door.chats import Chats
from hotswap.door.completions import Completions
from hotswap.door.errors import Refusal, refusal_of
from hotswap.door.generation import Door, log_fault
from hotswap.door.health import Health
from hotswap.door.keys import ApiKey, Guard, use_of
from hotswap.door.limits import Limits
from hotswap.door.listing import ModelListing
from hotswap.door.loading import AdapterLoading, ModelEvents, ModelLoading
from hotswap.door.messages import Messages
from hotswap.door.metrics import Metrics
from hotswap.door.openapi import openapi
from hotswap.door.operators import EventsEndpoint, Operators
from hotswap.door.responses import Responses
from hotswap.door.served import Served
from hotswap.door.settings import Settings
from hotswap.door.summary import Summaries
from hotswap.door.texts import TextEndpoints
from hotswap.door.ui import Page
from hotswap.door.wire import to_json

__all__ = ["app_of", "create_app"]

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def create_app(
    fleet: Fleet,
    *,
    limits: Limits | None = None,
    served: Mapping[str, Served] | None = None,
    keys: Sequence[ApiKey] = (),
    hosts: Sequence[str] | None = None,
    metrics: Metrics | None = None,
    adapter_roots: Sequence[Path] = (),
) -> Starlette:
    """Return an application that serves an open fleet: OpenAI's endpoints, and an operator's.

    Run it inside of `async with fleet`, by itself or mounted in another application: it opens and closes
    nothing.

    Args:
        fleet: What serves the requests.
        limits: What one request may take.
        served: How models are served, by their ids or other names; `Served()` holds for others.
        keys: Those of clients and of operators. Without one of an operator, `/admin` and `/metrics` are for
            callers on this machine alone; without one of a client, the rest is for everything that gets here.
        hosts: The names by which the server may be called; `None` for any.
        metrics: What `/metrics` gives; `None` for nothing.
        adapter_roots: The directories that operators may load adapters from; none lets them load none.
    """
    settings = Settings(
        limits=limits or Limits(),
        served=served or {},
        keys=tuple(keys),
        hosts=None if hosts is None else tuple(hosts),
        adapter_roots=tuple(adapter_roots),
    )
    return app_of(Door(fleet, settings), metrics)


def app_of(door: Door, metrics: Metrics | None = None) -> Starlette:
    """Return the application of a door, whose settings may change while it serves."""
    generating: dict[str, ASGIApp] = {
        "/v1/completions": Completions(door),
        "/v1/chat/completions": Chats(door),
        "/v1/responses": Responses(door),
        "/v1/messages": Messages(door),
    }
    return Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()),
            *_openai_routes(door),
            *_operators_routes(door),
            *_health_routes(door, metrics),
            Route("/ui", answering(Page(door.ring).page)),
        ],
        middleware=[Middleware(Guard, door.ring), Middleware(Shortcut, generating)],
        exception_handlers={HTTPException: _no_such_route},
    )


class Shortcut:
    """Calls endpoints that write for every token themselves; what lies behind wraps each of their writes.

    Args:
        app: What is called for everything else.
        endpoints: By their paths; all take POST.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        endpoint = self._endpoints.get(get_route_path(scope)) if is_post else None
        await (endpoint or self._app)(scope, receive, send)


def _openai_routes(door: Door) -> list[BaseRoute]:
    listing, texts = ModelListing(door), TextEndpoints(door)
    return [
        Route("/v1/models", answering(listing.all)),
        Route("/v1/models/{model:path}", answering(listing.one)),
        Route("/v1/embeddings", answering(_no_embeddings), methods=["POST"]),
        Route("/tokenize", answering(texts.tokenize), methods=["POST"]),
        Route("/detokenize", answering(texts.detokenize), methods=["POST"]),
    ]


def _operators_routes(door: Door) -> list[BaseRoute]:
    operators = Operators(door)
    verbs = {
        "swap": operators.swap,
        "drain": operators.drain,
        "reopen": operators.reopen,
        "migrate": operators.migrate,
        "replace": operators.replace,
        "roll": operators.roll,
        "cancel": operators.cancel,
        "reload": operators.reload,
    }
    views = {"view": operators.view, "swaps": operators.swaps, "migrations": operators.migrations}
    return [
        *(Route(f"/admin/{name}", for_operators(verb), methods=["POST"]) for name, verb in verbs.items()),
        *(Route(f"/admin/{name}", for_operators(view)) for name, view in views.items()),
        *_loading_routes(door),
        Route("/admin/events", EventsEndpoint(door), methods=["GET"]),
        Route("/admin/summary", for_operators(Summaries(door.fleet).summary)),
    ]


def _loading_routes(door: Door) -> list[BaseRoute]:
    models, adapters = ModelLoading(door), AdapterLoading(door)
    return [
        Route("/models", answering(ModelListing(door).all)),
        Route("/models/load", for_operators(models.load), methods=["POST"]),
        Route("/models/unload", for_operators(models.unload), methods=["POST"]),
        Route("/models/sse", ModelEvents(door), methods=["GET"]),
        Route("/v1/load_lora_adapter", for_operators(adapters.load), methods=["POST"]),
        Route("/v1/unload_lora_adapter", for_operators(adapters.unload), methods=["POST"]),
    ]


def _health_routes(door: Door, metrics: Metrics | None) -> list[BaseRoute]:
    health = Health(door, metrics)
    return [
        Route("/openapi.json", answering(openapi)),
        Route("/live", answering(health.live)),
        Route("/health", answering(health.health)),
        Route("/ready", answering(health.ready)),
        Route("/metrics", answering(health.metrics)),
    ]


async def _no_embeddings(_: Request) -> Response:
    raise Refusal(
        400,
        "This server generates text and has no embeddings; ask a server of embedding models.",
        "unsupported_endpoint",
    )


def for_operators(handler: Handler) -> Handler:
    """The same as `answering`, with all that an error says."""
    return answering(handler, to_operator=True)


def answering(handler: Handler, *, to_operator: bool = False) -> Handler:
    """Return a handler that answers by an error what `handler` raises."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientLeft:
            return Response(status_code=400)  # which reaches no client
        except Exception as exc:
            if not to_operator or not isinstance(exc, HotswapError):
                log_fault(exc)
            told = exc if to_operator else use_of(request.scope).told(exc)
            return _response(refusal_of(told, to_operator=to_operator))

    return answer


def _response(refusal: Refusal) -> Response:
    return Response(to_json(refusal.body), refusal.status, refusal.headers, "application/json")


async def _no_such_route(request: Request, exc: Exception) -> Response:
    """Answer a path or a method that there is not, as other errors are answered."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    what = f"{request.method} {request.url.path} is not served"
    headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else {}
    return _response(Refusal(status, f"{what}; see the documentation.", "unknown_url", headers=headers))
