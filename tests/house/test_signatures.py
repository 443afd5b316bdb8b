"""Every type in a public signature can be imported from a public module, and nothing else is exported."""

from __future__ import annotations

import pytest

from tests.house.signatures import Symbol, exported, in_signature_of

PUBLIC = (
    "hotswap",
    "hotswap.abc",
    "hotswap.errors",
    "hotswap.backends.kv_stores",
    "hotswap.backends.llamacpp",
    "hotswap.backends.nodes",
    "hotswap.backends.process",
    "hotswap.backends.ray",
    "hotswap.backends.remote",
    "hotswap.backends.sim",
    "hotswap.backends.stores",
    "hotswap.backends.stores.remote",
    "hotswap.backends.torch",
    "hotswap.backends.transports",
    "hotswap.backends.vllm",
    "hotswap.door",
    "hotswap.offline",
    "hotswap.policies",
    "hotswap.policies.planning",
    "hotswap.policies.routers",
    "hotswap.policies.schedulers",
    "hotswap.profiling",
    "hotswap.simulation",
    "hotswap.testing",
)

# Their constructors are no public signature.
MADE_BY = {
    "Adapters": "`Fleet` has it as `adapters`",
    "EventStream": "`Fleet.events` gives it",
    "DeviceLease": "`DeviceBudget.lease` gives it",
    "FleetStream": "`Fleet.stream` lends it",
    "MemoryChannel": "`memory_channels` makes two of them",
    "Models": "`Fleet` has it as `models`",
    "SharedChannel": "`connect_shared` and `serve_shared` make it",
}

# They stand in signatures, of which those that give them or take them are called by hotswap alone.
NOT_EXPORTED = {
    "hotswap.backends.kv_indexed.IndexedKVStore": "a place of a `TieredKVStore` names its tier",
    "hotswap.backends.kv_index.Places": "a `NodeKVStore` lends them as the end of a move",
    "hotswap.backends.kv_stores.page_file.FilePlace": "its index has an `NvmeKVStore` place blocks by them",
    "hotswap.backends.kv_stores.pages.Pages": "its index has a `HostKVStore` place blocks by them",
    "hotswap.backends.kv_stores.shared_directory.BlockFile": "the same of a `SharedKVStore`",
    "hotswap.backends.kv_stores.tiered.TierPlace": "its index has a `TieredKVStore` place blocks by them",
    "hotswap.backends.stores.disk_directory.Admission": "`TieredStore` copies a model to its disk by `admit`",
    "hotswap.backends.stores.files.FileCalls": "tests of the stores inject faults by it",
    "hotswap.backends.stores.host_tier.BufferReservation": "`TieredStore` fills a host tier by `reserve`",
    "hotswap.backends.torch.kv.LayerShape": "engines share what they found in a `SkeletonCache`",
    "hotswap.backends.torch.modeling.Skeleton": "engines borrow them from a `SkeletonCache`",
    "hotswap.backends.vllm.core.Core": "engines take them from a `CorePool`",
    "hotswap.backends.vllm.settings.Settings": "engines take cores from a `CorePool` by them",
    "hotswap.testing.chaos.store.End": "a `ChaosStore` draws it for each stream it lends",
    "hotswap.testing.conformance.engine_adapters.AdapterSetup": "tests of the suite open it",
    "hotswap.testing.conformance.engine_migration.Pair": "tests of the suite open it",
    "hotswap.testing.conformance.engine_suite.EngineSetup": "tests of the suite open it",
    "hotswap.testing.conformance.engine_suite.Reader": "tests of the suite open it",
}

# Exported by `hotswap` or `hotswap.abc`, though no signature names them.
NOT_NAMED = {
    "CountRank": "a base class for ranks: what takes one takes any `Rank`",
    "HotswapError": "what every caller of a fleet catches",
    "InvalidRequest": "what a caller catches of a request that asks for something wrong",
    "PromptTooLong": "the same of a prompt that does not fit",
    "SupportsAdapters": "an ability that the fleet asks an engine for",
    "SupportsGrammars": "an ability that the fleet asks an engine for",
    "SupportsKVLimit": "an ability that the fleet asks an engine for",
    "SupportsKVListing": "an ability that the fleet asks an engine for",
    "SupportsImport": "an ability that the fleet asks a store for",
    "SupportsLeastTokens": "an ability that the fleet asks a tokenizer for",
    "SupportsLend": "an ability that engines ask a store for",
    "SupportsLendFiles": "an ability that engines ask a store for",
    "SupportsLiteralText": "an ability that the fleet asks a tokenizer for",
    "SupportsModelCheck": "an ability that the fleet asks an engine for",
    "SupportsModelTrial": "an ability that the fleet asks an engine for",
    "SupportsNodes": "an ability that the fleet asks a store for",
    "SupportsPrefetch": "an ability that the fleet asks a store for",
    "SupportsPreload": "an ability that the fleet asks an engine for",
    "SupportsResize": "an ability that the fleet asks an engine for",
    "SupportsReadInto": "an ability that other stores ask a store for",
    "SupportsSideFiles": "an ability that engines and tiers ask a store for",
    "SupportsSource": "an ability that tokenizers ask a template for",
    "SupportsTextSettings": "an ability that the fleet asks a store for",
    "SupportsTokenizer": "an ability that the fleet asks a store for",
    "TextStream": "decodes tokens as they come, for programs that use engines without a fleet",
    "TokenQueue": "the stream of most engines: what gives one gives a `TokenStream`",
    "WrapperEngine": "a base class for engines that wrap another",
    "WrapperStore": "a base class for stores that wrap another",
}

SYMBOLS = {symbol for module in PUBLIC for symbol in exported(module).values()}


def named_by(symbol: Symbol) -> set[Symbol]:
    return in_signature_of(symbol, constructor=symbol.name not in MADE_BY)


@pytest.mark.parametrize("module", PUBLIC)
def test_every_type_in_a_public_signature_is_exported(module: str) -> None:
    missing = {
        name: [str(other) for other in sorted(named_by(symbol) - SYMBOLS) if str(other) not in NOT_EXPORTED]
        for name, symbol in exported(module).items()
    }
    assert {name: others for name, others in missing.items() if others} == {}


@pytest.mark.parametrize("module", ["hotswap", "hotswap.abc"])
def test_nothing_is_exported_that_no_public_signature_names(module: str) -> None:
    named = {other for symbol in SYMBOLS for other in named_by(symbol)}
    idle = [name for name, symbol in exported(module).items() if symbol not in named]
    assert [name for name in idle if name not in NOT_NAMED] == []


def test_no_exception_outlives_what_it_excuses() -> None:
    named = {other for symbol in SYMBOLS for other in named_by(symbol)}
    assert sorted(NOT_EXPORTED) == sorted({str(symbol) for symbol in named - SYMBOLS})
    of_both = {**exported("hotswap"), **exported("hotswap.abc")}
    assert sorted(NOT_NAMED) == sorted(name for name, symbol in of_both.items() if symbol not in named)
    made = [symbol for symbol in SYMBOLS if in_signature_of(symbol) - SYMBOLS - named_by(symbol)]
    assert sorted(MADE_BY) == sorted(symbol.name for symbol in made)


def test_a_value_that_users_and_writers_need_is_the_same_in_both() -> None:
    users, writers = exported("hotswap"), exported("hotswap.abc")
    shared = users.keys() & writers.keys()
    assert {"FleetView", "Model", "Token"} <= shared
    assert {name: users[name] for name in shared} == {name: writers[name] for name in shared}
