"""Listening: uvicorn on the event loop of the fleet, whose life and signals are the caller's."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager

import anyio
import uvicorn
from starlette.types import ASGIApp

from hotswap.errors import ConfigError

__all__ = ["listen"]

# What has not ended so long after the last stream is cut off.
GRACE_S = 1


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals to the program."""
        yield


@asynccontextmanager
async def listen(app: ASGIApp, *, host: str = "127.0.0.1", port: int = 8000) -> AsyncGenerator[int]:
    """Serve an application while the block runs, and lend the port; 0 takes a free one.

    Leaving the block closes idle connections at once and gives others a second to end.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as exc:
        raise ConfigError(f"{host} port {port} cannot be listened on: {exc}. Choose another.") from exc
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    error: BaseException | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve, [bound])
        try:
            yield int(bound.getsockname()[1])
        except BaseException as exc:  # which the task group would wrap
            error = exc
        server.should_exit = True
    if error is not None:
        raise error
