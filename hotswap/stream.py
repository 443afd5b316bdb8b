"""`TokenStream`: the tokens of one request, iterated asynchronously; `TokenQueue` is fed by a producer."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

from anyio.lowlevel import checkpoint_if_cancelled

from hotswap.request import ScoredPrompt, Token

__all__ = ["TokenQueue", "TokenReceiver", "TokenStream"]


class TokenStream(ABC):
    """An asynchronous iterator of `Token`s that ends after the one with a `finish_reason`.

    Iterating raises what ended the stream early: `RequestEvicted` or `InstanceLost` from an engine, a
    `RequestError` or `InstanceError` from a fleet. Cancelling an iteration loses no token: the next call
    gets it.

    Attributes:
        num_reused_tokens: How many of the request's tokens were in the engine's prefix cache; 0 until the
            first token arrives, and from engines without this count.
        prompt_logprobs: Those of the prompt, if they were asked for; complete when the first token arrives.
    """

    num_reused_tokens: int = 0
    prompt_logprobs: ScoredPrompt | tuple[()] = ()

    def __aiter__(self) -> TokenStream:
        return self

    @abstractmethod
    async def __anext__(self) -> Token:
        """Wait for the next token and return it."""

    async def take(self) -> list[Token]:
        """Wait for a token, and return it with those that have arrived after it; none at the end.

        Errors and cancellations are those of an iteration. Streams that cannot tell what has arrived give one
        token.
        """
        try:
            return [await self.__anext__()]
        except StopAsyncIteration:
            return []

    async def collect(self) -> list[Token]:
        """Read the stream to its end."""
        return [token async for token in self]


class TokenReceiver(Protocol):
    """What tokens are given to as they come."""

    def put(self, token: Token) -> None:
        """Take a token; synchronous and cheap, and must not raise."""
        ...


class TokenQueue(TokenStream):
    """A stream fed by a producer: `put`, then `close`; both return at once.

    It holds at most one request's tokens, so it needs no bound. Several readers share the tokens: each gets
    some, and all of them the end. Producer and consumer share an event loop; a
    worker thread feeds it through `loop.call_soon_threadsafe` or `anyio.from_thread`.
    """

    def __init__(self) -> None:
        self._tokens: deque[Token] = deque()
        self._receiver: TokenReceiver | None = None
        self._waiting: list[asyncio.Future[None]] = []  # an event for each wait costs three times as much
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._error: BaseException | None = None

    def put(self, token: Token) -> None:
        """Append a token; ignored once the stream is closed."""
        if self._closed:
            return
        if self._receiver is not None:
            self._receiver.put(token)
        else:
            self._tokens.append(token)
            while self._waiting:  # as in `_wake`, without a call for each token
                waiting = self._waiting.pop()
                if not waiting.done():
                    waiting.set_result(None)

    def forward(self, receiver: TokenReceiver) -> None:
        """Give tokens to a receiver from now on, the present ones first; readers get the end alone.

        The receiver is called by the producer's `put`, so that no task is woken for a token.
        """
        self._receiver = receiver
        while self._tokens:
            receiver.put(self._tokens.popleft())

    def close(self, error: BaseException | None = None) -> None:
        """End the stream after its present tokens, with `error` if given; only the first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wake()

    @property
    def closed(self) -> bool:
        """Whether `close` was called; unread tokens may remain."""
        return self._closed

    async def __anext__(self) -> Token:
        while not self._tokens:
            if self._closed:
                await self._raise_error()
                raise StopAsyncIteration
            await self._changed()
        return self._tokens.popleft()

    async def take(self) -> list[Token]:
        while not self._tokens:
            if self._closed:
                await self._raise_error()
                return []
            await self._changed()
        if len(self._tokens) == 1:
            return [self._tokens.popleft()]
        tokens = list(self._tokens)
        self._tokens.clear()
        return tokens

    def _changed(self) -> asyncio.Future[None]:
        """Return what is set by the next token, or by the end."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()  # which asks the system for the process's id
        waiting = self._loop.create_future()
        if self._waiting:  # of other readers, and of cancelled ones
            self._waiting = [one for one in self._waiting if not one.done()]
        self._waiting.append(waiting)
        return waiting

    async def _raise_error(self) -> None:
        """Raise what ended the stream early, if something did."""
        if self._error is not None:
            await checkpoint_if_cancelled()  # a cancelled reader gets its cancellation instead
            raise self._error

    def _wake(self) -> None:
        while self._waiting:
            waiting = self._waiting.pop()
            if not waiting.done():  # else its reader was cancelled
                waiting.set_result(None)

    def __repr__(self) -> str:
        return f"<TokenQueue [{len(self._tokens)} unread, {'closed' if self._closed else 'open'}]>"
