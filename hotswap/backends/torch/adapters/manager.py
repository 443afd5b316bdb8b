"""Loads and drops the adapters of an engine, and counts the requests that use each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import torch
from anyio.lowlevel import checkpoint

from hotswap.backends.adapter_accounting import AdapterAccounting, Held
from hotswap.backends.notifier import StatusNotifier
from hotswap.backends.torch.adapters.paged import PagedPool
from hotswap.backends.torch.adapters.peft import AdapterWeights, PeftCache
from hotswap.backends.torch.adapters.pool import AdapterPool, bytes_per_rank
from hotswap.backends.torch.adapters.ranges import RangePool
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.device import out_of_memory_mapped
from hotswap.errors import OutOfMemory
from hotswap.kernels.segmented_lora import has_kernels
from hotswap.model import Adapter
from hotswap.request import AdapterId, ModelId
from hotswap.view import InstanceId
from hotswap.worker_threads import run_in_thread

__all__ = ["AdapterManager", "pool_kind"]


def pool_kind(device: torch.device) -> type[PagedPool | RangePool]:
    """Return the pool class for a device: pages on GPUs with adapter kernels, else ranges.

    Without kernels pages would take a product per adapter, ranges take a few for all.
    """
    return PagedPool if device.type != "cpu" and has_kernels(device) else RangePool


class AdapterManager:
    """The loaded adapters of an engine's serving model. Used on the event loop only.

    Args:
        engine: The engine's name, for errors.
        device: The device of the adapters.
        max_adapters: The maximum number of loaded adapters.
        size_bytes: The limit of their matrices on the device, and of the cache in host memory.
        notifier: Notified when an adapter is loaded or dropped.
    """

    def __init__(
        self,
        engine: InstanceId,
        device: torch.device,
        *,
        max_adapters: int,
        size_bytes: int,
        notifier: StatusNotifier,
    ) -> None:
        self._engine, self._device, self._size_bytes = engine, device, size_bytes
        self._cache = PeftCache(size_bytes)
        self._pool: AdapterPool[Any] | None = None
        self._accounting = AdapterAccounting[AdapterSlot](engine, most=max_adapters, notifier=notifier)
        self._load_lock = anyio.Lock()  # one load at a time
        self._pool_lock = anyio.Lock()  # one change of the pool at a time

    @property
    def names(self) -> tuple[AdapterId, ...]:
        """The loaded adapters."""
        return self._accounting.names

    @property
    def keys(self) -> dict[AdapterId, bytes]:
        """The digests of the loaded adapters."""
        return {name: slot.key for name, slot in self._accounting.places.items()}

    def serve(self, model: ModelId, targets: Mapping[str, Target]) -> None:
        """Make an empty pool for the adapters of `model`.

        Args:
            model: The model that is served now.
            targets: Its layers that can have adapters.
        """
        assert self._pool is None, "`forget` was called for the model before"
        dtype = next((target.dtype for target in targets.values()), torch.float32)
        num_ranks = self._size_bytes // max(1, bytes_per_rank(targets, dtype))
        self._accounting.serve(model)
        self._pool = pool_kind(self._device)(targets, num_ranks=num_ranks, dtype=dtype, device=self._device)

    async def forget(self) -> None:
        """Drop all adapters, before the model is unloaded. Shielded from cancellation."""
        self._accounting.clear()
        pool, self._pool = self._pool, None
        if pool is not None:
            with anyio.CancelScope(shield=True):
                await run_in_thread(pool.close)

    async def load(self, adapter: Adapter) -> None:
        """Read an adapter and write it to a slot; see `SupportsAdapters.load_adapter`."""
        name = adapter.version
        async with self._load_lock:
            directory, pool = self._accounting.directory_of(adapter), self._pool
            if directory is None or pool is None:
                return
            with out_of_memory_mapped(f"adapter {name!r} of engine {self._engine!r}"):
                weights = await run_in_thread(self._cache.get, directory, pool.dtype)
            pool.check(name, weights)
            async with self._pool_lock:
                self._accounting.add(name, await self._put(name, weights, pool))

    async def _put(self, name: AdapterId, weights: AdapterWeights, pool: AdapterPool[Any]) -> AdapterSlot:
        slot: AdapterSlot | None = pool.allocate(weights.rank, weights.digest)
        if slot is None:
            raise OutOfMemory(
                f"Adapter {name!r} of rank {weights.rank} does not fit in the {pool.num_ranks} ranks "
                f"of engine {self._engine!r}; drop one, or give the engine more adapter_bytes."
            )
        try:
            with out_of_memory_mapped(f"adapter {name!r} of engine {self._engine!r}"):
                await run_in_thread(pool.put, slot, weights)
            # The same model may have been reloaded meanwhile, with another pool.
            if self._pool is not pool:
                raise self._accounting.unloaded(name)
        except BaseException:
            pool.free(slot)
            raise
        return slot

    async def drop(self, adapter: AdapterId) -> None:
        """Drop an adapter; see `SupportsAdapters.drop_adapter`."""
        await checkpoint()
        async with self._pool_lock:
            slot = self._accounting.remove(adapter)
            if slot is not None and self._pool is not None:
                self._pool.free(slot)

    def use(self, adapter: AdapterId | None) -> Held[AdapterSlot] | None:
        """Count a request as a user of an adapter; the caller decrements `num_users` when the request ends.

        Returns:
            The entry of the adapter; `None` for a request without one.

        Raises:
            UnknownAdapter: the adapter is not loaded.
        """
        return self._accounting.use(adapter)
