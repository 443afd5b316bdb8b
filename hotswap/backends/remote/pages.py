"""Links for KV blocks, apart from those for control, so that tokens do not wait behind blocks.

One end wants to read or write the blocks of a move, the other is the host that lends the move's source or
sink, or a listing of what it keeps of ended requests. The first message names it by its key, which the host
has told its controller alone.

    pages     the key
    read      the first block, how many tokens     ->  done, with the blocks, and how many bytes are left;
              of a listing also which entry
    rest                                           ->  the same, with the next of those bytes
    part      the first bytes of a write           ->  done
    write     the first block, how many tokens, with the blocks  ->  done
    commit    all tokens of the request            ->  done
    goodbye                                        ->  nothing: the link is closed

Calls have as many blocks as a payload takes. Recurrent states follow the last of them; if these are too large
for it, they come in parts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress

import anyio

from hotswap.backends.remote.failures import error_of, failure
from hotswap.backends.remote.messages import VERSION
from hotswap.backends.remote.outbox import Outbox
from hotswap.backends.remote.values import tokens_in
from hotswap.backends.transports import wire
from hotswap.backends.transports.link_errors import ProtocolError, link_broken
from hotswap.errors import HotswapError, MigrationAborted
from hotswap.migration import CachedKV, KVLayout, KVPages, KVSink, KVSource
from hotswap.transport import Channel, Frame

__all__ = ["Listing", "PageLink", "serve_pages"]

_ANSWER_S, _GOODBYE_S = 30.0, 1.0
_MAX_CALL_BYTES = 4 << 10
_MAX_ANSWER_BYTES = 128 << 10  # of an error


class PageLink:
    """The end that reads or writes; one call at a time. A cancelled call ends the link.

    Args:
        channel: The link, to the host that lends the move's end.
        layout: The layout of the blocks.

    Attributes:
        is_closed: Whether it cannot be used any more.
    """

    def __init__(self, channel: Channel, layout: KVLayout) -> None:
        self._channel, self._layout = channel, layout
        self._num_calls = self._num_left = 0  # calls, and bytes that the last answer had no room for
        self.is_closed = False

    async def open(self, key: str) -> None:
        """Name the move."""
        outbox = Outbox(self._channel, _ANSWER_S)
        outbox.say("pages", version=VERSION, key=key)
        await outbox.flush()

    async def read(self, first_block: int, num_tokens: int, *, entry: int = 0) -> KVPages:
        """Read blocks, of a listing those of an `entry`; they are valid until the next read.

        Errors are those of `KVSource.read`.
        """
        parts = list(self._parts(first_block, num_tokens))
        whole = await self._call("read", *parts[0], entry=entry)
        if len(parts) == 1 and not self._num_left:
            return KVPages(first_block, num_tokens, whole)
        data = bytearray(whole)
        await self._read_rest(data)
        for part in parts[1:]:
            data += await self._call("read", *part, entry=entry)
            await self._read_rest(data)
        return KVPages(first_block, num_tokens, memoryview(data))

    async def _read_rest(self, data: bytearray) -> None:
        """Append the bytes that the last answer had no room for."""
        most = wire.most_bytes(self._layout, self._channel)
        while self._num_left:
            if not 0 < self._num_left <= most:
                await self.aclose()
                raise link_broken(f"the other end has {self._num_left:,} bytes more of {most:,}")
            most = self._num_left - 1
            data += await self._call("rest", 0, 0)

    async def write(self, pages: KVPages) -> None:
        """Write blocks. Errors are those of `KVSink.write`."""
        at, block_bytes = 0, self._layout.block_bytes
        parts, most = list(self._parts(pages.first_block, pages.num_tokens)), self._channel.max_payload_bytes
        for number, (first_block, num_tokens) in enumerate(parts, start=1):
            size = -(-num_tokens // self._layout.block_tokens) * block_bytes
            end = at + size if number < len(parts) else len(pages.data)  # with states
            while end - at > most:
                await self._call("part", 0, 0, pages.data[at : at + most])
                at += most
            await self._call("write", first_block, num_tokens, pages.data[at:end])
            at = end

    async def commit(self, tokens: Sequence[int]) -> None:
        """Commit what was written. Errors are those of `KVSink.commit`."""
        await self._call("commit", 0, len(tokens), wire.pack_tokens(tokens))

    async def leave(self) -> None:
        """Say that no more is wanted, wait until the other end has closed the link, and close it.

        To the other end a link that is closed before is a broken one.
        """
        if not self.is_closed:
            self.is_closed = True  # a call from now on would be read by an end that does no more calls
            with anyio.move_on_after(_GOODBYE_S), suppress(MigrationAborted):
                await self._channel.send(wire.pack("goodbye", 0))
                await self._channel.receive()
        await self.aclose()

    async def aclose(self) -> None:
        """Close the link."""
        self.is_closed = True
        await self._channel.aclose()

    def _parts(self, first_block: int, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Yield blocks and tokens that fit in a payload; an empty call is a call too."""
        block_tokens = self._layout.block_tokens
        most = max(1, self._channel.max_payload_bytes // max(1, self._layout.block_bytes)) * block_tokens
        for at in range(0, max(num_tokens, 1), most):
            yield first_block + at // block_tokens, min(num_tokens - at, most)

    async def _call(
        self,
        verb: str,
        first_block: int,
        num_tokens: int,
        payload: memoryview | None = None,
        *,
        entry: int = 0,
    ) -> memoryview:
        self._num_calls += 1
        where = {"first_block": first_block, "num_tokens": num_tokens, "entry": entry}
        message = wire.pack(verb, self._num_calls, **where)
        error: HotswapError | None = None
        try:
            with anyio.fail_after(_ANSWER_S):
                await self._channel.send(message, payload)
                frame = await self._channel.receive(max_message_bytes=_MAX_ANSWER_BYTES)
            error = self._error_in(frame)
        except TimeoutError:
            await self.aclose()
            raise link_broken(f"the other end did not answer {verb!r} within {_ANSWER_S:g} s") from None
        except ProtocolError as exc:
            await self.aclose()
            raise link_broken(str(exc)) from exc
        except BaseException:  # the answer to a cancelled call may still come
            await self.aclose()
            raise
        if error is not None:
            raise error
        return frame.payload

    def _error_in(self, frame: Frame) -> HotswapError | None:
        answer = wire.unpack(frame.message)
        if answer.number != self._num_calls or answer.verb not in ("done", "failed"):
            raise ProtocolError(f"{answer.verb[:40]!r} was answered to call {answer.number}")
        with wire.protocol_errors():
            if answer.verb == "failed":
                return error_of(answer.fields.record("error"))
            self._num_left = answer.fields.size("left")
        return None


class Listing:
    """What an engine keeps of ended requests, as its host has listed it.

    Args:
        entries: What it keeps, each as it was then.
    """

    def __init__(self, entries: Sequence[CachedKV]) -> None:
        self._entries = tuple(entries)

    def __getitem__(self, entry: int) -> CachedKV:
        """Return an entry by its number.

        Raises:
            MigrationAborted: there is none.
        """
        if entry >= len(self._entries):
            raise MigrationAborted(f"Nothing was listed as entry {entry}.", stage="copy")
        return self._entries[entry]


async def serve_pages(end: KVSource | KVSink | Listing, channel: Channel) -> None:
    """Do the calls of a `PageLink` on a source, a sink or a listing, until the other end leaves.

    Raises:
        MigrationAborted: the link has ended otherwise.
    """
    most, rest, parts = channel.max_payload_bytes, memoryview(b""), bytearray()
    while True:
        frame = await channel.receive(max_message_bytes=_MAX_CALL_BYTES)
        async with _broken_by_nonsense(channel):
            message = wire.unpack(frame.message)
            if message.verb == "goodbye":
                return
            first_block, num_tokens = wire.size(message, "first_block"), wire.size(message, "num_tokens")
            data: memoryview | None = None
            answer = b""
            try:
                match message.verb, end:
                    case "read", KVSource() | Listing():
                        rest = memoryview(b"")
                        source = end[wire.size(message, "entry")] if isinstance(end, Listing) else end
                        rest = (await source.read(first_block, num_tokens)).data
                        data, rest = rest[:most], rest[most:]
                    case "rest", KVSource() | Listing():
                        data, rest = rest[:most], rest[most:]
                    case "part", KVSink():
                        parts += frame.payload
                        if len(parts) > wire.most_bytes(end.layout, channel):
                            raise ProtocolError(f"{len(parts):,} bytes are more than blocks and states")
                    case "write", KVSink():
                        written = memoryview(parts + frame.payload) if parts else frame.payload
                        parts = bytearray()
                        await end.write(KVPages(first_block, num_tokens, written))
                    case "commit", KVSink():
                        await end.commit(await tokens_in(bytes(frame.payload)))
                    case verb, _:
                        raise ProtocolError(f"{verb[:40]!r} is no call to a {type(end).__name__}")
            except HotswapError as exc:
                answer = wire.pack("failed", message.number, error=failure(exc))
            else:
                answer = wire.pack("done", message.number, left=len(rest))
        with anyio.fail_after(_ANSWER_S):
            await channel.send(answer, data)


@asynccontextmanager
async def _broken_by_nonsense(channel: Channel) -> AsyncGenerator[None]:
    try:
        yield
    except ProtocolError as exc:
        await channel.aclose()
        raise link_broken(str(exc)) from exc
