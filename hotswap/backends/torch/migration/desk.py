"""What both ends of a move use of an engine, and how they have its thread do something between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import anyio
from anyio.lowlevel import checkpoint

from hotswap.backends.life import Life
from hotswap.backends.stores.shielded import in_thread
from hotswap.backends.torch.batcher import Sequence
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.runner import Runner
from hotswap.backends.torch.worker import Pieces, Worker
from hotswap.errors import MigrationAborted
from hotswap.migration import KVLayout
from hotswap.request import Request, RequestId

__all__ = ["PIECE_BYTES", "Announced", "Desk", "aborted", "beside"]

# Bytes that are copied in one go, between two steps; a block is the least.
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Announced:
    """The tokens of a request that arrives, when its move began, and the keys of its full blocks."""

    tokens: tuple[int, ...]
    root: bytes
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Desk:
    """What both ends use of an engine, as long as one model serves.

    Attributes:
        life: Ends every wait when the engine is lost.
        worker: Does the work.
        runner: What it steps for now; with another, the blocks are others too.
        post: Has the event loop make a call, from any thread.
        cache: Where the blocks lie.
        weights: Stands for the weights that compute.
        epoch: Which load they came with.
        current: The engine's desk now; with another, or none, the model has gone.
        arriving: What was announced of requests that arrive: their tokens then, and the keys of their full
            blocks behind a root.
    """

    life: Life
    worker: Worker
    runner: Runner
    post: Callable[..., None]
    cache: KVCache
    weights: str
    epoch: int
    current: Callable[[], Desk | None]
    arriving: dict[RequestId, Announced] = field(default_factory=dict[RequestId, Announced])

    def keys_of(self, request: Request, root: bytes) -> tuple[bytes, ...]:
        """Return the keys of a request's first blocks if it was announced, so that nobody waits for them."""
        announced = self.arriving.get(request.id)
        if announced is None or announced.root != root:
            return ()
        return announced.keys if request.tokens[: len(announced.tokens)] == announced.tokens else ()

    def layout_for(self, request: Request) -> KVLayout:
        """Return what the KV blocks of a request mean here."""
        layers = tuple(
            (shape.kv_heads, shape.key_dim, shape.value_dim, str(shape.dtype).removeprefix("torch."))
            for _, shape in sorted(self.cache.layers.items())
        )
        return KVLayout(
            model=request.model,
            weights=self.weights,
            adapter=request.adapter,
            block_tokens=self.cache.block_tokens,
            layers=layers,
            block_bytes=self.cache.block_bytes,
        )

    def refuse_if_gone(self) -> None:
        """Raise `InstanceLost` if the engine is lost, `MigrationAborted` if the model has gone."""
        self.life.refuse_if_lost()
        if self.current() is not self:
            raise _gone()

    async def between_steps(self, begin: Callable[[Runner, Mapping[int, Sequence]], Pieces]) -> None:
        """Do something on the thread, between two steps.

        Raises:
            MigrationAborted: the model has gone.
            InstanceLost: the engine is lost.
        """
        self.refuse_if_gone()
        job = _Job(begin, self.runner, self.post)
        self.worker.work(job)
        try:
            await self.life.unless_lost(job.ended.wait())
            if job.error is not None:
                raise job.error
        finally:
            job.cancelled = True
            job.error = None  # or it and the job keep each other, and with them the blocks

    def ask(self, begin: Callable[[Runner, Mapping[int, Sequence]], Pieces]) -> None:
        """Have something done on the thread before whatever is asked later; nobody waits for it."""
        self.worker.work(_Job(begin, self.runner, self.post))


@dataclass(slots=True, eq=False)
class _Job:
    """Something that the event loop waits for."""

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
    """Return the error that says in which stage a move ended, and why."""
    return MigrationAborted(
        f"The move ended in {stage}: {because}. The request goes on without it.", stage=stage
    )


async def beside(copy: Callable[[], None], size_bytes: int) -> None:
    """Copy without the engine's thread: here if that is sooner done than handed to another thread.

    Cancelled, it ends first: blocks go back when nobody writes to them any more.
    """
    if size_bytes <= PIECE_BYTES:
        copy()
        await checkpoint()
    else:
        await in_thread(copy)


def _gone() -> MigrationAborted:
    return aborted("copy", "the model whose KV blocks these are was unloaded")
