"""`kv_blocks`: its torch path, and invalid arguments; `test_interpreted` runs its kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotswap.errors import ConfigError
from hotswap.kernels.kv_blocks import BlockTable, gather, scatter
from hotswap.kernels.kv_blocks.reference import gather_reference, scatter_reference
from tests.kernels.kv_pools import CACHES, make_pools, same


@given(
    cache=st.sampled_from(sorted(CACHES)),
    blocks=st.lists(st.integers(0, 19), unique=True, max_size=20),
    holes=st.sets(st.integers(0, 19)),
)
def test_torch_moves_every_byte(cache: str, blocks: list[int], holes: set[int]) -> None:
    chosen = [-1 if index in holes else block for index, block in enumerate(blocks)]
    pools = make_pools(cache, torch.bfloat16)
    table = BlockTable(pools)
    staging = torch.full((len(chosen), table.block_bytes), 0xA5, dtype=torch.uint8)
    expected = gather_reference(pools, chosen, staging)
    gather(table, chosen, staging)
    assert same(staging, expected)
    targets = [torch.zeros_like(pool) for pool in pools]
    filled = scatter_reference(targets, chosen, staging)
    scatter(BlockTable(targets), chosen, staging)
    assert all(same(*pair) for pair in zip(targets, filled, strict=True))


@pytest.mark.parametrize("blocks", [(20,), (-2,), (0, 21)])
def test_a_block_number_out_of_range_is_refused(blocks: tuple[int, ...]) -> None:
    table = BlockTable(make_pools("equal", torch.bfloat16))
    staging = torch.zeros(len(blocks), table.block_bytes, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="there are 20"):
        gather(table, blocks, staging)


@pytest.mark.parametrize(
    "staging",
    [
        torch.zeros(1, dtype=torch.uint8),
        torch.zeros(2 * 6 * 4096, dtype=torch.uint8)[::2],
        torch.zeros(6 * 4096, dtype=torch.bfloat16),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused(staging: torch.Tensor) -> None:
    table = BlockTable(make_pools("equal", torch.bfloat16))
    with pytest.raises(ConfigError, match="staging buffer"):
        gather(table, [3], staging)


def test_pools_that_do_not_match_are_refused() -> None:
    pool = torch.zeros(4, 2, 8)
    for other in (torch.zeros(5, 2, 8), pool.transpose(1, 2), pool.to("meta")):
        with pytest.raises(ConfigError):
            BlockTable([pool, other])
    with pytest.raises(ConfigError):
        BlockTable([])
