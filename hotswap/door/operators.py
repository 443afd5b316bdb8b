"""`/admin`: what operators do with a fleet, see of it, and are told as it happens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, cast

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotswap import EventStream, Fleet, FleetEvent
from hotswap.door.body import ClientLeft, checked, read_body, while_connected
from hotswap.door.errors import Refusal, invalid, refusal_of
from hotswap.door.generation import Door
from hotswap.door.protocol import Strict
from hotswap.door.settings import Setup
from hotswap.door.wire import STREAM_HEADERS, comment, send_json, to_json

__all__ = ["EventsEndpoint", "Operators", "to_plain"]

# Between two signs of life of a stream in which nothing happens.
QUIET_S = 15.0
# The last records of a kind that are shown.
MAX_RECORDS = 1000

B = TypeVar("B", bound=Strict)


class SwapBody(Strict):
    """A swap, or with `model: null` an unload."""

    instance: str
    model: str | None = None
    deadline_s: float = 0.0
    reason: str = "operator"


class DrainBody(Strict):
    """A drain."""

    instance: str
    deadline_s: float | None = None
    reason: str = "operator"


class InstanceBody(Strict):
    """An instance."""

    instance: str


class MigrateBody(Strict):
    """A move of a request."""

    request: str
    to: str
    method: Literal["kv", "tokens"] | None = None
    reason: str = "operator"


class RollBody(Strict):
    """New weights of a model."""

    model: str
    to: str
    streams: Literal["pinned", "moved"] = "pinned"
    reason: str = "operator"


class ReplaceBody(Strict):
    """A new engine in the place of another."""

    instance: str
    deadline_s: float | None = None
    reason: str = "operator"


class ReloadBody(Strict):
    """A set-up that is read again."""


class CancelBody(Strict):
    """A request that is ended."""

    request: str


class Operators:
    """The verbs and views of operators. A verb answers once it is done, and goes on if its client leaves."""

    def __init__(self, door: Door) -> None:
        self._door = door

    @property
    def _fleet(self) -> Fleet:
        return self._door.fleet

    async def _body(self, request: Request, kind: type[B]) -> B:
        body = await read_body(request.scope, request.receive, self._door.limits)
        return await checked(kind, body)

    async def swap(self, request: Request) -> Response:
        """Turn an instance to a model, or unload it."""
        body = await self._body(request, SwapBody)
        if body.model is None:
            record = await self._fleet.unload(body.instance, deadline_s=body.deadline_s, reason=body.reason)
        else:
            record = await self._fleet.swap(
                body.instance, to=body.model, deadline_s=body.deadline_s, reason=body.reason
            )
        return json_response(record)

    async def drain(self, request: Request) -> Response:
        """Empty an instance of requests; it stays closed."""
        body = await self._body(request, DrainBody)
        return json_response(
            await self._fleet.drain(body.instance, deadline_s=body.deadline_s, reason=body.reason)
        )

    async def reopen(self, request: Request) -> Response:
        """Let requests come to an instance again."""
        body = await self._body(request, InstanceBody)
        self._fleet.reopen(body.instance)
        return json_response({})

    async def migrate(self, request: Request) -> Response:
        """Move a request."""
        body = await self._body(request, MigrateBody)
        return json_response(
            await self._fleet.migrate(body.request, to=body.to, method=body.method, reason=body.reason)
        )

    async def replace(self, request: Request) -> Response:
        """Put a new engine in the place of another, as the set-up describes that."""
        body = await self._body(request, ReplaceBody)
        engine = self._setup.engine_for(body.instance)
        record = await self._fleet.replace(
            body.instance, engine, deadline_s=body.deadline_s, reason=body.reason
        )
        return json_response({"instance": engine.id, "drain": record})

    async def reload(self, request: Request) -> Response:
        """Apply what has changed in the set-up."""
        await self._body(request, ReloadBody)
        return json_response({"changes": await self._setup.reload()})

    @property
    def _setup(self) -> Setup:
        if self._door.setup is None:
            raise Refusal(404, "This server was made by a program, and has no file to read.", "no_file")
        return self._door.setup

    async def roll(self, request: Request) -> Response:
        """Give a model new weights."""
        body = await self._body(request, RollBody)
        rolled = await self._fleet.roll(body.model, to=body.to, streams=body.streams, reason=body.reason)
        return json_response({"instances": rolled})

    async def cancel(self, request: Request) -> Response:
        """End a request."""
        body = await self._body(request, CancelBody)
        self._fleet.cancel(body.request)
        return json_response({})

    async def view(self, _: Request) -> Response:
        """Show the whole fleet."""
        return json_response(self._fleet.view())

    async def swaps(self, request: Request) -> Response:
        """Show the last swaps, or the `?last=` ones, oldest first."""
        return _records(request, self._fleet.swaps)

    async def migrations(self, request: Request) -> Response:
        """Show the last moves, or the `?last=` ones, oldest first."""
        return _records(request, self._fleet.migrations)


class EventsEndpoint:
    """`/admin/events`: the fleet's events as server-sent ones, for any number of readers.

    A reader that was cut off goes on behind the number in `Last-Event-ID`, which browsers send by themselves,
    or in `?after=`. The stream ends when the fleet has closed.
    """

    def __init__(self, door: Door) -> None:
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one reader."""
        try:
            events = self._door.fleet.events(_after(Request(scope)))
        except Exception as exc:
            refusal = refusal_of(exc, to_operator=True)
            return await send_json(send, refusal.status, refusal.body, refusal.headers)
        try:
            async with while_connected(receive):
                await send({"type": "http.response.start", "status": 200, "headers": [*STREAM_HEADERS]})
                await send({"type": "http.response.body", "body": comment("events"), "more_body": True})
                has_more = True
                while has_more:
                    data, has_more = await self._next(events)
                    await send({"type": "http.response.body", "body": data, "more_body": has_more})
        except ClientLeft:
            return None

    async def _next(self, events: EventStream) -> tuple[bytes, bool]:
        """Return what has happened, or a sign of life after a while, and whether there may be more."""
        with anyio.move_on_after(QUIET_S):
            found = await events.take()
            return b"".join(map(self.written, found)) or comment("other"), not _is_closed(found)
        return comment("quiet"), True

    def written(self, happened: FleetEvent) -> bytes:
        """Return what is told of an event."""
        data = to_json(to_plain(happened))
        return f"id: {happened.number}\nevent: {happened.kind}\ndata: ".encode() + data + b"\n\n"


def _is_closed(events: Sequence[FleetEvent]) -> bool:
    return not events or events[-1].kind == "fleet_closed"


def _after(request: Request) -> int | None:
    given = request.headers.get("last-event-id") or request.query_params.get("after")
    if given is None:
        return None
    if not (given.isascii() and given.isdecimal() and len(given) < 16):
        raise invalid("after", "after is no number of an event; give that of the last one you had.")
    return int(given)


def _records(request: Request, records: Sequence[object]) -> Response:
    last = request.query_params.get("last", str(MAX_RECORDS))
    if not (last.isascii() and last.isdecimal() and 0 < len(last) < 16 and int(last)):
        raise invalid("last", "last is how many of the last records are wanted; give a number over 0.")
    return json_response({"data": records[-min(int(last), MAX_RECORDS) :], "now_s": anyio.current_time()})


def json_response(value: object) -> Response:
    """Return an answer of values that JSON need not know."""
    return Response(to_json(to_plain(value)), media_type="application/json")


def to_plain(value: object) -> Any:
    """Return a value as JSON has it: objects of their fields, and `null` for numbers that are not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return {of.name: to_plain(getattr(value, of.name)) for of in fields(value)}
    if isinstance(value, Mapping):
        entries = cast("Mapping[object, object]", value).items()
        return {str(key): to_plain(entry) for key, entry in entries}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in cast("Sequence[object]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
