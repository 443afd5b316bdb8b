"""Reference implementation of `segmented_lora`: row by row, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Adapter", "segmented_lora_reference"]


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The weights of an adapter for one projection.

    Attributes:
        down: A of each slice, `[rank, in]`, or `None` for a slice that the adapter does not change.
        up: B of each slice, transposed, `[rank, out]`, or `None`.
        scale: The factor of the update.
    """

    down: Sequence[Tensor | None]
    up: Sequence[Tensor | None]
    scale: float = 1.0


def segmented_lora_reference(
    out: Tensor, x: Tensor, adapters: Sequence[Adapter | None], slots: Sequence[int], widths: Sequence[int]
) -> Tensor:
    """Return `out` in float64 with the update of each row added.

    Row *i* gets `scale * x[i] @ down.T @ up` of adapter `slots[i]` for each slice, or nothing if the slot is
    -1 or empty.

    Args:
        out: `[rows, sum(widths)]`; not changed.
        x: `[rows, in]`.
        adapters: By slot.
        slots: `[rows]`.
        widths: Widths of the slices, which are adjacent in `out`.
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
