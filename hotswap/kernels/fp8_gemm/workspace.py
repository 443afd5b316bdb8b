"""Memory that products use while they run and leave for the next."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Workspace"]


class Workspace:
    """Memory for products that run one after the other: those of one stream, or of one thread, share one.

    It grows to what the largest needs, and is kept: fresh pages cost a CPU more than what is written to them.

    Args:
        device: Where it lies.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(part.nbytes for part in self._parts.values())

    def sums(self, count: int) -> Tensor:
        """`count` float32 of any value, for a product's partial sums."""
        return self._part("sums", count, torch.float32)

    def counters(self, count: int) -> Tensor:
        """`count` int32 of zero, which must be zero again when whoever uses them is done."""
        return self._part("counters", count, torch.int32)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """`[num_rows, width]` of any value, for rows of a weight; one for each dtype."""
        return self._part("rows", num_rows * width, dtype)[: num_rows * width].view(num_rows, width)

    def _part(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        part = self._parts.get((name, dtype))
        if part is None or len(part) < count:
            make = torch.zeros if name == "counters" else torch.empty
            part = self._parts[name, dtype] = make(count, dtype=dtype, device=self._device)
        return part
