"""What an engine asks about adapters: hold one, forget one, and who uses which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import anyio.to_thread
import torch
from anyio.lowlevel import checkpoint

from hotswap.backends.adapter_accounting import AdapterAccounting, Held
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import AdapterWeights, PeftCache
from hotswap.backends.torch.adapters.places import Place
from hotswap.backends.torch.adapters.pool import AdapterPool, bytes_per_rank
from hotswap.backends.torch.adapters.ranges import RangePool
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.device import out_of_memory_mapped
from hotswap.errors import OutOfMemory
from hotswap.kernels.segmented_lora import has_kernels
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId

__all__ = ["AdapterHolder", "pool_kind"]


def pool_kind(device: torch.device) -> type[PagedPool | RangePool]:
    """Return how adapters lie on a device: as kernels of GPUs want them where they run, and else as on a CPU.

    Without kernels pages cost a product for each adapter, and ranges a handful for all.
    """
    return PagedPool if device.type != "cpu" and has_kernels(device) else RangePool


class AdapterHolder:
    """The adapters that one engine holds, of the model that it serves; lives on the event loop.

    Args:
        engine: Its name, for errors.
        device: Where the adapters lie.
        most: How many it may hold.
        size_bytes: What their matrices may take on the device, and again what those that were read may take
            in host memory.
        notifier: Told when an adapter comes or goes.
    """

    def __init__(
        self,
        engine: InstanceId,
        device: torch.device,
        *,
        most: int,
        size_bytes: int,
        notifier: StatusNotifier,
    ) -> None:
        self._engine, self._device, self._size_bytes = engine, device, size_bytes
        self._cache = PeftCache(size_bytes)
        self._pool: AdapterPool[Any] | None = None
        self._accounting = AdapterAccounting[Place](engine, most=most, notifier=notifier)
        self._line = anyio.Lock()  # of those that load
        self._pen = anyio.Lock()  # of those that change the pool

    @property
    def names(self) -> tuple[AdapterId, ...]:
        """Those that are held."""
        return self._accounting.names

    def serve(self, model: ModelId, targets: Mapping[str, Target]) -> None:
        """Hold adapters of `model` from now on."""
        assert self._pool is None, "the model before was forgotten"
        dtype = next((target.dtype for target in targets.values()), torch.float32)
        num_ranks = self._size_bytes // max(1, bytes_per_rank(targets, dtype))
        self._accounting.serve(model)
        self._pool = pool_kind(self._device)(targets, num_ranks=num_ranks, dtype=dtype, device=self._device)

    async def forget(self) -> None:
        """Drop everything: the model goes. Cannot be interrupted."""
        self._accounting.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(pool.close)

    async def load(self, adapter: Adapter) -> None:
        """Read an adapter and put it in a place; see `SupportsAdapters.load_adapter`."""
        name = adapter.version
        async with self._line:
            directory, pool = self._accounting.directory_of(adapter), self._pool
            if directory is None or pool is None:
                return
            with out_of_memory_mapped(f"adapter {name!r} of engine {self._engine!r}"):
                weights = await anyio.to_thread.run_sync(self._cache.get, directory, pool.dtype)
            pool.check(name, weights)
            async with self._pen:
                self._accounting.add(name, await self._put(name, weights, pool))

    async def _put(self, name: AdapterId, weights: AdapterWeights, pool: AdapterPool[Any]) -> Place:
        ranks: Place | None = pool.take(weights.rank)
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
                raise self._accounting.unloaded(name)
        except BaseException:
            pool.give(ranks)
            raise
        return ranks

    async def drop(self, adapter: AdapterId) -> None:
        """Forget an adapter; see `SupportsAdapters.drop_adapter`."""
        await checkpoint()
        async with self._pen:
            ranks = self._accounting.remove(adapter)
            if ranks is not None and self._pool is not None:
                self._pool.give(ranks)

    def use(self, adapter: AdapterId | None) -> Held[Place] | None:
        """Count a user more, who counts itself out later.

        Raises:
            UnknownAdapter: it is not held.
        """
        return self._accounting.use(adapter)
