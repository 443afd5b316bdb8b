"""`remote_sink`: the `KVSink` of an engine in another process, over a channel; `serve_sink` is its server.

    remote_sink(channel, request)                      serve_sink(engine, channel)
        open      the request, its tokens                  engine.import_kv(request)
        reserve   how many tokens                          sink.reserve
        part      bytes that a write has no room for       are kept for it
        write     the first block, pages                   sink.write, from the channel's memory
        commit    all tokens                               sink.commit
        leave                                              leaves import_kv

Calls are answered one at a time, in order, by number. A broken link leaves `import_kv` at the server, which
frees the blocks that were not committed. A message that cannot be read breaks the link.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.backends.transports.wire import Message
from hotswap.checks import check_counts, check_positive_seconds
from hotswap.errors import ConfigError, HotswapError, InstanceLost, MigrationAborted
from hotswap.migration import KVPages, KVSink, SupportsMigration
from hotswap.request import Request
from hotswap.transport import Channel, Frame

__all__ = ["RemoteSink", "remote_sink", "serve_sink"]

_ANSWER_S = 30.0
_SILENCE_S = 30.0
_LEAVE_S = 5.0

_MAX_TOKENS = 1 << 18
_MAX_CALL_BYTES = 4 << 10  # of a message within a move, a few numbers
_MAX_ANSWER_BYTES = 256 << 10  # of a layout or an error
_TURN_TOKENS = 1 << 14  # decoded at once on the event loop, in about a millisecond


class RemoteSink(KVSink):
    """A sink in another process; `remote_sink` makes it.

    Methods raise the errors of the sink at the other end, with stage and message, and `MigrationAborted` of
    stage `"link"` when the link breaks. A cancelled call may have been executed.

    Args:
        channel: A channel to `serve_sink`.
        answer_s: The time limit for the answer to one call.
    """

    def __init__(self, channel: Channel, *, answer_s: float = _ANSWER_S) -> None:
        self._channel, self._answer_s = channel, answer_s
        self._num_calls = 0

    async def open(self, request: Request) -> None:
        """Begin the move at the other end; afterwards `layout` and `num_present_blocks` are set."""
        async with self._protocol_errors():
            answer = await self._call(
                "open", wire.pack_tokens(request.tokens), **wire.request_fields(request)
            )
            self.num_present_blocks = wire.size(answer, "num_present_blocks")
            self.layout = wire.layout_of(answer)

    async def reserve(self, num_tokens: int) -> None:
        await self._call("reserve", num_tokens=num_tokens)

    async def write(self, pages: KVPages) -> None:
        most = self._channel.max_payload_bytes
        for part in self._parts(pages):
            at = 0
            while len(part.data) - at > most:  # recurrent states follow the last block
                await self._call("part", part.data[at : at + most])
                at += most
            await self._call(
                "write", part.data[at:], first_block=part.first_block, num_tokens=part.num_tokens
            )

    async def commit(self, tokens: Sequence[int]) -> None:
        await self._call("commit", wire.pack_tokens(tokens))

    async def leave(self) -> None:
        """End the move; the other end frees what was not committed."""
        await self._call("leave")

    def _parts(self, pages: KVPages) -> list[KVPages]:
        """Split pages into parts of whole blocks that fit the channel."""
        block_tokens, block_bytes = self.layout.block_tokens, self.layout.block_bytes
        most = max(1, self._channel.max_payload_bytes // max(1, block_bytes))
        num_blocks = max(1, -(-pages.num_tokens // block_tokens))  # an empty write is a call too
        return [
            KVPages(
                pages.first_block + at,
                min(pages.num_tokens - at * block_tokens, most * block_tokens),
                pages.data[at * block_bytes : (at + most) * block_bytes if at + most < num_blocks else None],
            )
            for at in range(0, num_blocks, most)
        ]

    async def _call(self, verb: str, payload: memoryview | None = None, **fields: object) -> Message:
        self._num_calls += 1
        try:
            async with self._protocol_errors():
                with anyio.fail_after(self._answer_s):
                    await self._channel.send(wire.pack(verb, self._num_calls, **fields), payload)
                    answer = await self._answer()
                error = wire.error_of(answer)
        except TimeoutError:
            await self._channel.aclose()
            raise link_broken(f"the other end did not answer {verb!r} within {self._answer_s:g} s") from None
        if error is not None:
            raise error
        return answer

    async def _answer(self) -> Message:
        """Return the answer to the newest call; answers to cancelled calls are skipped."""
        while True:
            frame = await self._channel.receive(max_message_bytes=_MAX_ANSWER_BYTES, max_payload_bytes=0)
            answer = wire.unpack(frame.message)
            if answer.number == self._num_calls:
                return answer
            if answer.number > self._num_calls:
                raise ProtocolError(f"the other end answered call {answer.number}, which was not made")

    @asynccontextmanager
    async def _protocol_errors(self) -> AsyncGenerator[None]:
        try:
            yield
        except ProtocolError as exc:
            await self._channel.aclose()
            raise link_broken(str(exc)) from exc


@asynccontextmanager
async def remote_sink(
    channel: Channel, request: Request, *, answer_s: float = _ANSWER_S
) -> AsyncGenerator[RemoteSink]:
    """Lend the sink of a request, as `import_kv` of the engine at the other end does.

    When the block ends, the other end has freed what was not committed; if it does not confirm that, the
    channel is closed, which frees it too. One channel serves many moves, one after the other; concurrent
    moves need a channel each.

    Raises:
        MigrationAborted: the error of `import_kv` there; in stage `"link"`, the link is broken.
        InstanceLost: the engine is lost.
    """
    sink = RemoteSink(channel, answer_s=answer_s)
    try:
        await sink.open(request)
        yield sink
    finally:
        has_left = False
        try:
            with suppress(MigrationAborted, InstanceLost), anyio.move_on_after(_LEAVE_S, shield=True):
                await sink.leave()
                has_left = True
        finally:
            if not has_left:
                await channel.aclose()


async def serve_sink(
    engine: SupportsMigration,
    channel: Channel,
    *,
    silence_s: float = _SILENCE_S,
    max_tokens: int = _MAX_TOKENS,
) -> None:
    """Execute the calls of remote sinks on an engine, one move after the other.

    Returns when the link ends between two moves. A frame that is longer than its kind may be breaks the link
    before it is read; pages alone may be as long as the link's payloads.

    Args:
        engine: The engine that receives the blocks.
        channel: A channel to `remote_sink`.
        silence_s: After so long without a call during a move, all is freed and the channel closed. Between
            two moves the other end may be silent for any time.
        max_tokens: The most tokens of a request, prompt included. One with more moves without its blocks.

    Raises:
        ConfigError: an argument is out of range.
        MigrationAborted: the link broke during a move or by a frame that is none, or the other end fell
            silent; all is freed.
    """
    check_positive_seconds(ConfigError, silence_s=silence_s)
    check_counts(ConfigError, 1, max_tokens=max_tokens)
    moves = _Moves(engine, channel, silence_s, max_tokens)
    while True:
        try:
            frame = await channel.receive(max_payload_bytes=max_tokens * wire.TOKEN_BYTES)
        except MigrationAborted as exc:
            if isinstance(
                exc.__cause__, ProtocolError | TimeoutError
            ):  # not the end of a link, but its misuse
                raise
            return
        try:
            await moves.serve(frame)
        except BaseException as exc:
            await channel.aclose()
            if isinstance(exc, ProtocolError):
                raise link_broken(str(exc)) from exc
            raise


class _Moves:
    """Serves one move after the other; see `serve_sink`."""

    def __init__(
        self, engine: SupportsMigration, channel: Channel, silence_s: float, max_tokens: int
    ) -> None:
        self._engine, self._channel = engine, channel
        self._silence_s, self._max_tokens = silence_s, max_tokens
        self._kept = bytearray()  # the first bytes of the next write

    async def serve(self, frame: Frame) -> None:
        """Serve one move, whose first frame is `frame`."""
        message = wire.unpack(frame.message)
        self._kept = bytearray()
        async with AsyncExitStack() as lent:
            try:
                sink = await self._open(message, frame.payload, lent)
            except HotswapError as exc:
                await self._send(wire.pack_error(message.number, message.verb, exc))
                return
            if sink is not None:
                message = await self._serve_calls(sink, message)
        await self._send(wire.pack("done", message.number))

    async def _open(self, message: Message, payload: memoryview, lent: AsyncExitStack) -> KVSink | None:
        """Open the engine's sink; `None` for the `leave` of a move that was never opened."""
        if message.verb == "leave":
            return None
        if message.verb != "open":
            raise ProtocolError(f"the first call of a move is {message.verb!r}")
        request = wire.request_of(message, await self._tokens(payload))
        return await lent.enter_async_context(self._engine.import_kv(request))

    async def _serve_calls(self, sink: KVSink, message: Message) -> Message:
        """Execute calls until `leave`, and return that message."""
        layout, num_present = wire.layout_fields(sink.layout), sink.num_present_blocks
        await self._send(wire.pack("done", message.number, layout=layout, num_present_blocks=num_present))
        while True:
            frame = await self._receive()
            message = wire.unpack(frame.message)
            if message.verb == "leave":
                return message
            try:
                await self._execute(sink, message, frame.payload)
            except HotswapError as exc:
                await self._send(wire.pack_error(message.number, message.verb, exc))
            else:
                await self._send(wire.pack("done", message.number))

    async def _receive(self) -> Frame:
        with self._silence_limit():
            return await self._channel.receive(max_message_bytes=_MAX_CALL_BYTES)

    async def _send(self, answer: bytes) -> None:
        with self._silence_limit():
            await self._channel.send(answer)

    @contextmanager
    def _silence_limit(self) -> Generator[None]:
        try:
            with anyio.fail_after(self._silence_s):
                yield
        except TimeoutError:
            raise link_broken(
                f"the other end sent nothing for {self._silence_s:g} s in the middle of a move"
            ) from None

    async def _execute(self, sink: KVSink, message: Message, payload: memoryview) -> None:
        match message.verb:
            case "reserve":
                await sink.reserve(wire.size(message, "num_tokens"))
            case "write":
                first_block, num_tokens = wire.size(message, "first_block"), wire.size(message, "num_tokens")
                kept, self._kept = self._kept, bytearray()
                data = memoryview(kept + payload) if kept else payload
                await sink.write(KVPages(first_block, num_tokens, data))
            case "part":
                self._kept += payload
                if len(self._kept) > wire.most_bytes(sink.layout, self._channel):
                    raise ProtocolError(f"{len(self._kept):,} bytes are more than blocks and states")
            case "commit":
                await sink.commit(await self._tokens(payload))
            case verb:
                raise ProtocolError(f"{verb!r} is no method of a sink")

    async def _tokens(self, payload: memoryview) -> tuple[int, ...]:
        """Decode the tokens of a payload, a part in each turn of the event loop."""
        if len(payload) > self._max_tokens * wire.TOKEN_BYTES:
            raise ProtocolError(f"{len(payload):,} bytes of tokens are over {self._max_tokens:,} tokens")
        tokens: list[int] = []
        turn_bytes = _TURN_TOKENS * wire.TOKEN_BYTES
        for at in range(0, len(payload), turn_bytes):
            tokens += wire.tokens_of(payload[at : at + turn_bytes])
            await checkpoint()
        return tuple(tokens)
