"""`RemoteStream`: the tokens of one request that runs on an engine elsewhere."""

from __future__ import annotations

import anyio

from hotswap.backends.remote.messages import Message
from hotswap.backends.remote.values import FINISH_REASONS, add_to_prompt, token_of
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError
from hotswap.request import Request, new_token
from hotswap.stream import TokenQueue

__all__ = ["REUSED", "RemoteStream"]

# Of a pair of numbers, the first is `4 * stream + kind`: the place of a finish reason, or this.
REUSED = 3
_MAX_TOKEN_ID = (1 << 31) - 1


class RemoteStream(TokenQueue):
    """Fed by the host's messages; it holds the host to what the request asks for.

    Attributes:
        opened: Set once the engine has admitted the request, or the stream has ended.
    """

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.opened = anyio.Event()
        self._first = self._next = len(request.generated)
        self._end = self._first + max(request.remaining_tokens, 1)
        self._num_tokens = request.num_tokens

    @property
    def has_tokens(self) -> bool:
        """Whether a token has come."""
        return self._next > self._first

    def take_numbers(self, kind: int, value: int) -> None:
        """Take a pair of numbers.

        Raises:
            ProtocolError: it is none that could come now.
        """
        if kind != REUSED:
            index = self._index_of(value)
            self.put(new_token(value, index, FINISH_REASONS[kind]))
        elif self.has_tokens or not 0 <= value <= self._num_tokens:
            raise ProtocolError(f"{value:,} reused tokens were told of a request of {self._num_tokens:,}")
        else:
            self.num_reused_tokens = value

    def take_scored(self, message: Message) -> None:
        """Take a token with its log-probabilities.

        Raises:
            ProtocolError: it is none that could come now.
        """
        with wire.protocol_errors():
            kind = message.fields.size("kind")
        if kind >= len(FINISH_REASONS):
            raise ProtocolError(f"a token is of kind {kind}")
        token = token_of(message.payload, self._next, FINISH_REASONS[kind])
        self._index_of(token.id)
        self.put(token)

    def take_prompt(self, message: Message) -> None:
        """Take a part of what is told of the prompt.

        Raises:
            ProtocolError: it is none that could come now.
        """
        with wire.protocol_errors():
            num_entries = message.fields.size("num_entries")
        told = self.prompt_logprobs or None
        self.prompt_logprobs = add_to_prompt(told, num_entries, message.payload)
        if self.has_tokens or len(self.prompt_logprobs) > self._num_tokens:
            raise ProtocolError("more is told of a prompt than it has tokens")

    def end(self, error: BaseException | None) -> None:
        """End the stream after its tokens."""
        self.close(error)
        self.opened.set()

    async def refuse(self) -> None:
        """Raise what ended the stream, if that came before it was opened or with no token."""
        if self.closed and not self.has_tokens:
            await anext(self, None)

    def _index_of(self, id: int) -> int:
        """Return the index of a token that has come, and count it."""
        index = self._next
        if not 0 <= id <= _MAX_TOKEN_ID or index == self._end:
            raise ProtocolError(f"token {id} was told of a stream with {self._end - index} tokens to come")
        self._next = index + 1
        return index
