"""The beginning of an instance's turn: which requests are to have a token before schedulers take it."""

from __future__ import annotations

from hotswap.request import Request, RequestId

__all__ = ["Turn"]


class Turn:
    """The requests of an instance that `InstanceView.num_opening` counts.

    Attributes:
        opening: These requests.
        begins: Whether requests that are assigned now come with the turn of the next model.
        num_tokens: Of the requests that the turn began with; 0 once one of them has left without a token.
    """

    def __init__(self) -> None:
        self.begins = False
        self.num_tokens = 0
        self.opening: dict[RequestId, None] = {}

    def empty(self) -> None:
        """Begin anew with the requests that are assigned from now on."""
        self.begins, self.num_tokens = True, 0

    def assign(self, request: Request, *, stalled: bool, most: int | None) -> None:
        """Take a request in that is assigned, if it has stalled, or begins the turn and `most` tokens fit."""
        fits = self.begins and (most is None or self.num_tokens + request.num_tokens <= most)
        if fits or stalled:
            self.opening[request.id] = None
            self.num_tokens += request.num_tokens if self.begins else 0

    def got_token(self, request: RequestId) -> int:
        """Let a request go that has a token; return `num_tokens`, once, when it was the last of all."""
        del self.opening[request]
        tokens, last = self.num_tokens, not self.opening
        self.num_tokens = 0 if last else tokens
        return tokens if last else 0

    def restored(self, request: RequestId, num_tokens: int) -> None:
        """Leave tokens of a request out that need not be computed, so that they teach nothing of prefills."""
        if request in self.opening:
            self.num_tokens = max(0, self.num_tokens - num_tokens)

    def leave(self, request: RequestId) -> None:
        """Let a request go that leaves, if it is among them."""
        if request in self.opening:
            del self.opening[request]
            self.num_tokens = 0
