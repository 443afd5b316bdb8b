"""Reading bodies: bounded in size and in time, and ended when the client leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import anyio
from pydantic import BaseModel
from starlette.types import Receive, Scope

from hotswap.door.errors import RETRY_SOON, Refusal
from hotswap.door.limits import Limits
from hotswap.worker_threads import run_in_thread

__all__ = ["ClientLeft", "checked", "in_own_task", "of_body", "read_body", "while_connected"]

# What takes a few milliseconds to check and to make a conversation of.
_SMALL_BYTES = 16 << 10

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")


class ClientLeft(Exception):
    """The client closed its connection, so that no answer can reach it."""


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return the body of a request.

    Raises:
        Refusal: it is longer than may be, took too long, or is not said to be JSON.
        ClientLeft: the client closed its connection.
    """
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise Refusal(415, "The content-type is not application/json; send JSON.", "unsupported_media_type")
    with anyio.move_on_after(limits.body_s):
        return await _read(receive, limits.body_bytes)
    raise Refusal(
        408,
        f"The body did not come within {limits.body_s:g} s; send it at once.",
        "request_timeout",
        headers=dict(RETRY_SOON),
    )


async def of_body(body: bytes, work: Callable[[], T]) -> T:
    """Do work that a body asks for and return its result: of a long body in a worker thread, to its end."""
    return work() if len(body) <= _SMALL_BYTES else await run_in_thread(work)


async def checked(kind: type[B], body: bytes) -> B:
    """Return a body as the type that it has to be.

    Raises:
        ValidationError: it is of another.
    """
    return await of_body(body, partial(kind.model_validate_json, body))


async def _read(receive: Receive, most_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise Refusal(413, f"The body is longer than {most_bytes:,} bytes; send less.", "body_too_large")
        if not message.get("more_body"):
            return bytes(body)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncGenerator[anyio.abc.TaskGroup]:
    """Cancel the block once the client has left; errors of the block come out as they are.

    Lends a task group for what the block does beside.

    Raises:
        ClientLeft: the client closed its connection.
    """
    error: Exception | None = None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        try:
            yield tasks
        except Exception as exc:  # the task group would wrap it
            error = exc
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    if has_left:
        raise ClientLeft


async def in_own_task(tasks: anyio.abc.TaskGroup, work: Callable[[], Awaitable[None]]) -> None:
    """Do work in a task of the group, and raise its error.

    Each wait of a task resumes all its coroutines, and below a server and a framework they are some twenty:
    for work that waits for every token, that is a fifth of what a token costs.
    """
    errors: list[Exception] = []
    ended = anyio.Event()

    async def run() -> None:
        try:
            await work()
        except Exception as exc:
            errors.append(exc)
        ended.set()

    tasks.start_soon(run)
    await ended.wait()
    if errors:
        raise errors.pop()
