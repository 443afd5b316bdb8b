"""Memory, file descriptors and threads of this process, sampled while something runs."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import psutil

__all__ = ["ALLOWED", "Allowance", "describe", "sampling_usage"]


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much a figure may rise and count as flat: a share of its early value, and an amount on top."""

    share: float
    amount: int


ALLOWED = {
    "memory_bytes": Allowance(0.05, 16 << 20),
    "descriptors": Allowance(0.0, 4),
    "threads": Allowance(0.0, 4),
}


@asynccontextmanager
async def sampling_usage(every_s: float) -> AsyncGenerator[dict[str, list[int]]]:
    """Take a sample every `every_s` seconds while the block runs; the lists grow.

    Memory is resident memory after `malloc_trim`: how much the C library keeps for later depends on which
    threads started and ended.
    """
    process, trim = psutil.Process(), getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)
    samples: dict[str, list[int]] = {name: [] for name in ALLOWED}

    async def take_samples() -> None:
        while True:
            trim(0)
            samples["memory_bytes"].append(process.memory_info().rss)
            samples["descriptors"].append(process.num_fds())
            samples["threads"].append(process.num_threads())
            await anyio.sleep(every_s)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(take_samples)
        yield samples
        tasks.cancel_scope.cancel()


def describe(samples: Sequence[int], allowance: Allowance) -> dict[str, Any]:
    """Say whether a figure is flat: after the first quarter, the warm-up, the first third against the last.

    The median of the last third may be over that of the first by no more than the allowance.
    """
    quarter = max(1, len(samples) // 4)
    early = statistics.median(samples[quarter : 2 * quarter] or samples)
    late = statistics.median(samples[-quarter:])
    limit = early * (1 + allowance.share) + allowance.amount
    return {"early": early, "late": late, "limit": limit, "flat": late <= limit}
