"""Blocks of four tokens for tests of KV stores, and how they are saved."""

from __future__ import annotations

from hotswap import ModelId
from hotswap.abc import KVLayout, KVPages, KVPrefix, KVStore

__all__ = ["layout", "pages", "save"]


def layout(block_bytes: int, weights: str = "w") -> KVLayout:
    return KVLayout(
        model=ModelId(weights),
        weights=weights,
        adapter=None,
        block_tokens=4,
        layers=((1, 4, 4, "float32"),),
        block_bytes=block_bytes,
    )


def pages(first_block: int, num_blocks: int, block_bytes: int) -> KVPages:
    data = b"".join(bytes([first_block + at + 1]) * block_bytes for at in range(num_blocks))
    return KVPages(first_block, 4 * num_blocks, memoryview(bytearray(data)))


async def save(store: KVStore, prefix: KVPrefix) -> int:
    """Put what is missing of a prefix of whole blocks; return how many of its tokens are stored then."""
    with store.put(prefix) as put:
        count = put.num_tokens // 4 - put.first_block
        if count > 0:
            await put.write(pages(put.first_block, count, prefix.layout.block_bytes))
        return put.num_tokens
