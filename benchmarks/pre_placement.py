"""Models placed in the memory of more nodes ahead of loads, beside ServerlessLLM's placement alone.

    python -m benchmarks pre_placement             bursts of each model, one size of memory, one seed
    python -m benchmarks pre_placement --full --json FILE --traces FOLDER

The cluster is that of `benchmarks serverlessllm`, four nodes of four A40s and 32 models of 7B parameters,
with room for 4, 9 or 18 of them in the memory of each node. With a folder of traces a third load is Azure's:
part of its conversations, each for a model by Zipf's law. Each seed is played with and without
`PrePlacement`; what is reported is the difference by seed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.command import parser_of, save
from benchmarks.partial import PartialResults
from benchmarks.search import Estimate
from benchmarks.serverlessllm import CLUSTER, MODELS, SECONDS, SYSTEMS, WARM_UP_S, Tokens, figures, trace_of
from benchmarks.table import show
from hotswap.abc import Scheduler
from hotswap.offline.workloads import zipf_mix
from hotswap.policies import LeastLoadedRouter, PrePlacement
from hotswap.simulation import Trace, simulate

__all__ = ["LOADS", "POLICIES", "ROOMS_GB", "main", "measure"]

ALONE, AHEAD = "ServerlessLLM", "with PrePlacement"
POLICIES: Mapping[str, Callable[[], Scheduler]] = {
    ALONE: SYSTEMS["ServerlessLLM"],
    AHEAD: lambda: PrePlacement(SYSTEMS["ServerlessLLM"]()),
    "of one minute": lambda: PrePlacement(SYSTEMS["ServerlessLLM"](), half_life_s=60.0),
}
ROOMS_GB = (64, 128, 256)
FIGURES = ("host_share", "startup_mean_s", "startup_p99_s")
_AZURE, _SHARE = "azure_llm_2023_conv.csv.gz", 0.2


def _azure(folder: Path | None, seed: int) -> Trace:
    """Of 35 minutes of Azure's conversations a fifth, each request for one of 32 models by Zipf's law."""
    if folder is None:
        raise FileNotFoundError("Give the folder of the traces: --traces FOLDER.")
    random, shares = Random(seed), zipf_mix(MODELS)
    whole = Trace.read(folder / _AZURE)
    window = whole.window(random.uniform(0.0, whole.seconds - WARM_UP_S - SECONDS), WARM_UP_S + SECONDS)
    names, weights = list(shares), list(shares.values())
    most = CLUSTER.max_context_tokens - 1
    return Trace(
        tuple(
            replace(request, model=random.choices(names, weights)[0])
            for request in window.requests
            if random.random() < _SHARE and request.prompt_tokens + request.output_tokens <= most
        ),
        "azure",
    )


LOADS: Mapping[str, Callable[[Path | None, int], Trace]] = {
    "bursts of each model, 0.8/s": lambda _, seed: trace_of("GSM8K", 0.8, seed, WARM_UP_S + SECONDS, "each"),
    "joint bursts, 0.8/s": lambda _, seed: trace_of("GSM8K", 0.8, seed, WARM_UP_S + SECONDS, "together"),
    "azure": _azure,
}


def measure(
    loads: Sequence[str],
    rooms_gb: Sequence[int],
    seeds: Sequence[int],
    folder: Path | None,
    partial_: PartialResults,
) -> dict[str, Any]:
    """Play every load with every room in memory; return figures by policy, a value for each seed."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in seeds:  # outermost, so that a few seeds of all are there soon
        for load in loads:
            for room in rooms_gb:
                point = found.setdefault(f"{load}, {room} GB", {policy: [] for policy in POLICIES})
                for policy in POLICIES:
                    key = f"{load}, {room} GB, {policy}, seed {seed}"
                    one = partial_.get(key, partial(_play, load, room, seed, policy, folder))
                    point[policy].append(one)
                    print(f"{key}: {one}", file=sys.stderr, flush=True)
    return {
        name: {"policies": policies, "more_than_alone": _compared(policies)}
        for name, policies in found.items()
    }


def _play(load: str, room_gb: int, seed: int, policy: str, folder: Path | None) -> dict[str, float]:
    outcome = simulate(
        LOADS[load](folder, seed),
        replace(CLUSTER, host_bytes=room_gb * 10**9),
        router=LeastLoadedRouter(),
        scheduler=POLICIES[policy](),
        mover=Tokens(),
        interval_s=0.5,
        driver="events",
    )
    return figures(outcome)


def _compared(policies: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """By how much each policy's figures are more than those of placement alone, seed by seed."""
    return {
        policy: {
            figure: asdict(
                Estimate.of([a[figure] - b[figure] for a, b in zip(series, policies[ALONE], strict=True)])
            )
            for figure in FIGURES
        }
        for policy, series in policies.items()
        if policy != ALONE
    }


def _rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows: list[list[str]] = []
    for policy, series in found["policies"].items():
        means = {figure: sum(one[figure] for one in series) / len(series) for figure in FIGURES}
        more = found["more_than_alone"].get(policy)
        told = [
            f"{means[figure]:.3f}"
            + (f" ({more[figure]['low']:+.3f} to {more[figure]['high']:+.3f})" if more else "")
            for figure in FIGURES
        ]
        rows.append([policy, *told])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write the report."""
    parser = parser_of("pre_placement", __doc__, full="all loads and rooms, five seeds")
    parser.add_argument(
        "--traces", type=Path, help="the folder of the traces; without it Azure's is left out"
    )
    parser.add_argument("--seeds", type=int, help="how many seeds, if not 1 or 5")
    options = parser.parse_args(arguments)
    loads = [load for load in LOADS if load != "azure" or options.traces is not None]
    report = measure(
        loads if options.full else loads[:1],
        ROOMS_GB if options.full else ROOMS_GB[2:],
        range(options.seeds or (5 if options.full else 1)),
        options.traces,
        PartialResults.of(options.json),
    )
    for name, found in report.items():
        show(name, ["", "loads from host", "startup, mean s", "startup, P99 s"], _rows(found))
    save(report, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
