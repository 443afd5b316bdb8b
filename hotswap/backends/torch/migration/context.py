"""The parts of an engine that a KV source and a KV sink use, and jobs for its thread between two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
import torch
from anyio.lowlevel import checkpoint
from torch import Tensor

from hotswap.backends.life import Life
from hotswap.backends.torch.arrival import Announced
from hotswap.backends.torch.fingerprint import computed_by
from hotswap.backends.torch.kv import LayerShape
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.sequence import Sequence
from hotswap.backends.torch.worker import Pieces, Worker
from hotswap.errors import MigrationAborted
from hotswap.migration import KVLayout
from hotswap.request import AdapterId, ModelId, Request, RequestId
from hotswap.worker_threads import in_thread

__all__ = ["PIECE_BYTES", "MigrationContext", "MovedBlocks", "MovedStates", "aborted"]

# Bytes that are copied at once between two steps; at least one block.
PIECE_BYTES = 1 << 20


class MovedBlocks(Protocol):
    """What is copied of KV blocks: a `KVCache` is one.

    Attributes:
        is_local: Whether any thread may copy; otherwise the engine's thread does, between steps.
    """

    is_local: bool
    block_tokens: int
    device: torch.device

    @property
    def layers(self) -> Mapping[int, LayerShape]:
        """The shape of each layer."""
        ...

    @property
    def block_bytes(self) -> int:
        """The size of one block in all layers."""
        ...

    def save(self, blocks: Items[int], out: Tensor) -> None:
        """Copy blocks to host memory."""
        ...

    def restore(self, blocks: Items[int], data: Tensor) -> None:
        """Fill blocks that no request reads yet with data that `save` wrote."""
        ...

    def allocate(self, runs: Iterable[range]) -> None:
        """Allocate the memory of runs of blocks, as the first write does."""
        ...


class MovedStates(Protocol):
    """What is copied of recurrent states: a `StatePool` is one."""

    @property
    def uses_kernels(self) -> bool:
        """Whether a slot is cleared by `clear` alone."""
        ...

    @property
    def slot_bytes(self) -> int:
        """The size of the states of one request."""
        ...

    @property
    def format(self) -> tuple[tuple[int, tuple[int, ...], str], ...]:
        """Each state of a request: its layer, shape and dtype."""
        ...

    def save(self, slot: int, out: Tensor) -> None:
        """Copy the states in a slot to host memory."""
        ...

    def restore(self, slot: int, data: Tensor) -> None:
        """Fill a slot that no request has yet with data that `save` wrote."""
        ...

    def clear(self, slot: int) -> None:
        """Zero a slot."""
        ...


@dataclass(slots=True, eq=False)
class MigrationContext:
    """The parts of an engine that a KV source and a KV sink use, while one model serves.

    After `end` it refers to nothing of the model: a caller that still has a source, a sink or a listed prefix
    then keeps no memory of the device.

    Attributes:
        life: Ends every wait when the engine is lost.
        worker: The engine's thread, which runs the jobs.
        post: Calls a function on the event loop, from any thread.
        weights: A fingerprint of the weights that compute, for layouts and `root_key`.
        serving: The runner that owns the blocks, the KV cache, and the recurrent states, if the model has
            some; `None` once the model is unloaded.
        arriving: What is announced of requests that arrive.
        writing: The sinks that write to blocks now, maybe in other threads.
    """

    life: Life
    worker: Worker
    post: Callable[..., None]
    weights: str
    serving: tuple[Runner, MovedBlocks, MovedStates | None] | None
    arriving: dict[RequestId, Announced] = field(default_factory=dict[RequestId, Announced])
    writing: set[object] = field(default_factory=set[object])

    @property
    def runner(self) -> Runner:
        """The runner that owns the blocks; `MigrationAborted` if the model was unloaded."""
        return self._parts()[0]

    @property
    def cache(self) -> MovedBlocks:
        """The KV blocks; `MigrationAborted` if the model was unloaded."""
        return self._parts()[1]

    @property
    def states(self) -> MovedStates | None:
        """The recurrent states, if the model has some; `MigrationAborted` if it was unloaded."""
        return self._parts()[2]

    def end(self) -> None:
        """Let go of the model, which is unloaded; no copy may be under way."""
        self.serving = None

    def _parts(self) -> tuple[Runner, MovedBlocks, MovedStates | None]:
        if self.serving is None:
            raise _gone()
        return self.serving

    def announced(self, request: Request, root: bytes) -> Announced | None:
        """Return what was announced of a request with these tokens and this root; `None` if nothing."""
        announced = self.arriving.get(request.id)
        if announced is None or announced.root != root:
            return None
        return announced if request.tokens[: len(announced.tokens)] == announced.tokens else None

    def layout_for(self, request: Request) -> KVLayout:
        """Return the layout of a request's KV blocks on this engine."""
        return self.layout(request.model, request.adapter)

    def layout(self, model: ModelId, adapter: AdapterId | None) -> KVLayout:
        """Return the layout of the KV blocks of a model with an adapter."""
        layers = tuple(
            (shape.kv_heads, shape.key_dim, shape.value_dim, str(shape.dtype).removeprefix("torch."))
            for _, shape in sorted(self.cache.layers.items())
        )
        states = self.states
        return KVLayout(
            model=model,
            weights=self.weights,
            adapter=adapter,
            block_tokens=self.cache.block_tokens,
            layers=layers,
            block_bytes=self.cache.block_bytes,
            states=() if states is None else states.format,
            state_bytes=0 if states is None else states.slot_bytes,
            computed_by=computed_by(self.cache.device),
        )

    def host_memory(self, size_bytes: int) -> Tensor:
        """Return host memory for copies of blocks, pinned for a GPU: the driver would stage other memory."""
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.cache.device.type == "cuda")

    def refuse_if_gone(self) -> None:
        """Raise `InstanceLost` if the engine is lost, `MigrationAborted` if the model was unloaded."""
        self.life.refuse_if_lost()
        self._parts()

    async def between_steps(self, begin: Callable[[Runner, Mapping[int, Sequence]], Pieces]) -> None:
        """Run a job on the engine's thread between two steps, and wait for it.

        Raises:
            MigrationAborted: the model was unloaded.
            InstanceLost: the engine is lost.
        """
        self.refuse_if_gone()
        job = _Job(begin, self.runner, self.post)
        self.worker.submit(job)
        try:
            await self.life.unless_lost(job.ended.wait())
            if job.error is not None:
                raise job.error
        finally:
            job.cancelled = True
            job.error = None  # an error and its job refer to each other, and would keep the blocks alive

    async def beside(self, copy: Callable[[], None], size_bytes: int) -> None:
        """Copy without the engine's thread, if any may: in this one if there are few bytes, else in another.

        A cancellation waits for the end of such a copy, since blocks may be freed only when no copy writes to
        them. The engine's thread frees none before a copy that it was asked for earlier.
        """
        if not self.cache.is_local:
            await self.between_steps(partial(_in_one_piece, copy))
        elif size_bytes <= PIECE_BYTES:
            copy()
            await checkpoint()
        else:
            await in_thread(copy)

    def queue_job(self, begin: Callable[[Runner, Mapping[int, Sequence]], Pieces]) -> None:
        """Queue a job on the engine's thread before everything that is queued later, without waiting.

        Nothing is queued if the engine is lost or the model was unloaded.
        """
        if self.serving is not None and not self.life.is_lost:
            self.worker.submit(_Job(begin, self.serving[0], self.post))


@dataclass(slots=True, eq=False)
class _Job:
    """A job of the engine's thread whose end sets an event on the event loop."""

    work: Callable[[Runner, Mapping[int, Sequence]], Pieces]
    runner: Runner
    post: Callable[..., None]
    ended: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None
    cancelled: bool = False

    def begin(self, runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
        if runner is not self.runner:
            raise _gone()
        for _ in self.work(runner, sequences):
            if self.cancelled:
                return
            yield

    def end(self, error: Exception | None) -> None:
        if not self.cancelled:
            self.error = error
        self.post(self.ended.set)

    def drop(self) -> None:
        self.end(_gone())


def aborted(stage: str, because: str) -> MigrationAborted:
    """Return the error for a migration that ended in `stage`, with the reason."""
    return MigrationAborted(
        f"The migration ended in stage {stage!r}: {because}. The request continues without it.", stage=stage
    )


def _in_one_piece(copy: Callable[[], None], runner: Runner, sequences: Mapping[int, Sequence]) -> Pieces:
    copy()
    yield


def _gone() -> MigrationAborted:
    return aborted("copy", "the model whose KV blocks these are was unloaded")
