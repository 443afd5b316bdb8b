"""KV sources and sinks of simulated engines: they count tokens, and sleep as long as copies would take."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.sim.batcher import Batcher
from hotswap.backends.sim.sequence import Sequence as Running
from hotswap.errors import MigrationAborted
from hotswap.hardware import DeviceProfile
from hotswap.loop_time import current_time
from hotswap.migration import KVLayout, KVPages, KVSink, KVSource, Stopped
from hotswap.model import ModelCard
from hotswap.request import Request, RequestId

__all__ = ["MigrationContext", "aborted"]

# A sink that gets no call for so long frees its blocks.
LAPSE_S = 10.0


class MigrationContext:
    """The parts of an engine that its KV sources and sinks use.

    Args:
        batcher: The engine's.
        profile: How long copies take.
        check: Raises if the engine is lost.
        give_up: Ends a request's stream, and has the engine forget it.
        resumed: Called when a request may run again.

    Attributes:
        arrivals: Sinks whose blocks have arrived, by the requests whose streams will take them.
        is_stepping: Whether a step is under way.
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
        self.is_stepping = False
        self.batcher, self.profile = batcher, profile
        self.check, self.give_up = check, give_up
        self._resumed = resumed
        self._after_step: list[tuple[Callable[[], None], anyio.Event]] = []

    @contextmanager
    def source(self, request: RequestId, model: ModelCard | None) -> Generator[SimKVSource]:
        """Return the source of a request that leaves."""
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
        """Return a sink for a request that arrives; `check` raises once the model was unloaded."""
        sink = SimKVSink(self, request, self._layout(request, model), check)
        try:
            yield sink
        finally:
            sink.close()
            self._resumed()

    def attach_arrival(self, sequence: Running) -> None:
        """Give a new sequence the blocks that have arrived for it, if any have."""
        if (arrival := self.arrivals.pop(sequence.request.id, None)) is not None:
            self.batcher.give_blocks(sequence, arrival.hand_over)
            sequence.reuse(sequence.num_cached)

    def after_step(self, act: Callable[[], None]) -> anyio.Event:
        """Call `act` once no step is under way; the event is set then."""
        done = anyio.Event()
        if self.is_stepping:
            self._after_step.append((act, done))
        else:
            act()
            done.set()
        return done

    def end_step(self) -> None:
        """Make the calls that wait for the end of a step."""
        self.is_stepping = False
        waiting, self._after_step = self._after_step, []
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
    """The KV blocks of one request of an engine."""

    def __init__(self, context: MigrationContext, sequence: Running, layout: KVLayout) -> None:
        self.layout = layout
        self._context, self._batcher, self._sequence = context, context.batcher, sequence
        self._stopped = self._ended = False

    async def num_tokens(self) -> int:
        await checkpoint()
        self._require()
        return self._sequence.num_cached

    async def read(self, first_block: int, num_tokens: int) -> KVPages:
        await anyio.sleep(
            self._context.profile.kv_s(_blocks(num_tokens, self.layout) * self.layout.block_bytes)
        )
        self._require()
        if first_block * self.layout.block_tokens + num_tokens > self._sequence.num_cached:
            raise aborted("copy", "the request gave its KV blocks back")
        return KVPages(first_block, num_tokens, memoryview(b""))

    async def stop(self) -> Stopped:
        self._require()
        await self._context.after_step(self._park).wait()
        self._require()
        sequence = self._sequence
        generated = [sequence.token(at) for at in range(sequence.position)]
        return Stopped((*sequence.request.prompt, *generated), sequence.num_cached)

    async def release(self) -> None:
        self._require()
        self._stopped = False
        self._context.give_up(self._sequence)

    def resume(self) -> None:
        """Let the request run again if it was stopped; a stop that is still to come does nothing."""
        self._ended = True
        if self._stopped:
            self._batcher.unpark(self._sequence)
        self._stopped = False

    def _park(self) -> None:
        if self._sequence in self._batcher.running and not self._ended:
            self._batcher.park(self._sequence)
            self._stopped = True

    def _require(self) -> None:
        self._context.check()
        if self._sequence not in (self._batcher.parked if self._stopped else self._batcher.running):
            raise aborted("copy", "the request has ended, was taken away or waits for KV blocks")


class SimKVSink(KVSink):
    """KV blocks of a request that arrives; once committed, the stream of the request takes them."""

    def __init__(
        self, context: MigrationContext, request: Request, layout: KVLayout, check: Callable[[], None]
    ) -> None:
        self.layout = layout
        self._request, self._batcher = request, context.batcher
        self._check, self._arrivals = check, context.arrivals
        self._handover_s = context.profile.handover_s
        self._num_blocks = self._num_tokens = 0
        self._closed = False
        self._called_s = current_time()

    async def reserve(self, num_tokens: int) -> None:
        await checkpoint()
        self._renew()
        more = _blocks(num_tokens, self.layout) - self._num_blocks
        if not self._batcher.has_free(more + self._batcher.num_spare_blocks):
            raise aborted("reserve", f"{more} KV blocks are wanted, of {self._batcher.num_free_blocks} free")
        if more > 0:
            self._batcher.hold(more)
            self._num_blocks += more

    async def write(self, pages: KVPages) -> None:
        await checkpoint()
        self._renew()
        first = pages.first_block * self.layout.block_tokens
        end = first + pages.num_tokens
        if first > self._num_tokens or _blocks(end, self.layout) > self._num_blocks:
            raise aborted("copy", f"pages of tokens {first} to {end} do not fit")
        self._num_tokens = max(self._num_tokens, end)

    async def commit(self, tokens: Sequence[int]) -> None:
        await anyio.sleep(self._handover_s)
        self._renew()
        if tuple(tokens[: self._request.num_tokens]) != self._request.tokens:
            raise aborted("commit", "the request is not the one that was announced")
        self._arrivals[self._request.id] = self

    def hand_over(self, sequence: Running) -> None:
        """Give the sequence of the request the blocks that were written; its last token is computed again."""
        sequence.num_cached = min(self._num_tokens, sequence.num_tokens - 1)
        sequence.num_blocks, self._num_blocks = self._num_blocks, 0

    def close(self) -> None:
        """Free all blocks."""
        if not self._closed:
            self._closed = True
            if self._arrivals.get(self._request.id) is self:
                del self._arrivals[self._request.id]
            self._batcher.hold(-self._num_blocks)

    def _renew(self) -> None:
        self._check()
        if current_time() - self._called_s > LAPSE_S:
            self.close()
        if self._closed:
            raise aborted("copy", f"its destination got no call for {LAPSE_S:g} s")
        self._called_s = current_time()


def aborted(stage: str, because: str) -> MigrationAborted:
    """Return the error that says in which stage a move ended, and why."""
    return MigrationAborted(
        f"The move ended in {stage}: {because}. The request goes on without it.", stage=stage
    )


def _blocks(num_tokens: int, layout: KVLayout) -> int:
    return -(-num_tokens // layout.block_tokens)
