"""Scratch memory of FP8 products, reused from one product to the next."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Scratch memory for products that run one after another, on one stream or in one thread.

    It grows to the largest size needed and is kept: new pages cost a CPU more than writing to them.

    Args:
        device: Device of the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(part.nbytes for part in self._parts.values())

    def sums(self, count: int) -> Tensor:
        """Return `count` uninitialized float32, for the partial sums of a product."""
        return self._part("sums", count, torch.float32)

    def counters(self, count: int) -> Tensor:
        """Return `count` int32 that are zero; the user sets them to zero again."""
        return self._part("counters", count, torch.int32)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return `[num_rows, width]`, uninitialized, for rows of a weight; one buffer for each dtype."""
        return self._part("rows", num_rows * width, dtype)[: num_rows * width].view(num_rows, width)

    def _part(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        part = self._parts.get((name, dtype))
        if part is None or part.numel() < count:
            make = torch.zeros if name == "counters" else torch.empty
            part = self._parts[name, dtype] = make(count, dtype=dtype, device=self._device)
        return part
