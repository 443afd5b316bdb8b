"""Two stores that share memory keep one budget, and models that either lends, under random operations."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hotswap import ModelId
from hotswap.abc import Manifest, Shard
from hotswap.backends.stores import SharedStore
from hotswap.backends.stores.segment import Label, digest_of
from hotswap.errors import TierFull
from tests.backends.stores.models import UNIT

BUDGET = 12 * UNIT
MODELS = st.sampled_from("abcd")
SIDES = st.sampled_from((0, 1))


def manifest_of(model: str) -> Manifest:
    """A model of one to four units in two shards, by name."""
    size = ("abcd".index(model) + 1) * UNIT
    shards = tuple(
        Shard(
            model=ModelId(model),
            rank=0,
            file=f"{number}.bin",
            file_offset_bytes=0,
            buffer_offset_bytes=number * size // 2,
            size_bytes=size // 2,
            checksum="crc32:00000000",
        )
        for number in (0, 1)
    )
    return Manifest(model=ModelId(model), shards=shards, buffer_bytes=size)


def size_of(model: str) -> int:
    manifest = manifest_of(model)
    return Label.of(manifest, 0, digest_of(manifest)).size_bytes


class Machine(RuleBasedStateMachine):
    """Random admissions (some cancelled, some kept half), loans, pins, drops and restarts of two stores."""

    loans = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.place = tempfile.TemporaryDirectory()
        self.directory = Path(self.place.name) / "shared"
        self.runner = start_blocking_portal()
        self.portal: BlockingPortal = self.runner.__enter__()
        self.stores: list[SharedStore] = []
        self.opened: list[Any] = []
        self.open_loans: list[tuple[int, str, Any, memoryview]] = []
        self.pinned: list[set[str]] = [set(), set()]
        for side in (0, 1):
            self.stores.append(SharedStore(self.directory, BUDGET))
            self.opened.append(self._open(side))

    def _open(self, side: int) -> Any:
        opened = self.portal.wrap_async_context_manager(self.stores[side])
        opened.__enter__()
        return opened

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def run() -> Any:
            return await work

        return self.portal.call(run)

    def resident(self, side: int = 0) -> set[str]:
        return {str(entry.model) for entry in self.stores[side].view().residency}

    def in_use(self) -> set[str]:
        return {name for _, name, *_ in self.open_loans}

    @rule(side=SIDES, model=MODELS, num_shards=st.integers(0, 2), keep=st.booleans())
    def admit(self, side: int, model: str, num_shards: int, keep: bool) -> None:
        before = self.resident()
        try:
            self.wait(self._admit(self.stores[side], model, num_shards, keep))
        except TierFull:
            assert self.resident() == before
        else:
            assert model in self.resident() or not (model in before or (keep and num_shards == 2))
        assert (self.in_use() | self.pinned[0] | self.pinned[1]) & before <= self.resident()

    async def _admit(self, store: SharedStore, model: str, num_shards: int, keep: bool) -> None:
        manifest = manifest_of(model)
        async with store.reserve(manifest, 0) as reservation:
            assert store.view().tiers[0].used_bytes <= BUDGET
            for shard in manifest.shards[:num_shards]:
                async with reservation.filling():
                    if not reservation.has(shard):
                        reservation.place(shard)[:] = model.encode() * shard.size_bytes
                        reservation.commit(shard)
            if keep:
                reservation.keep()

    @rule(target=loans, side=SIDES, model=MODELS)
    def lend(self, side: int, model: str) -> Any:
        loan = self.portal.wrap_async_context_manager(self.stores[side].lend(manifest_of(model)))
        buffer = loan.__enter__()
        assert (buffer is not None) == (model in self.resident())
        if buffer is None:
            loan.__exit__(None, None, None)
            return None
        entry = (side, model, loan, buffer.data)
        self.open_loans.append(entry)
        return entry

    @rule(entry=consumes(loans))
    def end(self, entry: Any) -> None:
        if entry in self.open_loans:
            self.open_loans.remove(entry)
            entry[2].__exit__(None, None, None)

    @rule(side=SIDES, model=MODELS)
    def pin(self, side: int, model: str) -> None:
        self.portal.call(self.stores[side].pin, ModelId(model))
        self.pinned[side].add(model)

    @rule(side=SIDES, model=MODELS)
    def unpin(self, side: int, model: str) -> None:
        self.portal.call(self.stores[side].unpin, ModelId(model))
        self.pinned[side].discard(model)

    @rule(side=SIDES, model=MODELS)
    def drop(self, side: int, model: str) -> None:
        if model not in self.in_use() | self.pinned[1 - side]:
            self.wait(self.stores[side].drop(ModelId(model)))
            assert model not in self.resident()

    @rule(side=SIDES)
    def restart(self, side: int) -> None:
        for entry in [entry for entry in self.open_loans if entry[0] == side]:
            self.end(entry)
        before = self.resident()
        self.opened[side].__exit__(None, None, None)
        self.pinned[side].clear()
        self.stores[side] = SharedStore(self.directory, BUDGET)
        self.opened[side] = self._open(side)
        assert self.resident() == before

    @rule(side=SIDES)
    def clear(self, side: int) -> None:
        kept = (self.in_use() | self.pinned[1 - side]) & self.resident()
        self.wait(self.stores[side].clear())
        assert self.resident() == kept

    @invariant()
    def one_budget_holds(self) -> None:
        files = [file for file in self.directory.iterdir() if file.name != ".budget"]
        used = sum(file.stat().st_size for file in files)
        assert [store.view().tiers[0].used_bytes for store in self.stores] == [used, used]
        assert sum(map(size_of, self.resident())) <= used <= BUDGET
        assert self.resident(0) == self.resident(1)

    @invariant()
    def what_is_lent_is_as_it_was(self) -> None:
        for _, model, _, data in self.open_loans:
            assert data[0] == data[-1] == ord(model)

    @invariant()
    def what_is_not_lent_is_not_mapped(self) -> None:
        maps = Path("/proc/self/maps").read_text("utf-8")
        mapped = {
            line.rsplit("/", 1)[1].split(".")[0] for line in maps.splitlines() if str(self.directory) in line
        }
        assert mapped == self.in_use()

    def teardown(self) -> None:
        for _, _, loan, _ in self.open_loans:
            loan.__exit__(None, None, None)
        assert [store.num_lent for store in self.stores] == [0, 0]
        for opened in self.opened:
            opened.__exit__(None, None, None)
        self.runner.__exit__(None, None, None)
        assert not any(str(self.directory) in os.readlink(fd) for fd in _open_files())
        self.place.cleanup()


def _open_files() -> list[str]:
    return [
        f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    ]


Machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestMachine = Machine.TestCase
