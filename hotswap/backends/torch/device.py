"""What an engine asks of a device: how much memory it has, and whether what was let go of is free."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import anyio
import anyio.to_thread
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hotswap.errors import MemoryNotReclaimed, OutOfMemory
from hotswap.kernels.processor import instructions

__all__ = [
    "Released",
    "multiplies_bf16",
    "out_of_memory_mapped",
    "resolve",
    "total_bytes",
    "touch",
]

_RECLAIM_S = 5.0
_POLL_S = 0.01


def resolve(device: str | torch.device) -> torch.device:
    """Return the device by its full name: `"cuda"` is the current one."""
    wanted = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(wanted) == "cuda" else wanted


def total_bytes(device: torch.device) -> int:
    """All the memory of a device, whoever holds it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bf16 products; without them libraries go by way of fp32."""
    return not instructions().isdisjoint({"avx512_bf16", "amx_bf16"})


def touch(device: torch.device) -> None:
    """Fail if the device does not answer, as it does not after some errors until its process ends."""
    torch.zeros(1, device=device).item()


class Released:
    """Memory of a GPU that was let go of, watched until it is free; on a CPU nothing is watched.

    The tensors themselves are watched, not how much memory the device has free: that changes with whatever
    else uses the device, other engines of the process among them, and PyTorch's allocator keeps a segment
    for as long as any small tensor lies in it.

    Args:
        device: Where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[Any] = []  # `StorageWeakRef`, which has no types

    def watch(self, *tensors: Tensor) -> None:
        """Watch the memory of tensors that are about to be let go of, views of it included."""
        if self._device.type == "cuda":
            references: Any = StorageWeakRef
            self._storages += [references(tensor.untyped_storage()) for tensor in tensors]

    async def freed(self) -> None:
        """Return once all of it is free, and what the allocator can give back to the driver is given back.

        Raises:
            MemoryNotReclaimed: something still uses it after a few seconds.
        """
        used, self._storages = self._storages, []
        with anyio.move_on_after(_RECLAIM_S):
            while used := [storage for storage in used if not storage.expired()]:
                gc.collect()
                await anyio.sleep(_POLL_S)
        if self._device.type == "cuda":
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(torch.cuda.empty_cache)
        if used:
            raise MemoryNotReclaimed(
                f"{len(used)} tensors that an unload let go of are still in use, and keep their memory of "
                f"{self._device}; let go of what was taken from the engine, or restart the process."
            )


@contextmanager
def out_of_memory_mapped(what: str) -> Generator[None]:
    """Raise torch's ways of saying that memory ran out as `OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as exc:
        # On the CPU torch has no type for it, only the words of its allocator.
        if isinstance(exc, RuntimeError) and not isinstance(exc, torch.OutOfMemoryError):
            words = str(exc)
            if "allocate memory" not in words and "not enough memory" not in words:
                raise
        raise OutOfMemory(
            f"There is no memory for {what}; unload something or give the engine less."
        ) from exc
