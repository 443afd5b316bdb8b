"""Queries of a device: its name, its memory, and whether released memory is free."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import anyio
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hotswap.checks import shown
from hotswap.errors import ConfigError, MemoryNotReclaimed, OutOfMemory
from hotswap.kernels.processor import instructions
from hotswap.worker_threads import run_in_thread

__all__ = [
    "ReleasedMemory",
    "available_bytes",
    "check_device",
    "is_out_of_memory",
    "multiplies_bf16",
    "out_of_memory_mapped",
    "resolve",
    "total_bytes",
]

_RECLAIM_S = 5.0
_POLL_S = 0.01


def resolve(device: str | torch.device) -> torch.device:
    """Return the device with its index: `"cuda"` is the current CUDA device.

    Raises:
        ConfigError: PyTorch does not know it, or sees no such GPU.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as exc:
        raise ConfigError(f"device is {shown(device)}, it must be 'cpu', 'cuda' or 'cuda:0' ...") from exc
    if wanted.type != "cuda":
        return wanted
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigError(
            f"device is {str(wanted)!r}, and PyTorch {torch.__version__} sees no GPU; install PyTorch for "
            "CUDA and a driver, or give 'cpu'."
        )
    index = torch.cuda.current_device() if str(wanted) == "cuda" else wanted.index
    if index >= count:
        raise ConfigError(
            f"device is {str(wanted)!r}, and PyTorch sees {count} GPUs, from 'cuda:0' on; give one of them, "
            "or set CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)


def available_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that this process could allocate now."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def total_bytes(device: torch.device) -> int:
    """Return the total memory of a device, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@cache
def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bf16 products; without them libraries convert to fp32."""
    return not instructions().isdisjoint({"avx512_bf16", "amx_bf16"})


def check_device(device: torch.device) -> None:
    """Raise `RuntimeError` if the device fails; after some CUDA errors it does until the process ends."""
    torch.zeros(1, device=device).item()


class ReleasedMemory:
    """Tracks released tensors of a GPU until their memory is free. On a CPU nothing is tracked.

    Tracks the tensors' storages, not the free memory of the device: that depends on all users of the device,
    other engines of the process included, and PyTorch's allocator keeps a segment while any small tensor uses
    a part of it.

    Args:
        device: The device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: list[Any] = []  # `StorageWeakRef`, which has no types

    def watch(self, *tensors: Tensor) -> None:
        """Track the storages of tensors that are about to be released; views of them count as uses."""
        if self._device.type == "cuda":
            references: Any = StorageWeakRef
            self._storages += [references(tensor.untyped_storage()) for tensor in tensors]

    def unwatch(self, *tensors: Tensor) -> None:
        """Do not wait for the storages of tensors that are kept after all."""
        references: Any = StorageWeakRef
        kept = [references(tensor.untyped_storage()) for tensor in tensors]
        self._storages = [storage for storage in self._storages if storage not in kept]

    async def freed(self) -> None:
        """Wait until all tracked memory is free, and return the allocator's unused memory to the driver.

        Tensors in reference cycles are collected once, in a worker thread, if some memory is still in use:
        a collection takes tenths of a second.

        Raises:
            MemoryNotReclaimed: something still uses it after a few seconds.
        """
        used, self._storages = self._storages, []
        is_collected = False
        with anyio.move_on_after(_RECLAIM_S):
            while used := [storage for storage in used if not storage.expired()]:
                if not is_collected:
                    await run_in_thread(gc.collect)
                    is_collected = True
                    continue
                await anyio.sleep(_POLL_S)
        used = [storage for storage in used if not storage.expired()]  # on a busy machine it ends late
        if self._device.type == "cuda":
            with anyio.CancelScope(shield=True):
                await run_in_thread(torch.cuda.empty_cache)
        if used:
            raise MemoryNotReclaimed(
                f"{len(used)} tensors that an unload released are still referenced and keep their memory of "
                f"{self._device}; drop references to tensors of the engine, or restart the process."
            )


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch says that there is no memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # On a CPU torch raises a plain RuntimeError with the message of its allocator.
    words = str(error) if isinstance(error, RuntimeError) else ""
    return "allocate memory" in words or "not enough memory" in words


@contextmanager
def out_of_memory_mapped(what: str) -> Generator[None]:
    """Raise torch's out-of-memory errors as `OutOfMemory`; `what` names the allocation in the message."""
    try:
        yield
    except (RuntimeError, MemoryError) as exc:
        if not is_out_of_memory(exc):
            raise
        raise OutOfMemory(
            f"There is no memory for {what}; unload something or give the engine less."
        ) from exc
