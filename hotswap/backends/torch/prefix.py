"""Prefix reuse: which blocks already hold the keys and values that a request would compute.

The key of a full block is a hash of the key before it and of its tokens, and the first of these keys stands
for the weights: the load they came with, and the adapter. Blocks with the same key so hold the same numbers
(the scheme of vLLM's automatic prefix caching, Kwon et al., arXiv:2309.06180, section 4.4, with a
cryptographic hash, so that no two prefixes share a key).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.backends.torch.blocks import BlockPool, Content

__all__ = ["Prefix", "block_content", "extend_keys", "find_prefix", "root_key"]


def root_key(epoch: int, adapter: int = 0) -> bytes:
    """Return the key that stands before a request's first block.

    Args:
        epoch: Counts the loads of an engine: the same model loaded again is another.
        adapter: Counts the loads of adapters, likewise; 0 is none.
    """
    return _digest(repr((epoch, adapter)).encode())


def block_content(parent: bytes, tokens: Sequence[int]) -> Content:
    """Return the content of a block with these tokens, behind the one whose key is `parent`."""
    return Content(_digest(parent + array("q", tokens).tobytes()), parent, tuple(tokens))


def extend_keys(
    keys: list[bytes], root: bytes, tokens: Sequence[int], block_tokens: int, *, num_blocks: int
) -> None:
    """Append to `keys` those that it lacks of the first `num_blocks` blocks of `tokens`, which are full."""
    for at in range(len(keys), num_blocks):
        parent = keys[-1] if keys else root
        keys.append(block_content(parent, tokens[at * block_tokens : (at + 1) * block_tokens]).key)


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a request finds computed.

    Attributes:
        blocks: Its first blocks, each full.
        source: Another block, which holds the first `num_copied` tokens of the one that comes next.
        num_copied: Tokens to copy from there.
    """

    blocks: tuple[int, ...] = ()
    source: int | None = None
    num_copied: int = 0


def find_prefix(
    pool: BlockPool, keys: Sequence[bytes], root: bytes, tokens: Sequence[int], block_tokens: int
) -> Prefix:
    """Return the longest run of blocks that holds the start of `tokens`, without the last of them.

    The last is always computed, for its logits.
    """
    blocks: list[int] = []
    for key in keys[: (len(tokens) - 1) // block_tokens]:
        if (block := pool.find(key)) is None:
            break
        blocks.append(block)
    parent = keys[len(blocks) - 1] if blocks else root
    first = len(blocks) * block_tokens
    start = pool.find_start(parent, tokens[first : min(first + block_tokens, len(tokens) - 1)])
    return Prefix(tuple(blocks)) if start is None else Prefix(tuple(blocks), *start)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()
