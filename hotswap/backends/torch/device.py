"""What an engine asks of a device: how much memory it has, has left, and got back."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import anyio
import torch

from hotswap.errors import MemoryNotReclaimed, OutOfMemory
from hotswap.kernels.processor import instructions

__all__ = [
    "free_bytes",
    "multiplies_bf16",
    "out_of_memory_mapped",
    "reclaimed",
    "resolve",
    "total_bytes",
    "touch",
]

_RECLAIM_S = 5.0
# What the allocator's rounding, and the few buffers that a skeleton keeps, may hold on to.
_SLACK_BYTES = 64 << 20
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


def free_bytes(device: torch.device) -> int:
    """Bytes of the device that nobody holds; 0 on the CPU, where nobody asks."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


@cache
def multiplies_bf16() -> bool:
    """Whether the CPU has instructions for bf16 products; without them libraries go by way of fp32."""
    return not instructions().isdisjoint({"avx512_bf16", "amx_bf16"})


def touch(device: torch.device) -> None:
    """Fail if the device does not answer, as it does not after some errors until its process ends."""
    torch.zeros(1, device=device).item()


async def reclaimed(device: torch.device, free_before: int, expected_bytes: int) -> None:
    """Return once the device has `expected_bytes` more free than `free_before`; at once on the CPU.

    Raises:
        MemoryNotReclaimed: it has not within a few seconds.
    """
    if device.type != "cuda":
        return
    with anyio.move_on_after(_RECLAIM_S):
        while True:
            gc.collect()
            torch.cuda.empty_cache()
            if free_bytes(device) - free_before >= 0.95 * expected_bytes - _SLACK_BYTES:
                return
            await anyio.sleep(_POLL_S)
    raise MemoryNotReclaimed(
        f"{device} has {free_bytes(device) - free_before:,} bytes more free after an unload that held "
        f"{expected_bytes:,}; end whatever else holds its memory, or restart the process."
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
