"""Aegaeon's turns on one real engine: seven small models whose long prompts are kept, or computed again.

    python -m benchmarks aegaeon_engine                      one repeat
    python -m benchmarks aegaeon_engine --full --json FILE   three

One `TorchEngine` on a CPU has seven models of one shape, each with one long prompt to answer, by turns of
`ElasticQuota`. A request whose turn is over is evicted, and goes on in the next one of its model: with its KV
blocks computed again, restored from a `HostKVStore`, or found on the engine, which keeps them across swaps of
models of one format. The three have one machine, one after the other.

Targets and times are seconds of the processor, which a busy machine hardly changes; the engine computes all
the time. A step and a prefill are measured first. A first token is on time if it comes within twice the
prefills of all prompts, and each token after it within 1.5 times a step of every model. Prefills in every
turn take more than that.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks.by_hand import ByHand
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, columns, machine, versions, workspace
from benchmarks.models import write_llama
from benchmarks.table import show
from hotswap import Fleet, Model, Sampling
from hotswap.abc import Scheduler
from hotswap.backends.kv_stores import HostKVStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.policies import ElasticQuota, LeastLoadedRouter

__all__ = ["SYSTEMS", "Settings", "main", "measure"]

_VOCABULARY = 2048
# A token is due after so many steps of each model, a first one after so many prefills of each.
_STEPS_DUE = 1.5
_PREFILLS_DUE = 2.0
SYSTEMS = ("computed again", "kept in host memory", "kept on the engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        models: Models.
        prompt: Tokens of each prompt.
        answer: Tokens of each answer.
        hidden: Width of the models.
        layers: Depth of the models.
        turn_steps: The steps of the longest turn (*Qmax*).
        repeats: Runs of each system.
    """

    models: int = 7
    prompt: int = 3072
    answer: int = 256
    hidden: int = 256
    layers: int = 6
    turn_steps: int = 32
    repeats: int = 1


FULL = Settings(repeats=3)


@dataclass(slots=True, eq=False)
class _Answer:
    """When each token of a request came after it was sent, in seconds of the processor."""

    model: str
    came_s: list[float]


def _names(settings: Settings) -> list[str]:
    return [f"m{number}" for number in range(settings.models)]


def _prompt(settings: Settings, name: str) -> tuple[int, ...]:
    random = Random(name)
    return tuple(random.randrange(_VOCABULARY) for _ in range(settings.prompt))


def _fleet(root: Path, settings: Settings, system: str, scheduler: Scheduler) -> Fleet:
    whole = settings.prompt + settings.answer + 64
    # Without the room of one request more, no block of another model stays.
    kept = settings.models if system == "kept on the engine" else 1
    engine = TorchEngine(
        "e0",
        threads=1,
        kv_tokens=kept * whole + 256,
        prefix_reuse=system != "computed again",
        max_requests=8,
        memory_bytes="2 GiB",
        skeletons=SkeletonCache(),
    )
    return Fleet(
        engines=[engine],
        store=TieredStore(PinnedStore("1 GiB"), NvmeStore(root / "store")),
        models=[Model(name) for name in _names(settings)],
        router=LeastLoadedRouter(),
        scheduler=scheduler,
        interval_s=0.02,
        kv_store=HostKVStore("1 GiB") if system == "kept in host memory" else None,
    )


async def _ask(fleet: Fleet, settings: Settings, answer: _Answer) -> None:
    began_s = time.process_time()
    sampling = Sampling(max_tokens=settings.answer, ignore_eos=True)
    async with fleet.stream(answer.model, _prompt(settings, answer.model), sampling) as stream:
        async for _ in stream:
            answer.came_s.append(time.process_time() - began_s)


async def _calibrate(root: Path, settings: Settings) -> tuple[float, float, float]:
    """Return the processor's seconds of a prefill and of a step, and how many times as long a clock takes."""
    async with _fleet(root, settings, "computed again", ByHand()) as fleet:
        for name in _names(settings):  # weights come to host memory, and are packed
            await fleet.swap("e0", to=name)
        answer, began_s = _Answer(_names(settings)[-1], []), anyio.current_time()
        await _ask(fleet, settings, answer)
        slower = (anyio.current_time() - began_s) / answer.came_s[-1]
    steps = len(answer.came_s) - 1
    return answer.came_s[0], (answer.came_s[-1] - answer.came_s[0]) / steps, slower


async def _run(
    root: Path, settings: Settings, system: str, prefill_s: float, step_s: float, slower: float
) -> dict[str, float]:
    tbt_s = _STEPS_DUE * settings.models * step_s
    due_s = _PREFILLS_DUE * settings.models * prefill_s
    scheduler = ElasticQuota(  # which goes by the clock
        tbt_s=tbt_s * slower,
        step_s=step_s * slower,
        max_quota_s=settings.turn_steps * step_s * slower,
        switch_s=0.05 * slower,
        prefill_token_s=prefill_s * slower / settings.prompt,
    )
    answers = [_Answer(name, []) for name in _names(settings)]
    async with _fleet(root, settings, system, scheduler) as fleet:
        began_s, cpu_s = anyio.current_time(), time.process_time()
        async with anyio.create_task_group() as clients:
            for answer in answers:
                clients.start_soon(_ask, fleet, settings, answer)
        seconds, cpu_s = anyio.current_time() - began_s, time.process_time() - cpu_s
        num_swaps = len(fleet.swaps)
    on_time = [
        at_s <= due_s + number * tbt_s for answer in answers for number, at_s in enumerate(answer.came_s)
    ]
    firsts = [answer.came_s[0] <= due_s for answer in answers]
    return {
        "tokens_on_time": sum(on_time) / len(on_time),
        "first_tokens_on_time": sum(firsts) / len(firsts),
        "num_tokens": len(on_time),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "num_swaps": num_swaps,
    }


def measure(settings: Settings, directory: Path = WORK) -> dict[str, Any]:
    """Carry the benchmark out and return its report."""
    report: dict[str, Any] = {"settings": asdict(settings), "versions": versions("torch", "transformers")}
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    measured: list[dict[str, float]] = []
    with workspace("aegaeon_engine", directory) as root:
        report["machine"] = machine(root)
        for seed, name in enumerate(_names(settings)):
            write_llama(
                root,
                hidden=settings.hidden,
                layers=settings.layers,
                name=name,
                seed=seed,
                max_tokens=8192,
                vocabulary=_VOCABULARY,
            )
        for _ in range(settings.repeats):
            prefill_s, step_s, slower = anyio.run(_calibrate, root, settings)
            measured.append({"prefill_s": prefill_s, "step_s": step_s, "slower": slower})
            for system in SYSTEMS:
                found = anyio.run(_run, root, settings, system, prefill_s, step_s, slower)
                runs[system].append(found)
                print(f"{system}: {found}, prefill {prefill_s:.3f} s, step {step_s:.4f} s", file=sys.stderr)
    report["measured"] = columns(measured)
    report["systems"] = {system: columns(found) for system, found in runs.items()}
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report."""
    logging.getLogger("hotswap").setLevel(logging.ERROR)  # models wait for their turns
    options = parser_of("aegaeon_engine", __doc__, full="three repeats").parse_args(arguments)
    report = measure(FULL if options.full else Settings())
    figures = ("tokens_on_time", "first_tokens_on_time", "cpu_s", "num_swaps")
    rows = [
        [system, *(Summary.of(found[figure]).format(2) for figure in figures)]
        for system, found in report["systems"].items()
    ]
    show("seven models by turns", ["KV blocks", "tokens", "first tokens", "CPU s", "swaps"], rows)
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
