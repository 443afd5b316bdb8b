"""Requests that one engine after another evicts, each at a random token, until they have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from random import Random

import anyio

from hotswap import Request, Token
from hotswap.abc import Engine, ModelCard, WeightStore
from hotswap.errors import RequestEvicted

__all__ = ["Client", "rounds"]

_MOST_TOKENS = 4  # of one request between two evictions


class Client:
    """Reads one request, wherever it goes on.

    Attributes:
        tokens: Those that it has got.
        parts: The engine of each part of them, and its first token.
        num_evictions: How often it was evicted.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.num_evictions = request, 0
        self.tokens, self.parts = list[Token](), list[tuple[Engine, int]]()
        self._more = anyio.Event()

    @property
    def is_done(self) -> bool:
        return bool(self.tokens) and self.tokens[-1].finish_reason is not None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    async def read(self, engine: Engine) -> None:
        """Read to the end or to an eviction."""
        self.parts.append((engine, len(self.tokens)))
        try:
            async with engine.stream(self.request.continued(self.ids)) as tokens:
                async for token in tokens:
                    self.tokens.append(token)
                    self._more.set()
        except RequestEvicted:
            self.num_evictions += 1
        self._more.set()

    async def has(self, num_tokens: int) -> None:
        """Wait for so many tokens, or for the end."""
        while len(self.tokens) < num_tokens and not self.is_done:
            self._more = anyio.Event()
            await self._more.wait()


async def rounds(
    engines: Sequence[Engine],
    card: ModelCard,
    store: WeightStore,
    requests: Sequence[Request],
    *,
    num_evictions: int,
    random: Random,
) -> AsyncGenerator[list[Client]]:
    """Run the requests together, again and again, until so many were evicted; yield those of each round.

    The engines take turns, in their order: each is loaded beside the one before it, which then evicts all
    that it serves, once one of them has got some more tokens, and is unloaded. All are EMPTY at both ends.
    """
    line = deque(engines)
    await line[0].load(card, store)
    while num_evictions > 0:
        clients = [Client(request) for request in requests]
        while left := [client for client in clients if not client.is_done]:
            await line[1].load(card, store)
            first, more = random.choice(left), random.randrange(1, _MOST_TOKENS)
            async with anyio.create_task_group() as tasks:
                for client in left:
                    tasks.start_soon(client.read, line[0])
                await first.has(len(first.tokens) + more)
                await line[0].evict(deadline_s=0)
            await line[0].unload()
            line.rotate(-1)
        yield clients
        num_evictions -= sum(client.num_evictions for client in clients)
    await line[0].unload()
