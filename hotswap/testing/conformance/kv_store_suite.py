"""The hooks of `KVStoreConformance`, and the helpers of its checks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar, Final

from anyio.lowlevel import checkpoint

from hotswap.kv_store import KVLease, KVPrefix, KVPut, KVStore
from hotswap.migration import KVLayout, KVPages
from hotswap.request import ModelId
from hotswap.testing.conformance.suite import Suite

__all__ = ["LAYOUT", "KVStoreSuite"]

LAYOUT: Final = KVLayout(
    model=ModelId("m"),
    weights="w",
    adapter=None,
    block_tokens=4,
    layers=((1, 512, 512, "float32"),),
    block_bytes=4 * 1024 * 4,
)


class KVStoreSuite(Suite):
    """Hooks to write or to override.

    Attributes:
        has_content: Whether the store keeps what is written; a simulated one need not.
    """

    has_content: ClassVar[bool] = True

    def make_store(self, capacity_bytes: int) -> AbstractAsyncContextManager[KVStore]:
        """Return a context manager that opens a store with this budget; a store is one itself.

        If it outlives fleets, those of one test are of one place, which is empty before the test.
        """
        raise NotImplementedError("Write make_store(): it returns the store to be tested.")

    # ------------------------------------------------------------------ helpers

    @property
    def block_size(self) -> int:
        """Bytes of a block."""
        return LAYOUT.block_bytes

    @asynccontextmanager
    async def opened(self, *, blocks: int) -> AsyncGenerator[KVStore]:
        """A store with room for so many blocks; at the end all leases and reserved bytes are given back."""
        async with self.make_store(blocks * self.block_size) as store:
            yield store
            view = store.view()
            assert view.num_leases == 0, f"leases are left: {view}"
            assert view.used_bytes == sum(model.size_bytes for model in view.models), (
                f"bytes are left: {view}"
            )

    def prefix(self, num_tokens: int, *, then: Iterable[int] = ()) -> KVPrefix:
        """Return the first of some tokens, and others after them."""
        return KVPrefix(LAYOUT, (*range(num_tokens), *then))

    def content(self, prefix: KVPrefix, blocks: Iterable[int]) -> bytes:
        """Return what blocks have: bytes that follow from the tokens, token by token, as keys and values."""
        return b"".join(self._block(prefix, block) for block in blocks)

    def _block(self, prefix: KVPrefix, block: int) -> bytes:
        size = self.block_size // LAYOUT.block_tokens
        tokens = prefix.tokens[: block * LAYOUT.block_tokens]
        rows: list[bytes] = []
        for token in prefix.tokens_of(block):
            tokens = (*tokens, token)
            rows.append(f"{tokens}".encode().rjust(16, b".")[-16:] * (size // 16))
        return b"".join(rows).ljust(self.block_size, b"?")

    def pages(self, prefix: KVPrefix, first_block: int, num_tokens: int) -> KVPages:
        """Return pages of a prefix, as a source would read them."""
        blocks = range(first_block, first_block + -(-num_tokens // LAYOUT.block_tokens))
        data = self.content(prefix, blocks) if self.has_content else b""
        return KVPages(first_block, num_tokens, memoryview(bytearray(data)))

    async def save(self, store: KVStore, prefix: KVPrefix, *, prefill_s: float = 0.0) -> None:
        """Put what is missing of a prefix, as far as there is room, in pieces of two blocks."""
        with store.put(prefix, prefill_s=prefill_s) as put:
            await self.write(put, prefix)

    async def write(self, put: KVPut, prefix: KVPrefix) -> None:
        """Write the missing blocks of a put, two at a time."""
        step = 2 * LAYOUT.block_tokens
        for at in range(put.first_block * LAYOUT.block_tokens, put.num_tokens, step):
            count = min(step, put.num_tokens - at)
            await put.write(self.pages(prefix, at // LAYOUT.block_tokens, count))

    async def assert_content(self, store: KVStore, prefix: KVPrefix) -> None:
        """Raise unless all of a prefix is stored, and as it was written."""
        with store.lease(prefix) as lease:
            assert lease.num_tokens == len(prefix.tokens), f"{lease.num_tokens} of {prefix} are stored"
            await self.assert_read(lease, prefix, 0, lease.num_tokens)

    async def assert_read(self, lease: KVLease, prefix: KVPrefix, first_block: int, num_tokens: int) -> None:
        """Raise unless what is read is what was written; of the last block only its tokens count."""
        pages = await lease.read(first_block, num_tokens)
        assert (pages.first_block, pages.num_tokens) == (first_block, num_tokens)
        if not self.has_content:
            return
        await checkpoint()
        size = self.block_size // LAYOUT.block_tokens
        blocks: Sequence[int] = range(first_block, first_block + -(-num_tokens // LAYOUT.block_tokens))
        assert len(pages.data) == len(blocks) * self.block_size
        read, written = bytes(pages.data), self.content(prefix, blocks)
        assert read[: num_tokens * size] == written[: num_tokens * size], "other bytes than were written"
