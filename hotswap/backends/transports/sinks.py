"""The taking end of a move in another process: what it is told here, `serve_sink` does there.

    remote_sink(channel, request)                      serve_sink(engine, channel)
        open      the request, its tokens                  engine.import_kv(request)
        reserve   how many tokens                          sink.reserve
        write     the first block, pages                   sink.write, from where the link has put them
        commit    all tokens                               sink.commit
        leave                                              leaves import_kv

One call at a time is answered, in order, by its number. Whatever breaks the link leaves `import_kv` there,
and so frees what was not committed. An end that says what the other cannot understand breaks it too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import anyio

from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, broken
from hotswap.backends.transports.wire import Message
from hotswap.errors import HotswapError, InstanceLost, MigrationAborted
from hotswap.migration import KVPages, KVSink, SupportsMigration
from hotswap.request import Request
from hotswap.transport import Channel, Frame

__all__ = ["RemoteSink", "remote_sink", "serve_sink"]

_ANSWER_S = 30.0
_SILENCE_S = 30.0
_LEAVE_S = 5.0


class RemoteSink(KVSink):
    """A sink whose blocks are behind a channel; `remote_sink` lends it.

    Verbs raise what the sink at the other end raises, with its stage and its words, and `MigrationAborted`
    of stage `"link"` when the link breaks. A cancelled one may have been carried out.

    Args:
        channel: Where `serve_sink` is at the other end.
        answer_s: How long the other end may take over one verb until it counts as silent.
    """

    def __init__(self, channel: Channel, *, answer_s: float = _ANSWER_S) -> None:
        self._channel, self._answer_s = channel, answer_s
        self._num_calls = 0

    async def open(self, request: Request) -> None:
        """Have the other end begin; afterwards `layout` and `num_present_blocks` are known."""
        async with self._understood():
            answer = await self._call(
                "open", wire.pack_tokens(request.tokens), **wire.request_fields(request)
            )
            self.num_present_blocks = wire.size(answer, "num_present_blocks")
            self.layout = wire.layout_of(answer)

    async def reserve(self, num_tokens: int) -> None:
        await self._call("reserve", num_tokens=num_tokens)

    async def write(self, pages: KVPages) -> None:
        for part in self._parts(pages):
            await self._call("write", part.data, first_block=part.first_block, num_tokens=part.num_tokens)

    async def commit(self, tokens: Sequence[int]) -> None:
        await self._call("commit", wire.pack_tokens(tokens))

    async def leave(self) -> None:
        """Have the other end free what was not committed."""
        await self._call("leave")

    def _parts(self, pages: KVPages) -> list[KVPages]:
        """Cut pages into parts of whole blocks that the link takes."""
        block_tokens, block_bytes = self.layout.block_tokens, self.layout.block_bytes
        most = max(1, self._channel.max_payload_bytes // max(1, block_bytes))
        num_blocks = max(1, -(-pages.num_tokens // block_tokens))  # none at all is a call too
        return [
            KVPages(
                pages.first_block + at,
                min(pages.num_tokens - at * block_tokens, most * block_tokens),
                pages.data[at * block_bytes : (at + most) * block_bytes],
            )
            for at in range(0, num_blocks, most)
        ]

    async def _call(self, verb: str, payload: memoryview | None = None, **fields: object) -> Message:
        self._num_calls += 1
        try:
            async with self._understood():
                with anyio.fail_after(self._answer_s):
                    await self._channel.send(wire.pack(verb, self._num_calls, **fields), payload)
                    answer = await self._answer()
                error = wire.error_of(answer)
        except TimeoutError:
            await self._channel.aclose()
            raise broken(f"the other end took longer than {self._answer_s:g} s over {verb!r}") from None
        if error is not None:
            raise error
        return answer

    async def _answer(self) -> Message:
        """Return the answer to the newest call, past those to calls that were cancelled."""
        while True:
            answer = wire.unpack((await self._channel.receive()).message)
            if answer.number == self._num_calls:
                return answer
            if answer.number > self._num_calls:
                raise ProtocolError(f"the other end answers a call {answer.number} that was never made")

    @asynccontextmanager
    async def _understood(self) -> AsyncGenerator[None]:
        try:
            yield
        except ProtocolError as exc:
            await self._channel.aclose()
            raise broken(str(exc)) from exc


@asynccontextmanager
async def remote_sink(
    channel: Channel, request: Request, *, answer_s: float = _ANSWER_S
) -> AsyncGenerator[RemoteSink]:
    """Lend the taking end for a request, as `import_kv` of the engine at the other end does.

    Left, it has given back what it held there; or else the channel is closed, and the other end does it by
    itself. Many may be lent over one channel, one after another; each move at the same time needs its own.

    Raises:
        MigrationAborted: what `import_kv` raised there; in stage `"link"`, the link is broken.
        InstanceLost: that engine is lost.
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


async def serve_sink(engine: SupportsMigration, channel: Channel, *, silence_s: float = _SILENCE_S) -> None:
    """Carry out on an engine what remote sinks at the other end ask, one move after another.

    Returns when the link ends between two moves.

    Args:
        engine: Who takes the blocks.
        channel: Where `remote_sink` is at the other end.
        silence_s: How long that end may say nothing during a move, until everything is freed and the
            channel closed. Between two moves it may be silent for ever.

    Raises:
        MigrationAborted: the link broke during a move, or the other end fell silent; all is freed.
    """
    moves = _Moves(engine, channel, silence_s)
    while True:
        try:
            frame = await channel.receive()
        except MigrationAborted:
            return
        try:
            await moves.serve(frame)
        except BaseException as exc:
            await channel.aclose()
            if isinstance(exc, ProtocolError):
                raise broken(str(exc)) from exc
            raise


class _Moves:
    """What `serve_sink` does with one move after another."""

    def __init__(self, engine: SupportsMigration, channel: Channel, silence_s: float) -> None:
        self._engine, self._channel, self._silence_s = engine, channel, silence_s

    async def serve(self, frame: Frame) -> None:
        """Serve one move, of which `frame` is the first that is heard."""
        message = wire.unpack(frame.message)
        async with AsyncExitStack() as lent:
            try:
                sink = await self._open(message, frame.payload, lent)
            except HotswapError as exc:
                await self._say(wire.pack_error(message.number, message.verb, exc))
                return
            if sink is not None:
                message = await self._until_left(sink, message)
        await self._say(wire.pack("done", message.number))

    async def _open(self, message: Message, payload: memoryview, lent: AsyncExitStack) -> KVSink | None:
        """Have the engine lend a sink; none for the end of a move that never began."""
        if message.verb == "leave":
            return None
        if message.verb != "open":
            raise ProtocolError(f"the other end began a move by {message.verb!r}")
        request = wire.request_of(message, wire.tokens_of(payload))
        return await lent.enter_async_context(self._engine.import_kv(request))

    async def _until_left(self, sink: KVSink, message: Message) -> Message:
        """Carry out what is asked until the other end leaves; return what it left by."""
        layout, num_present = wire.layout_fields(sink.layout), sink.num_present_blocks
        await self._say(wire.pack("done", message.number, layout=layout, num_present_blocks=num_present))
        while True:
            frame = await self._hear()
            message = wire.unpack(frame.message)
            if message.verb == "leave":
                return message
            try:
                await _carry_out(sink, message, frame.payload)
            except HotswapError as exc:
                await self._say(wire.pack_error(message.number, message.verb, exc))
            else:
                await self._say(wire.pack("done", message.number))

    async def _hear(self) -> Frame:
        with self._unless_silent():
            return await self._channel.receive()

    async def _say(self, answer: bytes) -> None:
        with self._unless_silent():
            await self._channel.send(answer)

    @contextmanager
    def _unless_silent(self) -> Generator[None]:
        try:
            with anyio.fail_after(self._silence_s):
                yield
        except TimeoutError:
            raise broken(
                f"the other end said nothing for {self._silence_s:g} s in the middle of a move"
            ) from None


async def _carry_out(sink: KVSink, message: Message, payload: memoryview) -> None:
    match message.verb:
        case "reserve":
            await sink.reserve(wire.size(message, "num_tokens"))
        case "write":
            first_block, num_tokens = wire.size(message, "first_block"), wire.size(message, "num_tokens")
            await sink.write(KVPages(first_block, num_tokens, payload))
        case "commit":
            await sink.commit(wire.tokens_of(payload))
        case verb:
            raise ProtocolError(f"the other end asks for {verb!r}, which is no verb of a sink")
