"""Memory for keys and values that were gathered, of one layer each, and the buffers it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Gathered", "Kept", "Lender", "reads_parts"]

Gathered = tuple[Tensor, Tensor]
"""Keys and values, `[n, kv_heads, tokens, dim]`."""

# Room for more tokens, so that not each new block needs a larger one: a share of those there are, in limits.
_MORE_SHARE, _LEAST_MORE_BLOCKS, _MOST_MORE_TOKENS = 4, 2, 512
# Slots for more requests, likewise.
_SPARE_SHARE = 4
# So many times the room that would be made now is given back.
_MOST_TIMES = 4


@dataclass(slots=True, eq=False)
class Kept:
    """Keys and values of one layer, a slot for each request: `[slots, kv_heads, capacity, dim]` each.

    Keys may be a view of columns, `[slots, kv_heads, dim, capacity]` in memory.

    Attributes:
        step: The last step of its run whose tokens it holds.
    """

    keys: Tensor
    values: Tensor
    buffers: list[Tensor]
    step: int = -1

    @property
    def capacity(self) -> int:
        """Tokens that fit into a slot."""
        return self.keys.shape[2]

    def has_room(self, num_requests: int, tokens: int) -> bool:
        """Whether so many requests of so many tokens fit."""
        return num_requests <= self.keys.shape[0] and tokens <= self.capacity

    def fill(self, slot: int, gathered: Gathered, *, first: int = 0) -> None:
        """Let a slot hold what was gathered of one request, from its token `first` on."""
        for part, new in zip((self.keys, self.values), gathered, strict=True):
            part[slot, :, first : first + new.shape[2]] = new[0]
        # A masked key has weight zero, and zero times a NaN that was there before would be a NaN.
        self.values[slot, :, first + gathered[1].shape[2] :] = 0

    def append(self, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write one token for each slot, `[n, kv_heads, dim]`."""
        self.keys[slots, :, positions] = keys
        self.values[slots, :, positions] = values

    def take_over(self, other: Kept, num_requests: int) -> None:
        """Copy what another holds of the first requests."""
        num_requests, tokens = min(num_requests, len(other.keys)), min(self.capacity, other.capacity)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            mine[:num_requests, :, :tokens] = theirs[:num_requests, :, :tokens]
        self.values[:num_requests, :, tokens:] = 0

    def first(self, num_requests: int, tokens: int) -> Gathered:
        """The first `tokens` of slots, or all of them where parts would be copied to be multiplied."""
        if reads_parts(self.keys.dtype):
            return self.keys[:num_requests, :, :tokens], self.values[:num_requests, :, :tokens]
        return self.keys[:num_requests], self.values[:num_requests]


def reads_parts(dtype: torch.dtype) -> bool:
    """Whether the first tokens of slots are multiplied where they lie; oneDNN's bf16 products copy them."""
    return dtype is torch.float32


class Lender:
    """Lends buffers within a limit. One thread steps; `fit` may be called from any.

    Args:
        most_bytes: The most memory that is ever taken; with 0 nothing is lent.
        block_tokens: Tokens of a block.
    """

    def __init__(self, most_bytes: int, block_tokens: int) -> None:
        self.most_bytes, self.limit_bytes, self.used_bytes = most_bytes, most_bytes, 0
        self.block_tokens = block_tokens
        self._free: list[Tensor] = []

    def fit(self, room_bytes: int) -> None:
        """Take no more than `room_bytes` once `clear` was called."""
        self.limit_bytes = max(0, min(self.most_bytes, room_bytes))

    @property
    def crowded(self) -> bool:
        """Whether more was taken than there is room for now."""
        return self.used_bytes > self.limit_bytes

    def clear(self) -> None:
        """Give up all memory; nothing is lent."""
        self._free.clear()
        self.used_bytes = 0

    def roomy(self, tokens: int) -> int:
        """Tokens of a slot that is made for so many."""
        share = min(tokens // self.block_tokens // _MORE_SHARE, _MOST_MORE_TOKENS // self.block_tokens)
        more = max(_LEAST_MORE_BLOCKS, share) * self.block_tokens
        if more >= _MOST_MORE_TOKENS:  # long decodes are gathered in whole chunks of that
            return -(-(tokens + more) // _MOST_MORE_TOKENS) * _MOST_MORE_TOKENS
        return tokens + more

    def suits(self, kept: Kept, num_requests: int, tokens: int) -> bool:
        """Whether it has room for so many requests of so many tokens, and not far too much."""
        most = _MOST_TIMES * _slots(num_requests) * self.roomy(tokens)
        return kept.has_room(num_requests, tokens) and len(kept.keys) * kept.capacity <= most

    def make(self, num_requests: int, tokens: int, like: Gathered, *, across: bool) -> Kept | None:
        """Return room for so many requests of so many tokens, and for more; `None` if memory is short.

        Args:
            num_requests: Several may soon be more.
            tokens: The most that one has.
            like: Any keys and values, `[n, kv_heads, ..., dim]`.
            across: Whether keys are to lie as columns.
        """
        slots, room = _slots(num_requests), self.roomy(tokens)
        shapes = [(slots, part.shape[1], room, part.shape[-1]) for part in like]
        sizes = [torch.Size(shape).numel() * part.itemsize for shape, part in zip(shapes, like, strict=True)]
        buffers = self.take(sizes)
        if not buffers:
            return None
        keys, values = (
            buffer[:size].view(part.dtype) for buffer, size, part in zip(buffers, sizes, like, strict=True)
        )
        return Kept(
            _columns(keys, shapes[0]) if across else keys.view(shapes[0]), values.view(shapes[1]), buffers
        )

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Lend buffers of so many bytes or more, one for each size; none if there is no room for all."""
        taken: list[Tensor] = []
        for size_bytes in sizes:
            buffer = self._take(size_bytes)
            if buffer is None:
                self.put(taken)
                return []
            taken.append(buffer)
        return taken

    def _take(self, size_bytes: int) -> Tensor | None:
        # One that was used before has its pages: new ones would cost more than what is written there.
        fitting = [buffer for buffer in self._free if size_bytes <= len(buffer) <= 2 * size_bytes]
        if fitting:
            buffer = min(fitting, key=len)
            self._free = [other for other in self._free if other is not buffer]
            return buffer
        while self._free and self.used_bytes + size_bytes > self.limit_bytes:
            self.used_bytes -= len(self._free.pop(0))
        if self.used_bytes + size_bytes > self.limit_bytes:
            return None
        self.used_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8)

    def put(self, buffers: Iterable[Tensor]) -> None:
        """Take buffers back."""
        self._free.extend(buffers)


def _slots(num_requests: int) -> int:
    """Slots that are made for so many requests: where there are several, others may soon come."""
    return num_requests + (max(1, num_requests // _SPARE_SHARE) if num_requests > 1 else 0)


def _columns(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view `[slots, kv_heads, capacity, dim]` of memory in which each key is a column."""
    slots, heads, room, dim = shape
    return flat.view(slots, heads, dim, room).transpose(2, 3)
