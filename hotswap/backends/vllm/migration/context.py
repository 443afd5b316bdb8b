"""The parts of an engine that KV sources and sinks use, and the memory that they share with its core."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

from hotswap.backends.life import Life
from hotswap.backends.versions import versions_of
from hotswap.backends.vllm.core import Core
from hotswap.backends.vllm.inside.blocks import METHOD
from hotswap.backends.vllm.inside.pages import BlockShape
from hotswap.backends.vllm.names import named
from hotswap.errors import MigrationAborted, UnsupportedModel
from hotswap.migration import KVLayout
from hotswap.request import AdapterId, ModelId, Request

__all__ = ["PIECE_BYTES", "MigrationContext", "SharedPages", "aborted", "block_shape"]

# Bytes that are copied in one go, between two steps; a block is the least.
PIECE_BYTES = 8 << 20


@cache
def _computed_by() -> str:
    """Return what blocks depend on beside the model: libraries and the device."""
    device, version = named("vllm.platforms:current_platform").get_device_name(), named("vllm:__version__")
    versions = versions_of("hotswap", "torch", "transformers", "triton")
    return f"vLLM {version}, {versions} on {device}"


async def block_shape(core: Core) -> BlockShape | None:
    """Return the shape of a core's KV blocks; `None` if they cannot move.

    Raises:
        InstanceLost: the core ended.
    """
    try:
        ranks = await core.call(_ask(core, "shape"), "report the shape of its KV blocks")
    except UnsupportedModel:
        return None
    if not ranks:
        return None
    offsets = [sum(size for size, _ in ranks[:place]) for place in range(len(ranks))]
    layers = [(dtype, tuple(shape)) for _, shapes in ranks for dtype, shape in shapes]
    return BlockShape(offsets[-1] + ranks[-1][0], offsets, tuple(layers))


@dataclass(frozen=True, slots=True)
class MigrationContext:
    """The parts of an engine that a KV source and a KV sink use, valid while one model serves.

    Attributes:
        life: Ends every wait when the engine is lost.
        core: The engine's.
        shape: The shape of its KV blocks.
        current: Returns the engine's core now; the model was unloaded if it is not this one.
    """

    life: Life
    core: Core
    shape: BlockShape
    current: Callable[[], Core | None]

    def layout_for(self, request: Request) -> KVLayout:
        """Return the layout of the KV blocks of a request."""
        return self.layout(request.model, request.adapter)

    def layout(self, model: ModelId, adapter: AdapterId | None) -> KVLayout:
        """Return the layout of the KV blocks of a model with an adapter."""
        tokens = self.core.block_tokens
        # Each attention backend has its own order of keys and values: one head, and the order in the name.
        layers = tuple(
            (1, prod(shape) // tokens, 0, f"{dtype} {shape}") for dtype, shape in self.shape.layers
        )
        return KVLayout(
            model=model,
            weights=f"vLLM {self.core.kv_identity}",
            adapter=adapter,
            block_tokens=tokens,
            layers=layers,
            block_bytes=self.shape.block_bytes,
            computed_by=_computed_by(),
        )

    def refuse_if_gone(self) -> None:
        """Raise `InstanceLost` if the engine is lost, `MigrationAborted` if the model was unloaded."""
        self.life.refuse_if_lost()
        if self.current() is not self.core:
            raise aborted("copy", "the model whose KV blocks these are was unloaded")

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """Return the answer of a method of the core's `BlockVerbs`, which runs even if the call is cancelled.

        Raises:
            MigrationAborted: the model was unloaded, or the core could not do it.
            InstanceLost: the engine is lost.
        """
        self.refuse_if_gone()
        try:
            answer = await self.life.unless_lost(
                self.core.call(_ask(self.core, verb, *arguments), f"{verb} KV blocks")
            )
        except UnsupportedModel as exc:
            raise aborted("copy", str(exc)) from exc
        self.refuse_if_gone()
        return answer

    def tell(self, verb: str, *arguments: Any, then: Callable[[], None]) -> None:
        """Have the core do something without waiting; `then` is called when it and all before it are done."""
        if self.life.is_lost:
            then()
        else:
            self.core.tell(partial(_ask, self.core, verb, *arguments), f"{verb} KV blocks", then)


class SharedPages:
    """Memory that a core's workers map; freed with the last process that has it open."""

    def __init__(self) -> None:
        try:
            self._file = os.memfd_create("hotswap-kv")
        except OSError as exc:
            raise aborted("reserve", f"there is no memory to share ({exc.strerror})") from exc
        self._mapped: mmap.mmap | None = None

    @property
    def path(self) -> str:
        """The path by which another process of this user opens it."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def room(self, size_bytes: int) -> memoryview:
        """Return its first `size_bytes` bytes, having grown to hold them.

        Raises:
            MigrationAborted: there is no memory.
        """
        if self._mapped is None or len(self._mapped) < size_bytes:
            try:
                os.posix_fallocate(self._file, 0, size_bytes)
            except OSError as exc:
                raise aborted(
                    "copy", f"there is no memory for {size_bytes:,} bytes ({exc.strerror})"
                ) from exc
            self._mapped = mmap.mmap(self._file, size_bytes)
        return memoryview(self._mapped)[:size_bytes]

    def put(self, data: memoryview) -> None:
        """Copy bytes to its beginning.

        Raises:
            MigrationAborted: there is no memory.
        """
        self.room(len(data))[:] = data

    def close(self) -> None:
        """Close it; views of it stay readable.

        No core may open it afterwards: the path may then be that of another file.
        """
        if self._file >= 0:
            os.close(self._file)
            self._file, self._mapped = -1, None  # a mapping keeps the file open too


def aborted(stage: str, because: str) -> MigrationAborted:
    """Return the error that says in which stage a move ended, and why."""
    return MigrationAborted(
        f"The move ended in {stage}: {because}. The request goes on without it.", stage=stage
    )


def _ask(core: Core, verb: str, *arguments: Any) -> Coroutine[Any, Any, Any]:
    answer: Coroutine[Any, Any, Any] = core.llm.engine_core.call_utility_async(METHOD, verb, list(arguments))
    return answer
