"""`gather` and `scatter`: one Triton kernel that uses a table of addresses, or torch without Triton."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.calls import Call
from hotswap.kernels.targets import runs_triton

__all__ = ["BlockTable", "gather", "move_call", "scatter"]

# Words that a program copies.
_CHUNK_WORDS = 4096
_WARPS = 4
# Maximum size of the second grid axis.
_MOST_POOLS = 65_535
_WORD = 16


class BlockTable:
    """The pools of a KV cache: one for the keys and one for the values of each layer.

    A row of the staging buffer has the bytes of one block from all pools, in their order. Pools may differ
    in shape and dtype. Their addresses must not change while the table is used.

    Args:
        pools: Each `[num_blocks, ...]`, contiguous; all on one device and with the same number of blocks.

    Raises:
        ConfigError: there are no pools or too many, or device, number of blocks or layout is wrong.

    Attributes:
        block_bytes: Bytes of one block in all pools: the length of a row.
        num_blocks: Number of blocks in each pool.
    """

    def __init__(self, pools: Sequence[Tensor]) -> None:
        if not 0 < len(pools) <= _MOST_POOLS:
            raise ConfigError(f"A table of {len(pools)} pools was asked for; it takes 1 to {_MOST_POOLS}.")
        self.device, self.num_blocks = pools[0].device, len(pools[0])
        for index, pool in enumerate(pools):
            if (pool.device, len(pool)) != (self.device, self.num_blocks) or not pool.is_contiguous():
                raise ConfigError(
                    f"Pool {index} has {len(pool)} blocks on {pool.device} with strides {pool.stride()}: "
                    f"all must be contiguous and have {self.num_blocks} on {self.device}."
                )
        self._pools = [pool.detach().view(self.num_blocks, -1).view(torch.uint8) for pool in pools]
        self._sizes = [pool.shape[1] for pool in self._pools]
        self.block_bytes = sum(self._sizes)
        self._tables: dict[int, Tensor] = {}
        self._is_wide = all(
            number % _WORD == 0 for pool in self._pools for number in (pool.data_ptr(), pool.shape[1])
        )

    def parts(self, staging: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each pool as bytes, `[num_blocks, bytes]`, with its columns of the staging buffer."""
        ends = list(accumulate(self._sizes, initial=0))
        return [
            (pool, staging[:, first:last])
            for pool, (first, last) in zip(self._pools, pairwise(ends), strict=True)
        ]

    def word_bytes(self, staging: Tensor) -> int:
        """Return the word size in bytes: 4 if everything is aligned to 16 bytes, else 1."""
        return 4 if self._is_wide and staging.data_ptr() % _WORD == 0 else 1

    def entries(self, word_bytes: int) -> Tensor:
        """Return int64 `[pools, 3]` on the device: address, words of a block, its first word in a row."""
        if word_bytes not in self._tables:
            starts = accumulate(self._sizes, initial=0)
            records = [
                (pool.data_ptr(), size // word_bytes, start // word_bytes)
                for pool, size, start in zip(self._pools, self._sizes, starts, strict=False)
            ]
            self._tables[word_bytes] = torch.tensor(records, dtype=torch.int64, device=self.device)
        return self._tables[word_bytes]

    @property
    def largest_bytes(self) -> int:
        """Bytes of a block in the pool with the largest blocks."""
        return max(self._sizes)

    def __repr__(self) -> str:
        return (
            f"<BlockTable [{len(self._pools)} pools of {self.num_blocks}, {self.block_bytes} bytes a block]>"
        )


def gather(table: BlockTable, blocks: Sequence[int], staging: Tensor) -> None:
    """Copy blocks from all pools to rows of `staging`, on the device's current stream.

    Args:
        table: The pools.
        blocks: Block numbers; -1 leaves the row unchanged.
        staging: uint8, `block_bytes` for each block, contiguous; on the same device, or pinned host memory,
            which may be read once the stream has finished the launch.

    Raises:
        ConfigError: a block number is out of range, or `staging` does not match.
    """
    _move(table, blocks, staging, to_staging=True)


def scatter(table: BlockTable, blocks: Sequence[int], staging: Tensor) -> None:
    """Copy rows of `staging` to blocks: the inverse of `gather`. Each block may be given once only."""
    _move(table, blocks, staging, to_staging=False)


def _move(table: BlockTable, blocks: Sequence[int], staging: Tensor, *, to_staging: bool) -> None:
    _check(table, blocks, staging)
    if not blocks or not table.block_bytes:
        return
    rows = staging.view(len(blocks), table.block_bytes)
    if runs_triton(table.device):
        move_call(table, blocks, rows, to_staging).launch()
    else:
        _move_in_torch(table, blocks, rows, to_staging)


def move_call(table: BlockTable, blocks: Sequence[int], rows: Tensor, to_staging: bool) -> Call:
    """Return the kernel launch of a gather or scatter."""
    word_bytes = table.word_bytes(rows)
    words = rows.view(torch.int32) if word_bytes == 4 else rows
    entries = table.entries(word_bytes)
    num_chunks = -(-table.largest_bytes // (_CHUNK_WORDS * word_bytes))
    grid = (len(blocks) * num_chunks, len(entries))
    arguments = (entries, _sent(blocks, table.device), words, words.shape[1], num_chunks)
    constants = {
        "TO_STAGING": to_staging,
        "WORDS": _CHUNK_WORDS,
        "WIDE": word_bytes == 4,
        "num_warps": _WARPS,
    }
    return Call("hotswap.kernels.kv_blocks.kernel:move_kernel", grid, arguments, constants)


def _move_in_torch(table: BlockTable, blocks: Sequence[int], rows: Tensor, to_staging: bool) -> None:
    kept = [index for index, block in enumerate(blocks) if block >= 0]
    there = torch.tensor(kept, dtype=torch.long, device=rows.device)
    here = torch.tensor([blocks[index] for index in kept], dtype=torch.long, device=table.device)
    for pool, columns in table.parts(rows):
        if to_staging:
            columns[there] = pool[here].to(columns.device)
        else:
            pool[here] = columns[there].to(pool.device)


def _sent(blocks: Sequence[int], device: torch.device) -> Tensor:
    numbers = torch.tensor(blocks, dtype=torch.int32)
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)


def _check(table: BlockTable, blocks: Sequence[int], staging: Tensor) -> None:
    wanted = len(blocks) * table.block_bytes
    if staging.dtype is not torch.uint8 or not staging.is_contiguous() or staging.numel() != wanted:
        raise ConfigError(
            f"The staging buffer is {staging.dtype} of {staging.numel()}, contiguous: "
            f"{staging.is_contiguous()}; {len(blocks)} blocks take {wanted} of torch.uint8 side by side."
        )
    if staging.device != table.device and not staging.is_pinned():
        raise ConfigError(
            f"The staging buffer is on {staging.device}, not pinned, and the blocks on {table.device}; "
            "pin it, or stage on the device."
        )
    if blocks and (min(blocks) < -1 or max(blocks) >= table.num_blocks):
        raise ConfigError(
            f"Blocks {min(blocks)} to {max(blocks)} were given; there are {table.num_blocks}, from 0 on."
        )
