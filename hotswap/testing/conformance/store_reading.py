"""Checks of manifests, lent chunks and the view of a store."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from pathlib import Path, PurePath

import anyio
import anyio.lowlevel
import pytest

from hotswap.errors import ShardMissing
from hotswap.model import Manifest, Shard
from hotswap.store import SupportsLendFiles, WeightStore
from hotswap.testing.cancel import cancel_everywhere
from hotswap.testing.conformance.store_suite import StoreSuite, read, read_all
from hotswap.testing.conformance.suite import Heartbeat, check

__all__ = ["ReadingChecks"]

# The checksum algorithms that the standard library has; others are not verified here.
CHECKSUMS: dict[str, Callable[[bytes], str]] = {
    "crc32": lambda data: f"{zlib.crc32(data):08x}",
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "blake2b": lambda data: hashlib.blake2b(data).hexdigest(),
}


class ReadingChecks(StoreSuite):
    """Checks of `WeightStore.manifest`, `open` and `view`."""

    @check
    async def test_a_manifest_describes_its_buffers(self) -> None:
        async with self.opened() as store:
            for model in self.models:
                manifest = await store.manifest(model)
                assert manifest.model == model
                assert manifest == await store.manifest(model), "weights are immutable"
                assert_shards(manifest)
                assert_tensors(manifest)

    @check
    async def test_an_unknown_model_is_missing(self) -> None:
        async with self.opened() as store:
            with pytest.raises(ShardMissing, match=str(self.unknown)):
                await store.manifest(self.unknown)

    @check
    async def test_an_unknown_shard_is_missing(self) -> None:
        async with self.opened() as store:
            shard = (await store.manifest(self.models[0])).shards[0]
            for unknown in (replace(shard, model=self.unknown), replace(shard, file="no-such-file")):
                with pytest.raises(ShardMissing):
                    await read(store, unknown)

    @check
    async def test_chunks_ascend_without_gaps_and_stay_the_same(self) -> None:
        async with self.opened() as store:
            for model in self.models:
                manifest = await store.manifest(model)
                first = await read_all(store, manifest)
                second = await read_all(store, manifest)
                assert first == second, f"{model!r} has other bytes when read again"

    @check
    async def test_bytes_match_their_checksums(self) -> None:
        async with self.opened() as store:
            for model in self.models:
                for shard in (await store.manifest(model)).shards:
                    algorithm, _, digest = shard.checksum.partition(":")
                    data = await read(store, shard)
                    if algorithm in CHECKSUMS:
                        assert CHECKSUMS[algorithm](data) == digest.lower(), f"{shard} has other bytes"

    @check
    async def test_models_differ(self) -> None:
        async with self.opened() as store:
            one, two = [
                b"".join(await read_all(store, await store.manifest(model))) for model in self.models[:2]
            ]
            both = min(len(one), len(two))
            assert one[:both] != two[:both], f"{self.models[0]!r} and {self.models[1]!r} have the same bytes"

    @check
    async def test_a_chunk_is_flat_bytes_from_a_tier_of_the_view(self) -> None:
        async with self.opened() as store:
            tiers = {tier.name for tier in store.view().tiers}
            async with store.open(await self.shard(store)) as chunks:
                async for chunk in chunks:
                    assert chunk.data.nbytes == len(chunk.data)
                    assert chunk.data.c_contiguous
                    assert chunk.tier in tiers

    @check
    async def test_a_chunk_holds_still_until_the_next_is_asked_for(self) -> None:
        async with self.opened() as store:
            shard = await self.shard(store)
            others = [await store.manifest(model) for model in self.models]
            async with store.open(shard) as chunks:
                async for chunk in chunks:
                    before = bytes(chunk.data)
                    for manifest in others:
                        await read_all(store, manifest)
                    assert bytes(chunk.data) == before, f"a chunk at {chunk.offset_bytes} changed while lent"

    @check
    async def test_shards_can_be_read_side_by_side(self) -> None:
        async with self.opened() as store:
            shards = [shard for model in self.models for shard in (await store.manifest(model)).shards]
            alone = [await read(store, shard) for shard in shards]
            beside: dict[int, bytes] = {}

            async def keep(number: int) -> None:
                beside[number] = await read(store, shards[number % len(shards)])

            async with anyio.create_task_group() as tasks:
                for number in range(2 * len(shards)):
                    tasks.start_soon(keep, number)
            assert [beside[number] for number in range(2 * len(shards))] == alone + alone

    @check
    async def test_leaving_early_gives_everything_back(self) -> None:
        async with self.opened() as store:
            shard = await self.shard(store)
            whole = await read(store, shard)
            for num_read in (0, 1, 2):
                async with store.open(shard) as chunks:
                    for _ in range(num_read):
                        await anext(chunks, None)
                self.assert_released(store)
            with pytest.raises(ZeroDivisionError):
                await fail_while_reading(store, shard)
            self.assert_released(store)
            assert await read(store, shard) == whole

    @check
    async def test_reading_cancelled_anywhere_gives_everything_back(self) -> None:
        async with self.opened() as store:
            shard = await self.shard(store)
            whole = await read(store, shard)

            async def look() -> None:
                self.assert_released(store)

            await cancel_everywhere(lambda: read(store, shard), look)
            assert await read(store, shard) == whole

    @check
    async def test_reading_lets_the_event_loop_go_on(self) -> None:
        async with self.opened() as store:
            manifests = [await store.manifest(model) for model in self.models]
            hearts = [Heartbeat() for _ in range(3)]  # a machine may falter once, or twice
            for heart in hearts:
                async with heart.beating():
                    for manifest in manifests:
                        for shard in manifest.shards:
                            async with store.open(shard) as chunks:
                                async for _ in chunks:
                                    pass
            assert not all(heart.blocked for heart in hearts), f"reading stopped the event loop: {hearts}"

    @check
    async def test_lent_files_have_the_bytes_of_their_shards(self) -> None:
        async with self.opened() as store:
            able = lender(self, store)
            for model in self.models:
                manifest = await store.manifest(model)
                expected = await read_all(store, manifest)
                async with able.lend_files(manifest) as paths:
                    assert [part(*pair) for pair in zip(paths, manifest.shards, strict=True)] == expected

    @check
    async def test_files_of_an_unknown_model_are_missing(self) -> None:
        async with self.opened() as store:
            able = lender(self, store)
            manifest = replace(await store.manifest(self.models[0]), model=self.unknown)
            with pytest.raises(ShardMissing):
                async with able.lend_files(manifest):
                    pass

    @check
    async def test_lending_files_cancelled_anywhere_gives_everything_back(self) -> None:
        async with self.opened() as store:
            able = lender(self, store)
            manifest = await store.manifest(self.models[0])

            async def lend() -> None:
                async with able.lend_files(manifest):
                    await anyio.lowlevel.checkpoint()

            async def look() -> None:
                self.assert_released(store)

            await cancel_everywhere(lend, look)

    @check
    async def test_the_view_says_where_every_model_lies(self) -> None:
        async with self.opened() as store:
            for model in self.models:
                size_bytes = (await store.manifest(model)).weight_bytes
                assert_resident(store, model, size_bytes)
                await read_all(store, await store.manifest(model))
                assert_resident(store, model, size_bytes)
            assert store.view().tier_of(self.unknown) is None

    @check
    async def test_the_view_is_frozen(self) -> None:
        async with self.opened() as store:
            view = store.view()
            with pytest.raises(FrozenInstanceError):
                view.tiers = ()  # type: ignore[misc]

    async def shard(self, store: WeightStore) -> Shard:
        """Return a shard to read."""
        return (await store.manifest(self.models[0])).shards[0]


def lender(suite: StoreSuite, store: WeightStore) -> SupportsLendFiles:
    """Return the store, or skip the check if it cannot lend files."""
    if not (suite.has_disk and isinstance(store, SupportsLendFiles)):
        pytest.skip("the store lends no files")
    return store


def part(path: Path, shard: Shard) -> bytes:
    """The bytes of a shard in a lent file."""
    with path.open("rb") as file:
        file.seek(shard.file_offset_bytes)
        return file.read(shard.size_bytes)


def assert_shards(manifest: Manifest) -> None:
    """Raise unless the shards lie in their ranks' buffers without overlaps, in files of plain names."""
    assert manifest.shards, f"{manifest.model!r} has no shards"
    for shard in manifest.shards:
        assert shard.model == manifest.model
        assert 0 <= shard.rank < manifest.world_size
        assert shard.size_bytes > 0
        assert shard.file_offset_bytes >= 0
        assert PurePath(shard.file).name == shard.file, f"{shard.file!r} is not a plain name"
    for rank in range(manifest.world_size):
        shards = manifest.shards_of(rank)
        assert shards, f"rank {rank} of {manifest.model!r} has no shards"
        assert shards[0].buffer_offset_bytes >= 0
        assert shards[-1].buffer_offset_bytes + shards[-1].size_bytes <= manifest.buffer_bytes
        for one, two in pairwise(shards):
            assert one.buffer_offset_bytes + one.size_bytes <= two.buffer_offset_bytes, (
                f"{one}, {two} overlap"
            )


def assert_tensors(manifest: Manifest) -> None:
    """Raise unless every tensor lies inside the shards of every rank."""
    for rank in range(manifest.world_size):
        ends = [
            (s.buffer_offset_bytes, s.buffer_offset_bytes + s.size_bytes) for s in manifest.shards_of(rank)
        ]
        for tensor in manifest.tensors:
            at, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
            held = sum(max(0, min(end, stop) - max(at, start)) for start, stop in ends)
            assert held == tensor.size_bytes, f"{tensor.name!r} is not in the shards of rank {rank}"


def assert_resident(store: WeightStore, model: str, size_bytes: int) -> None:
    """Raise unless the view places a model whole on a tier that it lists."""
    view = store.view()
    places = [(tier.name, tier.node) for tier in view.tiers]
    entries = [entry for entry in view.residency if entry.model == model]
    assert entries, f"{model!r} is nowhere in {view}"
    assert all(entry.size_bytes == size_bytes for entry in entries), f"{entries}"
    assert all((entry.tier, entry.node) in places for entry in entries), f"{entries}"
    for tier in view.tiers:
        there = (entry for entry in view.residency if (entry.tier, entry.node) == (tier.name, tier.node))
        held = sum(entry.size_bytes for entry in there)
        assert tier.used_bytes >= held, f"{tier} uses less than what is resident there, {held}"


async def fail_while_reading(store: WeightStore, shard: Shard) -> None:
    """Leave an open shard by an exception."""
    async with store.open(shard) as chunks:
        await anext(chunks)
        raise ZeroDivisionError
