"""What an engine asks about adapters: hold one, forget one, and who uses which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread
import torch
from anyio.lowlevel import checkpoint

from hotswap.backends.torch.adapters.peft import AdapterWeights, PeftCache
from hotswap.backends.torch.adapters.plan import RankRange
from hotswap.backends.torch.adapters.pool import AdapterPool, bytes_per_rank
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.device import out_of_memory_mapped
from hotswap.errors import InstanceError, OutOfMemory, ShardMissing, UnknownAdapter
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId

__all__ = ["AdapterHolder", "Held"]


@dataclass(slots=True, eq=False)
class Held:
    """An adapter in its place, and how many requests use it."""

    ranks: RankRange
    num_users: int = 0


class AdapterHolder:
    """The adapters that one engine holds, of the model that it serves; lives on the event loop.

    Args:
        engine: Its name, for errors.
        device: Where the adapters lie.
        most: How many it may hold.
        size_bytes: What their matrices may take on the device, and again what those that were read may take
            in host memory.
    """

    def __init__(self, engine: InstanceId, device: torch.device, *, most: int, size_bytes: int) -> None:
        self._engine, self._device, self._most, self._size_bytes = engine, device, most, size_bytes
        self._cache = PeftCache(size_bytes)
        self._model: ModelId | None = None
        self._pool: AdapterPool | None = None
        self._held: dict[AdapterId, Held] = {}
        self._line = anyio.Lock()  # of those that load
        self._pen = anyio.Lock()  # of those that change the pool

    @property
    def names(self) -> tuple[AdapterId, ...]:
        """Those that are held."""
        return tuple(self._held)

    def serve(self, model: ModelId, targets: Mapping[str, Target]) -> None:
        """Hold adapters of `model` from now on."""
        assert self._pool is None, "the model before was forgotten"
        dtype = next((target.dtype for target in targets.values()), torch.float32)
        num_ranks = self._size_bytes // max(1, bytes_per_rank(targets, dtype))
        self._model = model
        self._pool = AdapterPool(targets, num_ranks=num_ranks, dtype=dtype, device=self._device)

    async def forget(self) -> None:
        """Drop everything: the model goes. Cannot be interrupted."""
        pool, self._pool, self._model, self._held = self._pool, None, None, {}
        if pool is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(pool.close)

    async def load(self, adapter: Adapter) -> None:
        """Read an adapter and put it in a place; see `SupportsAdapters.load_adapter`."""
        name = adapter.version
        async with self._line:
            pool = self._pool_of(adapter)
            if name in self._held:
                return
            if len(self._held) >= self._most:
                raise OutOfMemory(
                    f"Engine {self._engine!r} holds {len(self._held)} adapters, all it may; drop one."
                )
            if adapter.source is None:
                raise ShardMissing(f"Adapter {name!r} has no source; say in which directory it lies.")
            with out_of_memory_mapped(f"adapter {name!r} of engine {self._engine!r}"):
                weights = await anyio.to_thread.run_sync(self._cache.get, Path(adapter.source), pool.dtype)
            pool.check(name, weights)
            async with self._pen:
                self._held[name] = Held(await self._put(name, weights, pool))

    async def _put(self, name: AdapterId, weights: AdapterWeights, pool: AdapterPool) -> RankRange:
        ranks = pool.take(weights.rank)
        if ranks is None:
            raise OutOfMemory(
                f"Adapter {name!r} of rank {weights.rank} finds no room in the {pool.num_ranks} ranks "
                f"of engine {self._engine!r}; drop one, or give the engine more adapter_bytes."
            )
        try:
            with out_of_memory_mapped(f"adapter {name!r} of engine {self._engine!r}"):
                await anyio.to_thread.run_sync(pool.put, ranks, weights)
            # The same model, loaded again meanwhile, has another pool.
            if self._pool is not pool:
                raise InstanceError(
                    f"Engine {self._engine!r} unloaded the model of adapter {name!r} while that was read; "
                    "ask again."
                )
        except BaseException:
            pool.give(ranks)
            raise
        return ranks

    async def drop(self, adapter: AdapterId) -> None:
        """Forget an adapter; see `SupportsAdapters.drop_adapter`."""
        await checkpoint()
        async with self._pen:
            held = self._held.get(adapter)
            if held is None or self._pool is None:
                return
            if held.num_users:
                raise InstanceError(
                    f"{held.num_users} requests of engine {self._engine!r} use adapter {adapter!r}; "
                    "let them end."
                )
            del self._held[adapter]
            self._pool.give(held.ranks)

    def use(self, adapter: AdapterId | None) -> Held | None:
        """Count a user more, who counts itself out later.

        Raises:
            UnknownAdapter: it is not held.
        """
        if adapter is None:
            return None
        held = self._held.get(adapter)
        if held is None:
            raise UnknownAdapter(f"Engine {self._engine!r} holds no adapter {adapter!r}; load it first.")
        held.num_users += 1
        return held

    def _pool_of(self, adapter: Adapter) -> AdapterPool:
        if self._pool is None or self._model != adapter.model:
            raise InstanceError(
                f"Engine {self._engine!r} serves {self._model!r}, and adapter {adapter.id!r} is of "
                f"{adapter.model!r}; ask an engine that serves that."
            )
        return self._pool
