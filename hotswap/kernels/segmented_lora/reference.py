"""What `segmented_lora` computes, said as plainly as can be: row after row, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Adapter", "segmented_lora_reference"]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter of one projection.

    Attributes:
        down: One `[rank, in]` for each slice, or `None` for a slice that it does not change.
        up: Likewise `[rank, out]`.
        scale: The factor of what is added.
    """

    down: Sequence[Tensor | None]
    up: Sequence[Tensor | None]
    scale: float = 1.0


def segmented_lora_reference(
    out: Tensor, x: Tensor, adapters: Sequence[Adapter | None], slots: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Return `out` in float64 with every row's update added.

    Row *i* gets, for each slice, `scale * x[i] @ down.T @ up` of adapter `slots[i]`, and nothing if that is
    -1 or an empty slot.

    Args:
        out: `[rows, sum(widths)]`; not changed.
        x: `[rows, in]`.
        adapters: By slot.
        slots: `[rows]`.
        widths: Of the slices, side by side in `out`.
    """
    right = out.double().clone()
    for index, slot in enumerate(slots):
        adapter = adapters[slot] if slot >= 0 else None
        if adapter is None:
            continue
        at = 0
        for down, up, width in zip(adapter.down, adapter.up, widths, strict=True):
            if down is not None and up is not None:
                ranks = x[index].double() @ down.double().T
                right[index, at : at + width] += adapter.scale * (ranks @ up.double())
            at += width
    return right
