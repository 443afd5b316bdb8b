"""The open token streams of an engine: one token queue per request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.runner import Report
from hotswap.request import Request, RequestId, new_token
from hotswap.stream import TokenQueue

__all__ = ["Streams"]


class Streams:
    """Open streams by ticket; used on the event loop only. `len` counts them.

    Args:
        notifier: Notified when streams are opened and closed, and of each report.

    Attributes:
        report: The latest report of the engine's thread.
    """

    def __init__(self, notifier: StatusNotifier) -> None:
        self.report = Report()
        self._notifier = notifier
        self._open: dict[int, TokenQueue] = {}
        self._requests: dict[int, Request] = {}
        self._num_opened = 0
        self._drained = anyio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request) -> tuple[int, TokenQueue]:
        """Open a stream; return a new ticket and the queue of its tokens."""
        self._num_opened += 1
        tokens = self._open[self._num_opened] = TokenQueue()
        self._requests[self._num_opened] = request
        self._notifier.load_changed()
        return self._num_opened, tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute before each open request gets its next one, those not reported yet included."""
        return self.report.num_prefill_tokens + sum(self._unreported()) if self._open else 0

    def num_next_blocks(self, block_tokens: int) -> int:
        """Return the KV blocks that the first waiting request needs; 0 if none waits."""
        if self.report.num_running >= len(self._open):
            return 0
        return self.report.num_next_blocks or -(-next(self._unreported(), 0) // block_tokens)

    def _unreported(self) -> Iterator[int]:
        """Yield the initial tokens of each open request that the engine's thread has not reported yet."""
        last = self.report.last_ticket
        return (self._requests[ticket].num_tokens for ticket in self._open if ticket > last)

    def ids_of(self, tickets: Iterable[int]) -> tuple[RequestId, ...]:
        """Return the ids of the requests with these tickets whose streams are open."""
        return tuple(self._requests[ticket].id for ticket in tickets if ticket in self._open)

    def find(self, request: RequestId) -> tuple[int, Request] | None:
        """Return the ticket of a request's open stream and the request; `None` if there is none."""
        for ticket in reversed(self._open):
            if self._requests[ticket].id == request:
                return ticket, self._requests[ticket]
        return None

    def close(self, ticket: int, error: Exception) -> bool:
        """End a stream with an error, after its queued tokens; false if it had ended before."""
        tokens = self._open.pop(ticket, None)
        if tokens is not None:
            tokens.close(error)
        self._note_change()
        return tokens is not None

    def remove(self, ticket: int) -> bool:
        """Remove a stream that its client has closed; false if it had ended before."""
        was_open = self._open.pop(ticket, None) is not None
        self._requests.pop(ticket, None)
        self._note_change()
        return was_open

    def deliver(self, report: Report) -> None:
        """Deliver the tokens of a step; tokens of streams that ended meanwhile are dropped."""
        if report.num_blocks != self.report.num_blocks:
            self._notifier.state_changed()
        self.report = report
        for sampled in report.sampled:
            tokens = self._open.get(sampled.ticket)
            if tokens is None:
                continue
            if sampled.error is None:
                tokens.num_reused_tokens = sampled.num_reused
                if sampled.prompt_logprobs is not None:
                    tokens.prompt_logprobs = sampled.prompt_logprobs
                tokens.put(
                    new_token(
                        sampled.token,
                        sampled.index,
                        sampled.finish_reason,
                        logprob=sampled.logprob,
                        top_logprobs=sampled.top_logprobs,
                    )
                )
            if sampled.is_last:
                tokens.close(sampled.error)
                del self._open[sampled.ticket]
        self._note_change()

    def close_all(self, error: Callable[[], Exception]) -> list[int]:
        """End every stream with a new error, after its queued tokens; return their tickets."""
        closed = list(self._open)
        for tokens in self._open.values():
            tokens.close(error())
        self._open.clear()
        self._note_change()
        return closed

    async def wait_until_drained(self, deadline_s: float) -> None:
        """Wait until no stream is open, for at most `deadline_s` seconds."""
        await checkpoint()
        with anyio.move_on_after(deadline_s):
            while self._open:
                self._drained = anyio.Event()
                await self._drained.wait()

    def _note_change(self) -> None:
        self._notifier.load_changed()
        if not self._open:
            self._drained.set()
