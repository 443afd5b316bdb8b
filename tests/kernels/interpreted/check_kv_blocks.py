"""The kernel of `kv_blocks` in Triton's interpreter, against plain copies; run by `test_interpreted`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hotswap.kernels.kv_blocks import BlockTable, gather, scatter
from hotswap.kernels.kv_blocks.reference import gather_reference, scatter_reference
from tests.kernels.interpreted.guard import guarded
from tests.kernels.kv_pools import CACHES, make_pools, same

CHOICES = {
    "some": (7, 3, 19, 1),
    "one": (19,),
    "none": (),
    "with holes": (-1, 4, -1, 0, 12),
    "only holes": (-1, -1),
}


def poisoned(count: int, table: BlockTable) -> Tensor:
    return torch.full((count, table.block_bytes), 0xA5, dtype=torch.uint8)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_blocks_go_to_the_buffer_and_back(dtype: torch.dtype, cache: str, choice: str) -> None:
    pools, blocks = make_pools(cache, dtype), CHOICES[choice]
    table = BlockTable(pools)
    staging = poisoned(len(blocks), table)
    expected = gather_reference(pools, blocks, staging)
    gather(table, blocks, staging.view(-1))
    assert same(staging, expected)
    elsewhere = [19 - block if block >= 0 else -1 for block in blocks]
    targets = [torch.zeros_like(pool) for pool in pools]
    filled = scatter_reference(targets, elsewhere, staging)
    scatter(BlockTable(targets), elsewhere, staging.view(-1))
    assert all(same(*pair) for pair in zip(targets, filled, strict=True))


def test_an_unaligned_buffer_is_filled_byte_by_byte() -> None:
    pools = make_pools("equal", torch.bfloat16)
    table = BlockTable(pools)
    buffer = torch.zeros(3 + 2 * table.block_bytes, dtype=torch.uint8)
    assert table.word_bytes(buffer) == 4
    assert table.word_bytes(buffer[3:]) == 1
    gather(table, (2, 5), buffer[3:])
    assert same(buffer[3:].view(2, -1), gather_reference(pools, (2, 5), buffer[3:].view(2, -1)))
    assert not buffer[:3].any()


@pytest.mark.parametrize("cache", CACHES)
def test_nothing_outside_the_tensors_is_read_or_written(cache: str) -> None:
    pools = [guarded(pool) for pool in make_pools(cache, torch.bfloat16)]
    table = BlockTable(pools)
    for word_bytes in (1, 4):
        table._tables[word_bytes] = guarded(table.entries(word_bytes))
    blocks: Sequence[int] = (19, 0, 7)
    staging = guarded(poisoned(3, table))
    gather(table, blocks, staging.view(-1))
    assert same(staging, gather_reference(pools, blocks, staging))
    scatter(table, blocks, staging.view(-1))
