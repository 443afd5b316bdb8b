"""Four engines under load, with moves, drains, swaps, replacements and faults: is every stream right?

    python -m benchmarks soak                          a minute
    python -m benchmarks soak --minutes 5 --json soak.json
    python -m benchmarks soak --kv-store "8 MiB" --device-budget "20 MiB"

Clients send requests for three small models to four engines of one process, a thread each. Engines are lost,
slow and short of memory, shards are missing, damaged and slow, all by seed (`hotswap.testing.chaos`).
Meanwhile requests move and instances are drained, swapped and replaced at random, and some of these
operations are cancelled. With `--kv-store` KV blocks outlive swaps, with `--device-budget` the engines lend
each other memory, and KV pools are resized at random. With `--processes` each engine is in a process of its
own, which is killed with -9 at random in place of being lost. Every stream is compared with that of an
undisturbed engine. In the end all resources must be released, and the process must be no larger than before.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, machine, versions, workspace
from benchmarks.resource_usage import ALLOWED, Allowance, describe, sampling_usage
from benchmarks.soak_clients import CheckedRequest, ClientPool
from benchmarks.soak_engines import Chaotic, KilledEngine, make_chaotic_engine, make_engine
from benchmarks.soak_operations import Engines, OperationRates
from benchmarks.soak_scenario import FINDINGS, Scenario, Setup, soak
from benchmarks.table import show
from hotswap import DeviceBudget, Fleet, MigrationLimits, Model, ModelId, Request, RequestId, Sampling
from hotswap.abc import ModelCard, Scheduler
from hotswap.backends.kv_stores import HostKVStore, NodeKVStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.policies import ElasticMemory, LeastLoadedRouter, WeightedLoadSwap
from hotswap.testing.chaos import StoreFaults, chaotic_store

__all__ = ["Settings", "main", "measure"]

_MODELS = ("llama", "qwen", "mistral")
_VOCABULARY = 512
_GREEDY = Sampling(max_tokens=1, ignore_eos=True)
_SAMPLED = replace(_GREEDY, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2)
_STORE_FAULTS = StoreFaults(
    bytes_per_s=200e6, delay=0.1, delay_s=0.05, missing=0.03, error=0.05, corrupt=0.05, refuse=0.3
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to do.

    Attributes:
        scenario: The load, the disturbance, and how long they last.
        engines: Number of engines.
        distinct_requests: Number of different requests, each of which is sent many times.
        seed: Of everything that is random.
        kv_store: Size of a store that keeps KV blocks across swaps; `None` for none.
        kv_on_nodes: Whether it keeps them in the processes of the engines, in so much memory of each.
        device_budget: Size of the memory that the engines share, 2 MiB or more for each; `None` gives each
            its own.
        processes: Whether each engine is in a process of its own, which is killed at random.
        sample_s: Seconds between two samples of memory, descriptors and threads.
    """

    scenario: Scenario = field(
        default_factory=lambda: Scenario(
            clients=ClientPool(size=16), rates=OperationRates(), quiet_s=10.0, seconds=60.0
        )
    )
    engines: int = 4
    distinct_requests: int = 90
    seed: int = 1
    kv_store: str | None = None
    kv_on_nodes: bool = False
    device_budget: str | None = None
    processes: bool = False
    sample_s: float = 1.0


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the soak out and return its report."""
    with workspace("soak", directory) as work:
        root = _write_models(work)
        return {
            "machine": machine(root),
            "versions": versions("torch", "transformers"),
            "settings": asdict(settings),
            **anyio.run(_soak, root, settings),
        }


async def _soak(root: Path, settings: Settings) -> dict[str, Any]:
    random = Random(settings.seed)
    requests = await _make_requests(root, random, settings.distinct_requests)
    make_store = NodeKVStore if settings.kv_on_nodes else HostKVStore
    kv_store = None if settings.kv_store is None else make_store(settings.kv_store)
    budget = None if settings.device_budget is None else DeviceBudget(settings.device_budget)
    setup = _make_setup(
        root, random, settings.engines, requests, kv_store, budget, processes=settings.processes
    )
    async with sampling_usage(settings.sample_s) as samples:
        report = await soak(setup, settings.scenario, settings.seed)
    allowed = ALLOWED
    if settings.processes:  # links come and go with processes, so that their number is never the same
        allowed = {**ALLOWED, "descriptors": Allowance(0.5, 4)}
    resources = {name: describe(samples[name], allowance) for name, allowance in allowed.items()}
    return {**report, "resources": resources}


def _write_models(directory: Path) -> Path:
    """Write a store of small random models whose greedy text is not a fixed point."""
    import torch
    import transformers

    from hotswap.backends.stores.convert import convert

    shape: dict[str, Any] = {
        "vocab_size": _VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    configs = (
        transformers.LlamaConfig(**shape),
        transformers.Qwen3Config(**shape, head_dim=32),
        transformers.MistralConfig(**shape, sliding_window=24),
    )
    models: Any = transformers.AutoModelForCausalLM
    for seed, (name, config) in enumerate(zip(_MODELS, configs, strict=True)):
        torch.manual_seed(seed)
        model = models.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(8.0)
        model.save_pretrained(directory / name)
        convert(directory / name, directory / "store", model_id=name)
    return directory / "store"


async def _make_requests(root: Path, random: Random, count: int) -> list[CheckedRequest]:
    """Return requests with the tokens that an undisturbed engine generates for each."""
    made: list[CheckedRequest] = []

    async def generate(engine: TorchEngine, asked: CheckedRequest, number: int) -> None:
        request = Request(
            id=RequestId(f"{number}"),
            model=ModelId(asked.model),
            prompt=asked.prompt,
            sampling=asked.sampling,
        )
        async with engine.stream(request) as tokens:
            made.append(replace(asked, expected=tuple([token.id async for token in tokens])))

    async with NvmeStore(root) as store, make_engine("undisturbed", SkeletonCache()) as engine:
        for name in _MODELS:
            await engine.load(ModelCard.of(Model(name), await store.manifest(ModelId(name))), store)
            async with anyio.create_task_group() as tasks:
                for number in range(count // len(_MODELS)):
                    tasks.start_soon(generate, engine, _make_request(name, random, number), number)
            await engine.unload()
    return made


def _make_request(model: str, random: Random, seed: int) -> CheckedRequest:
    sampling = random.choice([_GREEDY, _SAMPLED])
    return CheckedRequest(
        model=model,
        prompt=tuple(random.randrange(2, _VOCABULARY) for _ in range(random.choice([1, 7, 31, 32, 60, 130]))),
        sampling=replace(sampling, max_tokens=random.randrange(20, 120), seed=seed),
    )


def _make_setup(
    root: Path,
    random: Random,
    num_engines: int,
    requests: Sequence[CheckedRequest],
    kv_store: HostKVStore | NodeKVStore | None,
    budget: DeviceBudget | None,
    *,
    processes: bool,
) -> Setup:
    """A fleet whose host tier has room for two of the three models; one of them keeps two replicas."""
    numbers, skeletons = itertools.count(), SkeletonCache()

    def make() -> Chaotic:
        name = f"e{next(numbers)}"
        if processes:
            return KilledEngine(name, random)
        return make_chaotic_engine(name, random, skeletons, budget)

    largest_bytes = max(file.stat().st_size for file in root.rglob("*"))
    tiers = TieredStore(PinnedStore(5 * largest_bytes // 2), NvmeStore(root))
    store = chaotic_store(tiers, Random(random.getrandbits(64)), _STORE_FAULTS)
    engines = Engines(make, num_engines)
    scheduler: Scheduler = WeightedLoadSwap(t1=2, t2=50, b=1.5, patience_s=0.3, sigmas=0)
    fleet = Fleet(
        engines=engines.present,
        store=store,
        models=[Model(name, min_replicas=2 if name == "llama" else 0) for name in _MODELS],
        router=LeastLoadedRouter(),
        scheduler=scheduler if budget is None else ElasticMemory(scheduler),
        interval_s=0.1,
        max_load_attempts=1_000_000,  # no client shall receive an error because of the store's faults
        migration_limits=MigrationLimits(per_instance=2),
        kv_store=kv_store,
        kv_write_through_s=None if kv_store is None else 0.5,
    )
    return Setup(
        fleet=fleet,
        engines=engines,
        store=store,
        requests=requests,
        num_lent=lambda: tiers.num_lent,
        budget=budget,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak, print tables, write the report; 1 if a stream was wrong or a resource was kept or grows."""
    parser = parser_of("soak", __doc__, full="five minutes")
    default = Settings()
    parser.add_argument("--minutes", type=float, help="with faults; 1 by default, 5 with --full")
    parser.add_argument("--clients", type=int, default=default.scenario.clients.size, help="at once")
    parser.add_argument("--seed", type=int, default=default.seed, help="of everything that is random")
    parser.add_argument("--kv-store", metavar="SIZE", help="keep KV blocks across swaps, in so much memory")
    parser.add_argument(
        "--kv-on-nodes", action="store_true", help="in so much memory of each engine's process"
    )
    parser.add_argument("--device-budget", metavar="SIZE", help="memory that the engines share, and lend")
    parser.add_argument("--processes", action="store_true", help="each engine in a process, which is killed")
    options = parser.parse_args(arguments)
    if options.processes and options.device_budget:
        parser.error("engines in processes share no --device-budget here")
    if options.kv_on_nodes and not (options.processes and options.kv_store):
        parser.error("--kv-on-nodes takes --processes and --kv-store")
    # oneDNN keeps what it compiled for the last 1,024 shapes, hundreds of megabytes: no warm-up fills that.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    minutes = options.minutes or (5.0 if options.full else 1.0)
    clients = replace(default.scenario.clients, size=options.clients)
    resize_every_s = default.scenario.rates.resize_every_s if options.device_budget is None else 0.5
    rates = replace(default.scenario.rates, resize_every_s=resize_every_s)
    scenario = replace(default.scenario, clients=clients, rates=rates, seconds=60 * minutes)
    report = measure(
        replace(
            default,
            scenario=scenario,
            seed=options.seed,
            kv_store=options.kv_store,
            kv_on_nodes=options.kv_on_nodes,
            device_budget=options.device_budget,
            processes=options.processes,
        )
    )
    _print(report)
    save(report, options.json)
    flat = all(figure["flat"] for figure in report["resources"].values())
    return int(not flat or any(report[finding] for finding in FINDINGS))


def _print(report: dict[str, Any]) -> None:
    phases = ("quiet", "disturbed")
    pauses = [[phase, *(f"{1e3 * s:.1f}" for s in report[phase]["pause_s"].values())] for phase in phases]
    show("between two tokens of a client, in ms", ("", "p50", "p99", "p99.9", "max"), pauses)
    for what in ("faults", "moves", "swaps", "drains"):
        show(what, ("", "times"), [[kind, f"{count:,}"] for kind, count in report[what].items()])
    ends = [
        [phase, ", ".join(f"{n:,} {end}" for end, n in report[phase]["requests"].items())] for phase in phases
    ]
    show("requests", ("", "ended"), ends)
    rows = [
        [name, f"{figure['early']:,.0f}", f"{figure['late']:,.0f}", f"{figure['limit']:,.0f}"]
        for name, figure in report["resources"].items()
    ]
    show("what the process takes", ("", "early", "late", "at most"), rows)
    for finding in FINDINGS:
        print(f"{finding}: {report[finding] or 'none'}")


if __name__ == "__main__":
    sys.exit(main())
