"""The server of one contestant of `door`, as a process: hotswap's door, or one with an object for each token.

    python -m benchmarks.door_server hotswap '{"store": "...", "step_s": 0.02, "answer": [5, 6]}'

Both serve one fleet of one engine that computes nothing. The first line on standard output tells the port.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal

import anyio
from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from benchmarks.by_hand import ByHand
from benchmarks.measure import versions
from benchmarks.step_engine import StepEngine
from hotswap import Chat, Fleet, Model, ModelId, Sampling
from hotswap.backends.stores import NvmeStore
from hotswap.door import Limits, create_app, listen

__all__ = ["main"]

_LIBRARIES = ("hotswap", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "tokenizers")


class Message(BaseModel):
    """A message of a conversation."""

    role: str
    content: str


class ChatRequest(BaseModel):
    """What this server reads of a body."""

    model_config = ConfigDict(extra="ignore")

    model: str
    messages: list[Message]
    max_tokens: int
    temperature: float = 1.0


class Delta(BaseModel):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str


class Choice(BaseModel):
    """The choice of a chunk."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(BaseModel):
    """One event of a stream, as OpenAI's clients know it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


def pydantic_app(fleet: Fleet) -> Starlette:
    """Return a server as one writes it by hand: a validated object and a write for each token."""

    async def chats(request: Request) -> StreamingResponse:
        asked = ChatRequest.model_validate_json(await request.body())
        return StreamingResponse(_events(fleet, asked), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chats, methods=["POST"])])


async def _events(fleet: Fleet, asked: ChatRequest) -> AsyncGenerator[str]:
    created = time.time_ns() // 10**9
    chat = Chat([message.model_dump() for message in asked.messages])
    sampling = Sampling(max_tokens=asked.max_tokens, temperature=asked.temperature)

    def event(delta: Delta, finish_reason: str | None = None) -> str:
        choice = Choice(index=0, delta=delta, finish_reason=finish_reason)
        chunk = Chunk(id=stream.request.id, created=created, model=asked.model, choices=[choice])
        return f"data: {chunk.model_dump_json()}\n\n"

    async with fleet.stream(asked.model, chat, sampling) as stream:
        yield event(Delta(role="assistant", content=""))
        async for token in stream:
            yield event(Delta(content=token.text), token.finish_reason)
    yield "data: [DONE]\n\n"


def _joining(fleet: Fleet) -> ASGIApp:
    return create_app(fleet, limits=Limits(stream_interval_s=0.05))


APPS: dict[str, Callable[[Fleet], ASGIApp]] = {
    "hotswap": create_app,
    "hotswap_joined": _joining,
    "pydantic": pydantic_app,
}


async def _serve(name: str, settings: dict[str, Any]) -> None:
    engine = StepEngine(step_s=settings["step_s"], answer=settings["answer"])
    fleet = Fleet(
        engines=[engine],
        store=NvmeStore(settings["store"]),
        models=[Model(ModelId("m"))],
        scheduler=ByHand(),
    )
    async with fleet:
        await fleet.swap("e0", to=ModelId("m"))
        gc.collect()
        gc.freeze()  # as `hotswap serve` and vLLM do it
        async with listen(APPS[name](fleet), port=0) as port:
            sys.stdout.write(json.dumps({"versions": versions(*_LIBRARIES), "port": port}) + "\n")
            sys.stdout.flush()
            await anyio.sleep_forever()


def main(arguments: Sequence[str]) -> None:
    """Serve by the contestant of the first argument, with the settings of the second."""
    name, settings = arguments
    anyio.run(_serve, name, json.loads(settings), backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main(sys.argv[1:])
