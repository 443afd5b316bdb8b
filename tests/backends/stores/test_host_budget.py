"""A host tier keeps its budget and lent models, and releases all bytes, under random operations."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hotswap import ModelId
from hotswap.abc import Manifest, Shard
from hotswap.backends.stores import PinnedStore
from hotswap.errors import TierFull
from tests.backends.stores.models import UNIT

BUDGET = 8 * UNIT
MODELS = st.sampled_from("abcd")


def manifest_of(model: str) -> Manifest:
    """A model of one to four units, by name."""
    size = ("abcd".index(model) + 1) * UNIT
    shard = Shard(
        model=ModelId(model),
        rank=0,
        file="0.bin",
        file_offset_bytes=0,
        buffer_offset_bytes=0,
        size_bytes=size,
        checksum="",
    )
    return Manifest(model=ModelId(model), shards=(shard,), buffer_bytes=size)


class Tier(RuleBasedStateMachine):
    """Random admissions (some cancelled), loans, pins and drops on a real store with real memory."""

    loans = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.runner = start_blocking_portal()
        self.portal: BlockingPortal = self.runner.__enter__()
        self.store = PinnedStore(BUDGET)
        self.opened = self.portal.wrap_async_context_manager(self.store)
        self.opened.__enter__()
        self.open_loans: list[tuple[str, Any, memoryview]] = []
        self.pinned: set[str] = set()

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def run() -> Any:
            return await work

        return self.portal.call(run)

    def resident(self) -> set[str]:
        return {str(entry.model) for entry in self.store.view().residency}

    @rule(model=MODELS, whole=st.booleans())
    def admit(self, model: str, whole: bool) -> None:
        before, lent = self.resident(), {name for name, *_ in self.open_loans}
        try:
            self.wait(self._admit(model, whole))
        except TierFull:
            assert self.resident() == before
        else:
            assert (model in self.resident()) == (whole or model in before)
        assert (lent | self.pinned) & before <= self.resident()

    async def _admit(self, model: str, whole: bool) -> None:
        manifest = manifest_of(model)
        (shard,) = manifest.shards
        async with self.store.reserve(manifest, 0) as reservation:
            assert self.store.view().tiers[0].used_bytes <= BUDGET
            if not reservation.has(shard) and whole:
                reservation.place(shard)[:] = model.encode() * shard.size_bytes
                reservation.commit(shard)
                reservation.keep()

    @rule(target=loans, model=MODELS)
    def lend(self, model: str) -> Any:
        loan = self.portal.wrap_async_context_manager(self.store.lend(manifest_of(model)))
        buffer = loan.__enter__()
        assert (buffer is not None) == (model in self.resident())
        if buffer is None:
            loan.__exit__(None, None, None)
            return None
        entry = (model, loan, buffer.data)
        self.open_loans.append(entry)
        return entry

    @rule(entry=consumes(loans))
    def end(self, entry: Any) -> None:
        if entry is not None:
            self.open_loans.remove(entry)
            entry[1].__exit__(None, None, None)

    @rule(model=MODELS)
    def pin(self, model: str) -> None:
        self.portal.call(self.store.pin, ModelId(model))
        self.pinned.add(model)

    @rule(model=MODELS)
    def unpin(self, model: str) -> None:
        self.portal.call(self.store.unpin, ModelId(model))
        self.pinned.discard(model)

    @rule(model=MODELS)
    def drop(self, model: str) -> None:
        if all(name != model for name, *_ in self.open_loans):
            self.wait(self.store.drop(ModelId(model)))
            assert model not in self.resident()

    @invariant()
    def never_over_the_budget(self) -> None:
        used = self.store.view().tiers[0].used_bytes
        assert used == sum(manifest_of(model).buffer_bytes for model in self.resident()) <= BUDGET

    @invariant()
    def what_is_lent_is_as_it_was(self) -> None:
        for model, _, data in self.open_loans:
            assert data[0] == data[-1] == ord(model)

    def teardown(self) -> None:
        for _, loan, _ in self.open_loans:
            loan.__exit__(None, None, None)
        assert self.store.num_lent == 0
        self.opened.__exit__(None, None, None)
        assert self.store.view().tiers[0].used_bytes == 0
        self.runner.__exit__(None, None, None)


Tier.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTier = Tier.TestCase
