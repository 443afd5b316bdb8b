"""Checks of KV pools that grow and shrink while their engine serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from hotswap.engine import SupportsResize
from hotswap.errors import InstanceError
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.engine_suite import EngineSetup, EngineSuite, Reader
from hotswap.testing.conformance.suite import check
from hotswap.view import EngineStatus

__all__ = ["ResizeChecks"]


class ResizeChecks(EngineSuite):
    """Checks of `SupportsResize`, for suites that say `can_resize`."""

    @check
    async def test_a_pool_has_the_size_that_a_resize_returns_between_its_least_and_its_most(self) -> None:
        async with resizable(self) as (setup, engine, status):
            least, most = status.least_kv_blocks, status.most_kv_blocks
            assert 0 < least < most
            for wanted, reached in ((most, most), (0, least), (least + 1, least + 1), (10 * most, most)):
                assert await engine.resize_kv(wanted) == reached
                now = setup.engine.status()
                assert now.num_kv_blocks == now.num_free_kv_blocks == reached
                assert (now.least_kv_blocks, now.most_kv_blocks) == (least, most)

    @check
    async def test_resizes_change_no_token_and_end_no_stream(self) -> None:
        async with resizable(self) as (setup, engine, status):
            async with self.streaming(setup.engine, self.long_requests(setup.card)) as readers:
                for wanted in (status.most_kv_blocks, 0, status.most_kv_blocks):
                    await engine.resize_kv(wanted)
            for reader in readers:
                await self.assert_whole(reader, setup.card)

    @check
    async def test_a_resize_cancelled_anywhere_leaves_an_engine_that_serves(self) -> None:
        async with resizable(self) as (setup, engine, status):
            sizes = [0, status.most_kv_blocks]

            async def resize() -> None:
                sizes.reverse()
                await engine.resize_kv(sizes[0])

            async def look() -> None:
                now = setup.engine.status()
                assert now.least_kv_blocks <= now.num_kv_blocks <= now.most_kv_blocks

            await cancel_everywhere(resize, look)
            reader = Reader(self.request(setup.card))
            await reader.read(setup.engine)
            await self.assert_whole(reader, setup.card)

    @check
    async def test_an_engine_without_a_model_is_not_resized(self) -> None:
        async with resizable(self) as (setup, engine, _):
            await setup.engine.evict(deadline_s=0)
            await setup.engine.unload()
            with pytest.raises(InstanceError):
                await engine.resize_kv(1)
            assert setup.engine.status().num_kv_blocks == 0


@asynccontextmanager
async def resizable(suite: EngineSuite) -> AsyncGenerator[tuple[EngineSetup, SupportsResize, EngineStatus]]:
    """An engine that serves, and its status; skips the check if its pool keeps its size."""
    if not suite.can_resize:
        pytest.skip("the engine's KV pool keeps its size")
    async with suite.serving() as setup:
        assert isinstance(setup.engine, SupportsResize)
        yield setup, setup.engine, setup.engine.status()
