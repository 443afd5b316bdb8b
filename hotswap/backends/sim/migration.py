"""Both ends of a move of simulated KV blocks: numbers of tokens, and the time that their bytes would take."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.sim.batcher import Batcher
from hotswap.backends.sim.sequence import Sequence as Running
from hotswap.errors import MigrationAborted
from hotswap.hardware import DeviceProfile
from hotswap.migration import KVLayout, KVPages, KVSink, KVSource, Stopped
from hotswap.model import ModelCard
from hotswap.request import Request, RequestId

__all__ = ["Desk", "aborted"]

# A sink that hears nothing for so long frees its blocks.
LAPSE_S = 10.0


class Desk:
    """What moves use of one engine.

    Args:
        batcher: Its requests and blocks.
        profile: How long copies take.
        check: Raises if the engine is lost.
        give_up: Ends a request's stream, and has the engine forget it.
        resumed: Told when there may be something to step for again.

    Attributes:
        arrivals: Blocks that have come, for the streams that will ask for them.
        stepping: Whether a step is under way.
    """

    def __init__(
        self,
        batcher: Batcher,
        profile: DeviceProfile,
        *,
        check: Callable[[], None],
        give_up: Callable[[Running], None],
        resumed: Callable[[], None],
    ) -> None:
        self.arrivals: dict[RequestId, SimKVSink] = {}
        self.stepping = False
        self.batcher, self.profile = batcher, profile
        self.check, self.give_up = check, give_up
        self._resumed = resumed
        self._boundary: list[tuple[Callable[[], None], anyio.Event]] = []

    @contextmanager
    def source(self, request: RequestId, model: ModelCard | None) -> Generator[SimKVSource]:
        """Lend the giving end for a request."""
        sequence = next((s for s in self.batcher if s.request.id == request), None)
        if sequence is None or model is None:
            raise aborted("export", f"the engine has no request {request!r}")
        source = SimKVSource(self, sequence, self._layout(sequence.request, model))
        try:
            yield source
        finally:
            source.resume()
            self._resumed()

    @contextmanager
    def sink(self, request: Request, model: ModelCard, check: Callable[[], None]) -> Generator[SimKVSink]:
        """Lend the taking end; `check` raises once the model has gone."""
        sink = SimKVSink(self, request, self._layout(request, model), check)
        try:
            yield sink
        finally:
            sink.close()
            self._resumed()

    def furnish(self, sequence: Running) -> None:
        """Give a new sequence what has arrived for it, if something has."""
        if (arrival := self.arrivals.pop(sequence.request.id, None)) is not None:
            self.batcher.furnish(sequence, arrival.furnish)
            sequence.reuse(sequence.num_cached)

    def at_boundary(self, act: Callable[[], None]) -> anyio.Event:
        """Have something done when no step is under way; the event tells that it was."""
        done = anyio.Event()
        if self.stepping:
            self._boundary.append((act, done))
        else:
            act()
            done.set()
        return done

    def meet_boundary(self) -> None:
        """Do what waits for the end of a step."""
        self.stepping = False
        waiting, self._boundary = self._boundary, []
        for act, done in waiting:
            act()
            done.set()

    def _layout(self, request: Request, model: ModelCard) -> KVLayout:
        return KVLayout(
            model=request.model,
            weights=request.model,
            adapter=request.adapter,
            block_tokens=self.batcher.block_tokens,
            layers=(),
            block_bytes=self.batcher.block_tokens * model.kv_bytes_per_token,
        )


class SimKVSource(KVSource):
    """The giving end: one request of an engine."""

    def __init__(self, desk: Desk, sequence: Running, layout: KVLayout) -> None:
        self.layout = layout
        self._desk, self._batcher, self._sequence = desk, desk.batcher, sequence
        self._stopped = self._ended = False

    async def num_tokens(self) -> int:
        await checkpoint()
        self._require()
        return self._sequence.num_cached

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        await anyio.sleep(self._desk.profile.kv_s(_blocks(num_tokens, self.layout) * self.layout.block_bytes))
        self._require()
        if first_block * self.layout.block_tokens + num_tokens > self._sequence.num_cached:
            raise aborted("copy", "the request gave its KV blocks back")
        return KVPages(first_block, num_tokens, memoryview(b""))

    async def stop(self) -> Stopped:
        self._require()
        await self._desk.at_boundary(self._park).wait()
        self._require()
        sequence = self._sequence
        generated = [sequence.token(at) for at in range(sequence.position)]
        return Stopped((*sequence.request.prompt, *generated), sequence.num_cached)

    async def release(self) -> None:
        self._require()
        self._stopped = False
        self._desk.give_up(self._sequence)

    def resume(self) -> None:
        """Let the request go on where it stopped, if it did; a stop that is still to come does nothing."""
        self._ended = True
        if self._stopped:
            self._batcher.unpark(self._sequence)
        self._stopped = False

    def _park(self) -> None:
        if self._sequence in self._batcher.running and not self._ended:
            self._batcher.park(self._sequence)
            self._stopped = True

    def _require(self) -> None:
        self._desk.check()
        if self._sequence not in (self._batcher.parked if self._stopped else self._batcher.running):
            raise aborted("copy", "the request has ended, was taken away or waits for KV blocks")


class SimKVSink(KVSink):
    """The taking end. Once committed it is one of the engine's `arrivals`, whose stream takes its blocks."""

    def __init__(self, desk: Desk, request: Request, layout: KVLayout, check: Callable[[], None]) -> None:
        self.layout = layout
        self._request, self._batcher = request, desk.batcher
        self._check, self._arrivals = check, desk.arrivals
        self._handover_s = desk.profile.handover_s
        self._num_blocks = self._num_tokens = 0
        self._closed = False
        self._heard_s = anyio.current_time()

    async def reserve(self, num_tokens: int) -> None:
        await checkpoint()
        self._hear()
        more = _blocks(num_tokens, self.layout) - self._num_blocks
        if more > self._batcher.num_free_blocks - self._batcher.num_spare_blocks:
            raise aborted("reserve", f"{more} KV blocks are wanted, of {self._batcher.num_free_blocks} free")
        if more > 0:
            self._batcher.hold(more)
            self._num_blocks += more

    async def write(self, pages: KVPages) -> None:
        await checkpoint()
        self._hear()
        first = pages.first_block * self.layout.block_tokens
        end = first + pages.num_tokens
        if first > self._num_tokens or _blocks(end, self.layout) > self._num_blocks:
            raise aborted("copy", f"pages of tokens {first} to {end} do not fit")
        self._num_tokens = max(self._num_tokens, end)

    async def commit(self, tokens: Sequence[int]) -> None:
        await anyio.sleep(self._handover_s)
        self._hear()
        if tuple(tokens[: self._request.num_tokens]) != self._request.tokens:
            raise aborted("commit", "the request is not the one that was announced")
        self._arrivals[self._request.id] = self

    def furnish(self, sequence: Running) -> None:
        """Give a sequence of the request the blocks, as far as its tokens have come; the last is computed."""
        sequence.num_cached = min(self._num_tokens, sequence.num_tokens - 1)
        sequence.num_blocks, self._num_blocks = self._num_blocks, 0

    def close(self) -> None:
        """Let go of all blocks."""
        if not self._closed:
            self._closed = True
            if self._arrivals.get(self._request.id) is self:
                del self._arrivals[self._request.id]
            self._batcher.hold(-self._num_blocks)

    def _hear(self) -> None:
        self._check()
        if anyio.current_time() - self._heard_s > LAPSE_S:
            self.close()
        if self._closed:
            raise aborted("copy", f"its destination heard nothing for {LAPSE_S:g} s")
        self._heard_s = anyio.current_time()


def aborted(stage: str, because: str) -> MigrationAborted:
    """Return the error that says in which stage a move ended, and why."""
    return MigrationAborted(
        f"The move ended in {stage}: {because}. The request goes on without it.", stage=stage
    )


def _blocks(num_tokens: int, layout: KVLayout) -> int:
    return -(-num_tokens // layout.block_tokens)
