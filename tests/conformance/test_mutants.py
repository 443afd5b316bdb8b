"""The public suites notice planted faults: a mutant fails the check made for it, which a sound one passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotswap.backends.kv_stores import HostKVStore, SharedKVStore
from hotswap.backends.sim import SimEngine, SimStore
from hotswap.testing.conformance import KVStoreConformance
from tests.backends.test_sim import TestSimEngineConforms as EngineSuite
from tests.backends.test_sim import TestSimStoreConforms as StoreSuite
from tests.conformance.kv_store_mutants import KV_STORES
from tests.conformance.mutants import ENGINES, STORES
from tests.conformance.outcome import failures


def suite_of(engine: type[SimEngine]) -> type[EngineSuite]:
    class Suite(EngineSuite):
        limit_s = 5.0

        def make_engine(self) -> SimEngine:
            return self.make(engine)

    return Suite


def store_suite_of(store: type[SimStore]) -> type[StoreSuite]:
    class Suite(StoreSuite):
        limit_s = 5.0

        def make_store(self) -> SimStore:
            return self.make(store)

    return Suite


def kv_store_suite_of(store: type[HostKVStore | SharedKVStore], directory: Path) -> type[KVStoreConformance]:
    class Suite(KVStoreConformance):
        limit_s = 5.0

        def make_store(self, capacity_bytes: int) -> HostKVStore | SharedKVStore:
            if issubclass(store, SharedKVStore):
                return store(directory / store.__name__, capacity_bytes)
            return store(capacity_bytes)

    return Suite


@pytest.mark.parametrize("mutant", ENGINES, ids=lambda mutant: mutant.__name__)
def test_a_faulty_engine_is_caught(mutant: type[SimEngine]) -> None:
    test = ENGINES[mutant]
    assert not failures(suite_of(SimEngine), test), "a sound engine passes"
    assert failures(suite_of(mutant), test)


@pytest.mark.parametrize("mutant", STORES, ids=lambda mutant: mutant.__name__)
def test_a_faulty_store_is_caught(mutant: type[SimStore]) -> None:
    test = STORES[mutant]
    assert not failures(store_suite_of(SimStore), test), "a sound store passes"
    assert failures(store_suite_of(mutant), test)


@pytest.mark.parametrize("mutant", KV_STORES, ids=lambda mutant: mutant.__name__)
def test_a_faulty_kv_store_is_caught(mutant: type[HostKVStore | SharedKVStore], tmp_path: Path) -> None:
    test, sound = KV_STORES[mutant], SharedKVStore if issubclass(mutant, SharedKVStore) else HostKVStore
    assert not failures(kv_store_suite_of(sound, tmp_path), test), "a sound store passes"
    assert failures(kv_store_suite_of(mutant, tmp_path), test)


def test_there_are_many_kinds_of_fault() -> None:
    assert len(ENGINES) + len(STORES) >= 40
    assert len({*ENGINES.values(), *STORES.values()}) >= 30, "most checks have a mutant of their own"


def test_a_sound_engine_and_store_pass_everything() -> None:
    assert not failures(EngineSuite)
    assert not failures(StoreSuite)
