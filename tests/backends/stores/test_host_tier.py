"""The contract of both host tiers, `PinnedStore` and `SharedStore`."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap import ModelId
from hotswap.abc import Manifest
from hotswap.backends.stores import PinnedStore, SharedStore
from hotswap.backends.stores.host_tier import BufferReservation, HostTier
from tests.backends.stores.models import UNIT, put

M = ModelId("m")


@pytest.fixture(params=["pinned", "shared"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> HostTier:
    budget = 20 * UNIT
    return PinnedStore(budget) if request.param == "pinned" else SharedStore(tmp_path / "shared", budget)


async def fill(reservation: BufferReservation, manifest: Manifest) -> None:
    async with reservation.filling():
        for shard in manifest.shards_of(0):
            reservation.place(shard)[:] = b"x" * shard.size_bytes
            reservation.commit(shard)


def residents(tier: HostTier) -> set[str]:
    return {str(entry.model) for entry in tier.view().residency}


async def admit(tier: HostTier, manifest: Manifest) -> None:
    async with tier.reserve(manifest, 0) as reservation:
        await fill(reservation, manifest)
        reservation.keep()


async def test_a_buffer_that_was_lent_whole_is_kept(tier: HostTier, tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with tier:
        async with tier.reserve(manifest, 0) as reservation:
            await fill(reservation, manifest)
            async with tier.lend(manifest) as buffer:
                assert buffer is not None
        assert residents(tier) == {"m"}


async def test_a_buffer_of_which_a_shard_was_read_is_kept(tier: HostTier, tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with tier:
        async with tier.reserve(manifest, 0) as reservation:
            await fill(reservation, manifest)
            async with tier.open(manifest.shards[0]) as chunks:
                await anext(chunks)
        assert residents(tier) == {"m"}


async def test_the_end_of_a_use_decides_the_order_of_eviction(tier: HostTier, tmp_path: Path) -> None:
    a, b, c = (put(tmp_path, model, size=8 * UNIT)[0] for model in "abc")
    async with tier:
        await admit(tier, a)
        async with tier.lend(a):
            await admit(tier, b)
        await admit(tier, c)
        assert residents(tier) == {"a", "c"}


async def test_a_drop_that_is_cancelled_is_forgotten(tier: HostTier, tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with tier:
        await admit(tier, manifest)
        async with tier.lend(manifest), anyio.create_task_group() as tasks:
            tasks.start_soon(tier.drop, M)
            await checkpoint()
            tasks.cancel_scope.cancel()
        assert residents(tier) == {"m"}
        await tier.drop(M)
        assert residents(tier) == set()


async def test_of_two_drops_one_may_be_cancelled(tier: HostTier, tmp_path: Path) -> None:
    manifest, _ = put(tmp_path)
    async with tier, anyio.create_task_group() as tasks:
        await admit(tier, manifest)
        async with tier.lend(manifest):
            tasks.start_soon(tier.drop, M)
            async with anyio.create_task_group() as others:
                others.start_soon(tier.drop, M)
                await checkpoint()
                others.cancel_scope.cancel()
            assert residents(tier) == {"m"}
        while residents(tier):
            await checkpoint()
