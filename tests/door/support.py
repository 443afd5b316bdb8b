"""Doors over small fleets, and clients of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
from starlette.types import ASGIApp, Message

__all__ = ["Caller", "client_of", "events_of"]


@asynccontextmanager
async def client_of(app: ASGIApp, **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """A client that calls an application without a server between."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", **options) as client:
        yield client


def events_of(text: str) -> list[Any]:
    """The values of the events of a stream, as JSON, but for its end."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


class Caller:
    """One request to an application, whose client may leave at any moment.

    Args:
        app: The application.
        path: The path that is asked for.
        body: The body, as JSON.
        root_path: Where the server says that the application lies.
        headers: Further headers.

    Attributes:
        sent: What the application has sent.
        ended: Set once it has returned.
    """

    def __init__(self, app: ASGIApp, path: str, body: object, *, root_path: str = "", **headers: str) -> None:
        self._app, self._body = app, json.dumps(body).encode()
        given = {"content-type": "application/json", "host": "localhost", **headers}
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "root_path": root_path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        self.sent: list[Message] = []
        self.ended = anyio.Event()
        self._left = anyio.Event()
        self._has_body = False

    async def __call__(self) -> None:
        """Call it, and return when it has returned."""
        try:
            await self._app(self._scope, self._receive, self._send)
        finally:
            self.ended.set()

    def get(self) -> Caller:
        """Make it a request without a body, and return it."""
        self._scope["method"] = "GET"
        return self

    def withhold(self) -> None:
        """Send no body."""
        self._has_body = True

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    @property
    def text(self) -> str:
        """The body that was sent so far."""
        return b"".join(message.get("body", b"") for message in self.sent).decode()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds."""
        with anyio.fail_after(60.0):
            while not holds():  # noqa: ASYNC110 - simulated time, and nothing to be told by
                await anyio.sleep(0.001)

    async def _receive(self) -> Message:
        if not self._has_body:
            self._has_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        self.sent.append(message)
