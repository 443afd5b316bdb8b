"""Prefix reuse: finds blocks that already contain keys and values that a request needs.

The key of a full block is a hash of the key before it and of its tokens. The first key, the root, identifies
the weights and the adapter by their content, so that blocks are found again after a swap to another model
and back (`kv_pool`). A pool has blocks of one size and one shape. So blocks with equal keys contain equal
keys and values (as in vLLM's automatic prefix caching, Kwon et al., arXiv:2309.06180, section 4.4, with a
cryptographic hash, so that different prefixes have different keys).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.backends.torch.blocks import BlockPool, Content
from hotswap.backends.torch.recurrent.snapshots import SnapshotPool

__all__ = ["Prefix", "block_content", "extend_keys", "find_continued", "find_prefix", "root_key"]


def root_key(weights: str, adapter: bytes = b"") -> bytes:
    """Return the key that precedes a request's first block.

    Args:
        weights: Identifies the weights and the way of computing with them, not by the model's name.
        adapter: The digest of the adapter's matrices; empty without one.
    """
    return _digest(repr((weights, adapter)).encode())


def block_content(parent: bytes, tokens: Sequence[int]) -> Content:
    """Return the content of a block with these tokens that follows the block with key `parent`."""
    return Content(_digest(parent + array("q", tokens).tobytes()), parent, tuple(tokens))


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], block_tokens: int, *, num_blocks: int
) -> None:
    """Append the missing keys of the first `num_blocks` blocks of `tokens`, which must be full, to `keys`."""
    for at in range(len(keys), num_blocks):
        parent = keys[-1] if keys else root
        keys.append(block_content(parent, tokens[at * block_tokens : (at + 1) * block_tokens]).key)


@dataclass(frozen=True, slots=True)
class Prefix:
    """The cached prefix of a request.

    Attributes:
        blocks: Its first blocks, all full.
        source: A block whose first `num_copied` tokens equal those of the next block; `None` without one.
        num_copied: The number of tokens to copy from `source`.
        snapshot: The slot of the states after `blocks`; `None` without one.
        num_found: How many blocks were found, with those that lie after the snapshot.
    """

    blocks: tuple[int, ...] = ()
    source: int | None = None
    num_copied: int = 0
    snapshot: int | None = None
    num_found: int = 0


def find_prefix(
    pool: BlockPool, keys: Sequence[bytes], root: bytes, tokens: Sequence[int], block_tokens: int
) -> Prefix:
    """Return the longest cached prefix of `tokens`, without the last token.

    The last token is always computed, for its logits.
    """
    blocks = _full_blocks(pool, keys, tokens, block_tokens)
    parent = keys[len(blocks) - 1] if blocks else root
    first = len(blocks) * block_tokens
    start = pool.find_start(parent, tokens[first : min(first + block_tokens, len(tokens) - 1)])
    return Prefix(tuple(blocks)) if start is None else Prefix(tuple(blocks), *start)


def find_continued(
    pool: BlockPool,
    snapshots: SnapshotPool,
    keys: Sequence[bytes],
    tokens: Sequence[int],
    block_tokens: int,
) -> Prefix:
    """Return the longest cached prefix of `tokens`, without the last token, that has a snapshot.

    Blocks after the snapshot are computed again: their states are not known.
    """
    found = _full_blocks(pool, keys, tokens, block_tokens)
    num_blocks = snapshots.longest(keys[: len(found)])
    slot = snapshots.use(keys[num_blocks - 1]) if num_blocks else None
    return Prefix(tuple(found[:num_blocks]), snapshot=slot, num_found=len(found))


def _full_blocks(
    pool: BlockPool, keys: Sequence[bytes], tokens: Sequence[int], block_tokens: int
) -> list[int]:
    """Return the first full blocks of `tokens` that are cached, without the block of the last token."""
    blocks: list[int] = []
    for key in keys[: (len(tokens) - 1) // block_tokens]:
        if (block := pool.find(key)) is None:
            break
        blocks.append(block)
    return blocks


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
