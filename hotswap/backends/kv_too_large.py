"""Blocks that are too large for a KV store: the log tells of each size once."""

from __future__ import annotations

import logging

from hotswap.migration import KVLayout

__all__ = ["TooLarge"]

log = logging.getLogger("hotswap.stores")


class TooLarge:
    """The sizes of blocks that a store has told it does not keep."""

    def __init__(self) -> None:
        self._told = set[int]()

    def tell(self, store: object, layout: KVLayout, size: int, most: int) -> None:
        """Say that blocks of a model take `size` bytes, and the store keeps those of `most` at most."""
        if size in self._told:
            return
        self._told.add(size)
        what = "recurrent states" if layout.state_bytes > layout.block_bytes else "a KV block"
        log.warning(
            "%r keeps nothing of %r: %s of it takes %s bytes, and the store keeps %s at most. "
            "Give it more room.",
            store,
            layout.model,
            what,
            f"{size:,}",
            f"{most:,}",
        )
