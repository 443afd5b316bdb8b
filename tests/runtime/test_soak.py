"""Ten thousand requests to twenty engines, with moves, drains, swaps and faults all the while."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from benchmarks.soak_clients import CheckedRequest, ClientPool
from benchmarks.soak_operations import Engines, OperationRates
from benchmarks.soak_scenario import FINDINGS, Scenario, Setup, soak
from hotswap import Adapter, AdapterId, Fleet, MigrationLimits, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard
from hotswap.backends.sim import DeviceProfile, SimEngine, SimStore, expected_tokens, sim_manifest
from hotswap.offline.virtual_time import virtual_time
from hotswap.policies import LeastLoadedRouter, WeightedLoadSwap
from hotswap.testing.chaos import ChaosEngine, EngineFaults, StoreFaults, chaotic_engine, chaotic_store

NUM_REQUESTS = 10_000
NUM_ENGINES = 20
MODELS = ("a", "b", "c", "d", "e", "f")
ADAPTERS = tuple(Adapter(name, "a") for name in ("x", "y", "z"))
WEIGHT_BYTES = 1 << 20
CONTEXT_TOKENS = 512
PROFILE = DeviceProfile(
    memory_bytes=8 << 20, floor_s=0.05, base_s=0.02, token_s=1e-5, load_bytes_per_s=10 << 20, unload_s=0.02
)
ENGINE_FAULTS = EngineFaults(
    loss_every_s=40.0,  # of each engine: every two seconds of one
    stuck=0.3,
    delay=0.02,
    delay_s=0.1,
    stall=0.002,
    stall_s=0.5,
    no_memory=0.1,
    abort=0.02,
)
STORE_FAULTS = StoreFaults(
    bytes_per_s=50 << 20, delay=0.1, delay_s=0.1, missing=0.03, error=0.05, corrupt=0.05
)


def make_setup(random: Random) -> Setup:
    """Twenty simulated engines that share six models, one of them with adapters."""
    numbers = itertools.count()

    def make_engine() -> ChaosEngine:
        engine = SimEngine(
            f"e{next(numbers)}",
            PROFILE,
            kv_blocks=72,
            kv_block_tokens=8,
            max_requests=8,
            token_budget=64,
            max_adapters=2,
        )
        return chaotic_engine(engine, Random(random.getrandbits(64)), ENGINE_FAULTS)

    sizes = {"weight_bytes": WEIGHT_BYTES, "num_shards": 2, "max_context_tokens": CONTEXT_TOKENS}
    bare = SimStore([sim_manifest(name, **sizes) for name in MODELS], chunk_bytes=128 << 10)
    store = chaotic_store(bare, Random(random.getrandbits(64)), STORE_FAULTS)
    engines = Engines(make_engine, NUM_ENGINES)
    fleet = Fleet(
        engines=engines.present,
        store=store,
        models=[Model(name, min_replicas=int(name in "ab")) for name in MODELS],
        adapters=ADAPTERS,
        router=LeastLoadedRouter(),
        scheduler=WeightedLoadSwap(t1=2, t2=30, b=1.5, patience_s=1.0, sigmas=0),
        interval_s=0.5,
        max_waiting=NUM_REQUESTS,
        max_load_attempts=1_000_000,  # no client shall receive an error because of the store's faults
        migration_limits=MigrationLimits(per_instance=3),
    )
    requests = [make_request(random) for _ in range(400)]
    return Setup(fleet=fleet, engines=engines, store=store, requests=requests, num_lent=lambda: bare.num_lent)


def make_request(random: Random) -> CheckedRequest:
    model = random.choice(MODELS)
    adapter = random.choice(ADAPTERS).id if model == "a" and random.random() < 0.5 else None
    prompt = tuple(random.randrange(1, 999) for _ in range(random.randrange(1, 90)))
    sampling = Sampling(
        max_tokens=random.randrange(1, 40),
        ignore_eos=True,
        temperature=random.choice((0.0, 0.8)),
        seed=random.randrange(99),
    )
    request = Request(
        id=RequestId("undisturbed"),
        model=ModelId(model),
        prompt=prompt,
        sampling=sampling,
        adapter=None if adapter is None else AdapterId(adapter),
    )
    card = ModelCard(id=ModelId(model), weight_bytes=WEIGHT_BYTES, max_context_tokens=CONTEXT_TOKENS)
    expected = tuple(expected_tokens(request, card))
    return CheckedRequest(model=model, prompt=prompt, sampling=sampling, adapter=adapter, expected=expected)


@pytest.mark.slow
@virtual_time
async def test_ten_thousand_requests_among_faults_end_right_and_leave_nothing() -> None:
    scenario = Scenario(clients=ClientPool(), rates=OperationRates(), num_requests=NUM_REQUESTS)
    report = await soak(make_setup(Random(1)), scenario, seed=1)
    assert {finding: report[finding] for finding in FINDINGS} == {finding: [] for finding in FINDINGS}
    ends = report["disturbed"]["requests"]
    assert set(ends) == {"done", "left", "late"}
    assert sum(ends.values()) == NUM_REQUESTS
    assert {"loss", "stuck", "delay", "stall", "no_memory", "abort"} <= set(report["faults"])
    assert {"store delay", "store missing", "store error", "store corrupt"} <= set(report["faults"])
    assert sum(report["faults"].values()) > 1000
    assert {
        f"{method} {end}" for method in ("kv", "tokens") for end in ("done", "aborted", "cancelled")
    } <= set(report["moves"])
    assert {"drains", "replacements", "moved", "evicted", "finished"} <= set(report["drains"])
