"""The attention masks of a model's layers, evaluated for the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hotswap.backends.torch.gathered import Segment
from hotswap.kernels.paged_attention import Rows, Seen
from hotswap.kernels.paged_attention_gpu import Visible

__all__ = ["MaskFunction", "MaskPattern", "Paged"]

# Elements of a mask that are evaluated at once on a GPU: 32 MiB, and a few times that in between.
_MASK_ELEMENTS = 1 << 25

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskPattern:
    """The attention mask of one kind of layers, as a function of absolute positions.

    transformers would build the mask of a row as if the row were one sequence. hotswap takes transformers'
    mask *function* instead, so that windows and chunks are the model's own and no config is parsed for them.
    """

    ndim = 0
    """What models that make another mask of a tensor with four dimensions look at."""

    def __init__(self, function: MaskFunction) -> None:
        self._function = function
        self._hidden: dict[tuple[int, int, int], Tensor] = {}
        self._seen: Seen | None = None
        self._words: Visible | None = None

    def to(self, *_: object) -> MaskPattern:
        """Return itself: some models convert their masks."""
        return self

    def hidden(self, segment: Segment, first: int, last: int, num_keys: int) -> Tensor:
        """Return `[n, 1, last - first, 1, num_keys]` bools: the keys that are masked for these queries."""
        hidden = self._hidden.get((segment.start, first, num_keys))
        if hidden is None:
            hidden = ~self.visible(segment.positions[:, first:last], num_keys)[:, None, :, None]
            self._hidden[segment.start, first, num_keys] = hidden
        return hidden

    def seen(self, paged: Paged) -> Seen:
        """Return the key range and the mask of each row of a step. Cached: a pattern is used in one step."""
        if self._seen is None:
            self._seen = _seen(self, paged)
        return self._seen

    def words(self, positions: Tensor, num_keys: int) -> Visible:
        """Return what the rows of a step see, for the kernel of GPUs. Cached: a pattern is used in one step.

        Nothing is read on the host. Rows are evaluated a part at a time, which bounds the memory of masks.

        Args:
            positions: `[T]`, the position of each row.
            num_keys: The greatest position plus one.
        """
        if self._words is None:
            self._words = Visible.empty(len(positions), num_keys, positions.device)
            rows = max(4, _MASK_ELEMENTS // max(1, num_keys) // 4 * 4)
            for first in range(0, len(positions), rows):
                mask = self.visible(positions[first : first + rows], num_keys)
                self._words.put(first, mask.expand(-1, num_keys))
        return self._words

    def visible(self, positions: Tensor, num_keys: int) -> Tensor:
        """Return `[..., num_keys]` bools: the keys that queries at `[...]` positions attend to."""
        queries = positions[..., None]
        keys = torch.arange(num_keys, device=queries.device)
        zero = torch.zeros((), dtype=torch.long, device=queries.device)
        return self._function(zero, zero, queries, keys) & (keys <= queries)


def _seen(pattern: MaskPattern, paged: Paged) -> Seen:
    """Evaluate a pattern for each part of a step; most patterns are one contiguous key range per query."""
    firsts, lasts, hidden = list[Tensor](), list[Tensor](), list[Tensor]()
    all_in_one = True
    for positions in paged.parts:
        num_keys = int(positions.max()) + 1
        visible = pattern.visible(positions, num_keys)
        shown = visible.to(torch.uint8)
        first, last = shown.argmax(1), num_keys - shown.flip(1).argmax(1)
        all_in_one = all_in_one and torch.equal(visible.sum(1), last - first)
        firsts.append(first)
        lasts.append(last)
        hidden.append(~visible)
    mask = None if all_in_one else _stack_padded(hidden)
    return Seen(torch.cat(firsts).int(), torch.cat(lasts).int(), mask)


def _stack_padded(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices along the rows, padded on the right to the widest."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([functional.pad(part, (0, width - part.shape[1])) for part in parts])


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """The rows of a step in the form that the CPU kernel takes.

    Attributes:
        rows: The block tables of the rows' requests.
        parts: The positions of all rows, in order, in parts for which the mask is evaluated at once.
    """

    rows: Rows
    parts: Sequence[Tensor]
