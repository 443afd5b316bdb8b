"""Requests, and what engines answer them with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotswap import ModelId, Request, RequestId, Sampling, Token
from hotswap.abc import Engine


def ask(prompt: Sequence[int], *, model: str = "a", id: str = "r", **sampling: Any) -> Request:
    """Return a request whose end tokens are ordinary ones, unless `sampling` says otherwise."""
    chosen = {"max_tokens": 24, "ignore_eos": True} | sampling
    return Request(id=RequestId(id), model=ModelId(model), prompt=tuple(prompt), sampling=Sampling(**chosen))


async def answer(engine: Engine, request: Request) -> list[Token]:
    """Run a request to its end."""
    async with engine.stream(request) as tokens:
        return await tokens.collect()


async def ids(engine: Engine, request: Request) -> list[int]:
    """The token ids of `answer`."""
    return [token.id for token in await answer(engine, request)]
