"""Clients of `door`: streams read as bytes while the clock runs, and looked at afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

__all__ = ["Reading", "read_streams"]

_CONTENT = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)
_END = b"data: [DONE]"
# Events of each stream before the measured time.
_WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Reading:
    """What streams read at once cost their server, while all of them run.

    Attributes:
        cpu_s: Processor time of the server meanwhile.
        wall_s: Seconds of it.
        num_characters: Characters of text that came meanwhile, of all streams.
        texts: The whole text of each stream.
    """

    cpu_s: float
    wall_s: float
    num_characters: int
    texts: tuple[str, ...]


def read_streams(port: int, pid: int, body: object, number: int) -> Reading:
    """Send a request that streams so many times at once, and read all answers.

    Args:
        port: Of the server, on this machine.
        pid: Of the server's process.
        body: Of each request to `/v1/chat/completions`.
        number: Of requests.
    """
    return asyncio.run(_read(port, pid, body, number))


class _Stream(asyncio.Protocol):
    def __init__(self, all_of_them: _Streams, request: bytes) -> None:
        self.received = bytearray()
        self.begins = self.ends = -1
        self._all, self._request = all_of_them, request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if not self._all.all_began:
            self._all.note_begin(self)
        if self.received.endswith(b"\r\n0\r\n\r\n"):
            self._all.note_end()
            self._transport.close()

    @property
    def has_begun(self) -> bool:
        """Whether some events have come: by then the bustle of the beginning is over."""
        return self.received.count(b"data: ") > _WARM_UP

    def text(self, begin: int = 0, end: int | None = None) -> str:
        """The text of the events between two places of what was received."""
        values = [json.loads(event) for event in _CONTENT.findall(self.received[begin:end])]
        choices = [choice for value in values for choice in value["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


class _Streams:
    def __init__(self, pid: int) -> None:
        self.streams: list[_Stream] = []
        self.all_began = False
        self.first: tuple[float, float] | None = None
        self.last: tuple[float, float] | None = None
        self.ended = asyncio.Event()
        self._clock = ~pid << 3 | 2  # the processor time of another process, as Linux numbers its clocks
        self._num_open = 0

    def expect(self, stream: _Stream) -> _Stream:
        self.streams.append(stream)
        self._num_open += 1
        return stream

    def note_begin(self, stream: _Stream) -> None:
        """Look whether the last stream has begun; then the measured time begins. An error ends all."""
        if not stream.received.startswith(b"HTTP/1.1 200"):
            self.ended.set()
        self.all_began = all(stream.has_begun for stream in self.streams)
        if self.all_began:
            for stream in self.streams:
                stream.begins = len(stream.received)
            self.first = self._now()

    def note_end(self) -> None:
        """Note that a stream has ended; with the first one the measured time ends."""
        if self.last is None:
            self.last = self._now()
            for stream in self.streams:
                stream.ends = len(stream.received)
        self._num_open -= 1
        if not self._num_open:
            self.ended.set()

    def _now(self) -> tuple[float, float]:
        return time.clock_gettime(self._clock), time.perf_counter()


async def _read(port: int, pid: int, body: object, number: int) -> Reading:
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    )
    request = head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content
    loop, streams = asyncio.get_running_loop(), _Streams(pid)
    made = [streams.expect(_Stream(streams, request)) for _ in range(number)]
    for stream in made:
        await loop.create_connection(partial(_same, stream), "127.0.0.1", port)
    await streams.ended.wait()
    return _reading(streams)


def _same(stream: _Stream) -> _Stream:
    return stream


def _reading(streams: _Streams) -> Reading:
    for stream in streams.streams:
        assert _END in stream.received, bytes(stream.received[:1000])
    assert streams.first is not None, "a stream ended before the last one began; ask for more tokens"
    assert streams.last is not None
    parts: Sequence[str] = [stream.text(stream.begins, stream.ends) for stream in streams.streams]
    return Reading(
        cpu_s=streams.last[0] - streams.first[0],
        wall_s=streams.last[1] - streams.first[1],
        num_characters=sum(map(len, parts)),
        texts=tuple(stream.text() for stream in streams.streams),
    )
