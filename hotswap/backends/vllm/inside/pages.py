"""The KV blocks of one worker, as bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["BlockShape", "Pages"]


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The shape of a core's KV block, over all ranks.

    Attributes:
        block_bytes: The bytes of a block, all ranks together.
        offsets: Where each rank's part of the bytes begins.
        layers: For each layer of each rank in turn its dtype, and the shape in bytes of its part of a block.
    """

    block_bytes: int
    offsets: list[int]
    layers: tuple[tuple[str, tuple[int, ...]], ...]


class Pages:
    """Copies blocks of all layers; between two steps, on the worker's thread.

    Attention backends have their own order of a cache, and may cut each block of vLLM's scheduler into
    several of their own. The dimension of the blocks is found by their number; nothing else need be known.

    Args:
        caches: The KV memory of each layer; layers may share one.
        num_blocks: How many blocks vLLM's scheduler has.

    Attributes:
        shapes: For each layer its dtype, and the shape in bytes of a block of it.

    Raises:
        ValueError: a cache has no dimension of so many blocks.
    """

    def __init__(self, caches: Iterable[Tensor], num_blocks: int) -> None:
        unique = {cache.data_ptr(): cache for cache in caches}
        self._rows = [_by_block(cache, num_blocks) for cache in unique.values()]
        self.shapes = [
            (str(cache.dtype).removeprefix("torch."), tuple(rows.shape[1:]))
            for cache, rows in zip(unique.values(), self._rows, strict=True)
        ]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all layers of this worker."""
        return sum(rows[0].numel() for rows in self._rows)

    def save(self, blocks: Sequence[int], path: Path, block_bytes: int, offset_bytes: int) -> None:
        """Write blocks to a file with `block_bytes` for each, at `offset_bytes` of those."""
        index = torch.tensor(blocks)
        for rows, part in self._parts(len(blocks), path, block_bytes, offset_bytes):
            part.copy_(rows.index_select(0, index.to(rows.device)).reshape(part.shape))

    def restore(self, blocks: Sequence[int], path: Path, block_bytes: int, offset_bytes: int) -> None:
        """Fill blocks from a file that `save` wrote."""
        index = torch.tensor(blocks)
        for rows, part in self._parts(len(blocks), path, block_bytes, offset_bytes):
            taken = part.to(rows.device).reshape(len(blocks), *rows.shape[1:])
            rows.index_copy_(0, index.to(rows.device), taken)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks to others: `(from, to)`."""
        for rows in self._rows:
            for source, target in pairs:
                rows[target] = rows[source]

    def _parts(
        self, num_blocks: int, path: Path, block_bytes: int, offset_bytes: int
    ) -> Iterable[tuple[Tensor, Tensor]]:
        """Yield each layer's memory, and its part of the file: `[num_blocks, bytes]`."""
        size = num_blocks * block_bytes
        whole = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).view(num_blocks, -1)
        at = offset_bytes
        for rows in self._rows:
            yield rows, whole[:, at : at + rows[0].numel()]
            at += rows[0].numel()


def _by_block(cache: Tensor, num_blocks: int) -> Tensor:
    """View a cache as bytes, its blocks first."""
    # The blocks are in the first or in the second dimension, behind keys and values.
    for place in (0, 1):
        if cache.dim() > place and cache.shape[place] % num_blocks == 0:
            rows = cache.view(torch.uint8).movedim(place, 0)
            # `as_strided`, since `view` refuses some orders of strides.
            step = rows.stride(0)
            count = rows.shape[0] // num_blocks
            return rows.as_strided(
                (num_blocks, count, *rows.shape[1:]), (count * step, step, *rows.stride()[1:])
            )
    raise ValueError(f"a cache of shape {tuple(cache.shape)} is not made of {num_blocks} blocks")
