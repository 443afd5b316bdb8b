"""A simulated engine beside the real one that it was fitted to: both serve the same short trace.

    python -m benchmarks fit                       a miniature Llama on the CPU
    python -m benchmarks fit --json fit.json
    python -m benchmarks fit --hidden 512 --layers 8 --rate 3     a larger one, whose steps take longer
    python -m benchmarks fit --processor           in processor time, on a machine that others use
    python -m benchmarks fit --full                all three; the two by the clock for a minute, five times

The torch engine first serves other requests for as long, so that it has met steps of most sizes: those that
are new to it take longer, which the latency model does not include. In every round it is then measured
through its interface, the latency model is fitted to that, and the same requests come to both engines at the
same moments: to the real one by the clock, to the simulated one in virtual time. Mean TTFT and TPOT of both
are compared within the round, in which a slow minute hits both. It needs a quiet machine all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, machine, ratios, versions, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap import Model, ModelId
from hotswap.abc import Engine, ModelCard, WeightStore
from hotswap.backends.sim import SimEngine, SimStore, sim_manifest
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.offline.virtual_time import run
from hotswap.offline.workloads import Arrival, log_normal_lengths, play, workload
from hotswap.profiling import Fit, Profile, Shapes, fit_profile, measure_engine

__all__ = ["Settings", "main", "measure"]

# How far mean TTFT and TPOT of the simulated engine may be from those of the real one.
LIMIT = 0.10
_MODEL = "m"
# Seeds of the requests that are played in every round, and of those that come before.
_PLAYED, _WARMED = 1, 2
# In so many seconds an idle engine has packed the weights of so small a model.
_PACKING_S = 3.0
_ENGINES = ("real", "simulated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        hidden: Width of the model.
        layers: Depth of the model.
        token_budget: Tokens of a step.
        max_requests: Requests that run at once.
        rate_per_s: Requests a second.
        seconds: How long they come.
        rounds: How often all of it is done.
        threads: CPU threads of a step.
        shapes: Which steps are measured.
        processor: Whether the torch engine is timed by the processor, not by the clock; see `processor_time`.
    """

    hidden: int = 256
    layers: int = 4
    token_budget: int = 256
    max_requests: int = 32
    rate_per_s: float = 8.0
    seconds: float = 20.0
    rounds: int = 3
    threads: int = 1
    shapes: Shapes = field(default_factory=lambda: Shapes(contexts=(32, 128, 384)))
    processor: bool = False

    @property
    def name(self) -> str:
        """Of the run in the report."""
        return f"{self.hidden}x{self.layers} by {'processor' if self.processor else 'clock'}"


FULL = (
    Settings(processor=True),
    Settings(seconds=60.0, rounds=5),
    Settings(hidden=512, layers=8, rate_per_s=3.0, seconds=60.0, rounds=5),
)


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Measure, fit and compare, and return the figures of every round, times in seconds."""
    with workspace("fit", directory) as work:
        write_llama(work, hidden=settings.hidden, layers=settings.layers)
        root = work / "store"
        rounds = _by_processor(settings, root) if settings.processor else anyio.run(_real, settings, root)
    fits = [fit for fit, _, _ in rounds]
    real = {"ttft_s": [ttft_s for _, ttft_s, _ in rounds], "tpot_s": [tpot_s for _, _, tpot_s in rounds]}
    played = [run(_simulated, settings, fit.profile) for fit in fits]
    simulated = {"ttft_s": [ttft_s for ttft_s, _ in played], "tpot_s": [tpot_s for _, tpot_s in played]}
    return {
        "settings": asdict(settings),
        "num_requests": len(_arrivals(settings, _PLAYED)),
        "num_steps": fits[0].num_steps,
        "mean_error": [fit.mean_error for fit in fits],
        "max_error": [fit.max_error for fit in fits],
        "real": real,
        "simulated": simulated,
        "over_real": {name: ratios(simulated[name], real[name]) for name in real},
    }


def _arrivals(settings: Settings, seed: int) -> list[Arrival]:
    return workload(
        seed,
        models={_MODEL: 1.0},
        rate_per_s=settings.rate_per_s,
        seconds=settings.seconds,
        prompt_tokens=log_normal_lengths(64, sigma=0.7, most=400),
        output_tokens=log_normal_lengths(32, sigma=0.5, most=128),
        vocabulary=2000,
    )


async def _real(settings: Settings, root: Path) -> list[tuple[Fit, float, float]]:
    """Measure and fit the torch engine, then play the trace to it, round by round."""
    engine, store = _torch_engine(settings), TieredStore(PinnedStore("1 GiB"), NvmeStore(root))
    async with store, engine:
        card = ModelCard.of(Model(_MODEL), await store.manifest(ModelId(_MODEL)))
        return await _rounds(engine, card, store, settings)


def _by_processor(settings: Settings, root: Path) -> list[tuple[Fit, float, float]]:
    """The same in virtual time, in which a step takes as long as the processor works on it."""
    import torch

    from benchmarks.processor_time import ProcessorTimeEngine

    async def in_virtual_time() -> list[tuple[Fit, float, float]]:
        manifest = sim_manifest(_MODEL, card.weight_bytes, kv_bytes_per_token=card.kv_bytes_per_token)
        async with SimStore([manifest]) as sim_store, ProcessorTimeEngine(engine) as measured:
            return await _rounds(measured, card, sim_store, settings)

    engine, store = _torch_engine(settings), TieredStore(PinnedStore("1 GiB"), NvmeStore(root))
    torch.set_num_threads(settings.threads)
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(store),
        portal.wrap_async_context_manager(engine),
    ):
        card = ModelCard.of(Model(_MODEL), portal.call(store.manifest, ModelId(_MODEL)))
        portal.call(engine.load, card, store)
        portal.call(anyio.sleep, _PACKING_S)
        rounds = run(in_virtual_time)
        portal.call(engine.unload)
    return rounds


def _torch_engine(settings: Settings) -> TorchEngine:
    return TorchEngine(
        "torch",
        token_budget=settings.token_budget,
        max_requests=settings.max_requests,
        threads=settings.threads,
        prefix_reuse=False,  # the trace is played more than once
    )


async def _rounds(
    engine: Engine, card: ModelCard, store: WeightStore, settings: Settings
) -> list[tuple[Fit, float, float]]:
    shapes = replace(settings.shapes, token_budget=settings.token_budget)
    rounds: list[tuple[Fit, float, float]] = []
    await _played(engine, card, store, settings, seed=_WARMED)
    for number in range(settings.rounds):
        fit = fit_profile(await measure_engine(engine, card, store, replace(shapes, seed=number)))
        rounds.append((fit, *await _played(engine, card, store, settings)))
    return rounds


async def _simulated(settings: Settings, profile: Profile) -> tuple[float, float]:
    """Play the trace to a simulated engine of the profile, in virtual time."""
    manifest = sim_manifest(
        _MODEL,
        profile.weight_bytes,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        max_context_tokens=2048,
    )
    engine = SimEngine(
        "simulated",
        profile.device,
        kv_blocks=profile.kv_blocks,
        token_budget=settings.token_budget,
        max_requests=settings.max_requests,
    )
    store = SimStore([manifest])
    async with store, engine:
        return await _played(engine, ModelCard.of(Model(_MODEL), manifest), store, settings)


async def _played(
    engine: Engine, card: ModelCard, store: WeightStore, settings: Settings, seed: int = _PLAYED
) -> tuple[float, float]:
    """Mean TTFT and TPOT of the trace on an engine that is EMPTY before and afterwards."""
    ttft_s: list[float] = []
    tpot_s: list[float] = []

    async def serve(arrival: Arrival) -> None:
        asked_s, times = anyio.current_time(), list[float]()
        async with engine.stream(arrival.request(f"r{arrival.arrive_s}")) as stream:
            async for _ in stream:
                times.append(anyio.current_time())
        ttft_s.append(times[0] - asked_s)
        if len(times) > 1:
            tpot_s.append((times[-1] - times[0]) / (len(times) - 1))

    await engine.load(card, store)
    try:
        await play(_arrivals(settings, seed), serve)
    finally:
        with anyio.CancelScope(shield=True):
            await engine.unload()
    return fmean(ttft_s), fmean(tpot_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table for each run, write the report; 1 if a mean is further off than the limit."""
    parser = parser_of(
        "fit", __doc__, full="two models by the clock for a minute, five times; one by processor"
    )
    parser.add_argument("--rate", type=float, default=Settings().rate_per_s, help="requests a second")
    parser.add_argument("--hidden", type=int, default=Settings().hidden, help="width of the model")
    parser.add_argument("--layers", type=int, default=Settings().layers, help="depth of the model")
    parser.add_argument("--processor", action="store_true", help="in processor time, not by the clock")
    options = parser.parse_args(arguments)
    one = Settings(
        hidden=options.hidden,
        layers=options.layers,
        rate_per_s=options.rate,
        processor=options.processor,
    )
    runs = {settings.name: measure(settings) for settings in (FULL if options.full else (one,))}
    for name, found in runs.items():
        _show(name, found)
    place, of = machine(Path.cwd()), versions("torch", "transformers")
    save({"machine": place, "versions": of, "limit": LIMIT, "runs": runs}, options.json)
    over = [median(series) for found in runs.values() for series in found["over_real"].values()]
    return 0 if all(abs(ratio - 1) <= LIMIT for ratio in over) else 1


def _show(name: str, found: dict[str, Any]) -> None:
    rows = [
        [
            what.removesuffix("_s").upper(),
            *(
                Summary.of([1e3 * seconds for seconds in found[engine][what]]).format(2)
                for engine in _ENGINES
            ),
            Summary.of(found["over_real"][what]).format(2),
        ]
        for what in ("ttft_s", "tpot_s")
    ]
    title = f"{name}: means over {found['num_requests']} requests, in ms"
    show(title, ["", "torch engine", "simulated engine", "simulated over real"], rows)
    print(
        f"On kinds of steps that they have not seen, of {found['num_steps']}, fits are "
        f"{median(found['mean_error']):.1%} off in the mean, {max(found['max_error']):.1%} at most."
    )


if __name__ == "__main__":
    sys.exit(main())
