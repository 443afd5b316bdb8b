"""Aegaeon's KV blocks: turns with those of each turn kept in host memory, beside computing them again.

    python -m benchmarks aegaeon_kv                      one seed
    python -m benchmarks aegaeon_kv --full --json FILE   five seeds

Two engines (H100, models of 8B parameters), six models an engine, with prompts of 6,000 tokens in the median
and answers four times as long as ShareGPT's, in simulation. Each model is asked for 0.06 times a second,
where some seeds leave nothing to gain, and 0.07 times. A request whose turn is over is evicted. Its KV blocks
are computed again in its next turn, or saved and restored at 25 or at 50 GB/s, one request after another on
each engine. On time is what `aegaeon` says.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.aegaeon import ENGINES, PREFILL_TOKEN_S, QMAX_S, TURNS, play
from benchmarks.command import parser_of, save
from benchmarks.measure import Summary, columns, machine
from benchmarks.table import show
from hotswap.offline.workloads import log_normal_lengths
from hotswap.simulation import Trace, generate

__all__ = ["SYSTEMS", "main", "trace_of"]

MODELS, RATES_PER_S, PROMPT_TOKENS, LONGER = 6, (0.06, 0.07), 6000, 4.0
WARM_UP_S, SECONDS = 20.0, 60.0
# By how fast KV blocks are copied; 0 computes them again.
SYSTEMS = {"computed again": 0.0, "kept at 25 GB/s": 25e9, "kept at 50 GB/s": 50e9}
FIGURES = ("tokens_on_time", "first_tokens_on_time", "num_swaps")


def trace_of(seed: int, rate_per_s: float, seconds: float = WARM_UP_S + SECONDS) -> Trace:
    """Return the requests, so many a second for each model."""
    models = {f"m{number:02}": 1.0 for number in range(MODELS * ENGINES)}
    return generate(
        seed,
        models=models,
        rate_per_s=rate_per_s * len(models),
        seconds=seconds,
        prompt_tokens=log_normal_lengths(PROMPT_TOKENS, sigma=0.6, most=4 * PROMPT_TOKENS),
        output_tokens=log_normal_lengths(141 * LONGER, sigma=1.01, most=round(1024 * LONGER)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, print a table, write the report."""
    logging.getLogger("hotswap").setLevel(logging.ERROR)  # models wait for their turns
    options = parser_of("aegaeon_kv", __doc__, full="five seeds").parse_args(arguments)
    seeds = (1, 2, 3, 4, 5) if options.full else (1,)
    rates = [_play(rate_per_s, seeds) for rate_per_s in RATES_PER_S]
    report = {
        "machine": machine(Path.cwd()),
        "seeds": list(seeds),
        "models_per_engine": MODELS,
        "prompt_tokens": PROMPT_TOKENS,
        "answers": LONGER,
        "qmax_s": QMAX_S,
        "prefill_token_s": PREFILL_TOKEN_S,
        "rates": rates,
    }
    save(report, options.json)
    return 0


def _play(rate_per_s: float, seeds: Sequence[int]) -> dict[str, object]:
    """Play the requests of all seeds by all systems, print a table, and return what the report says."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SYSTEMS}
    for seed in seeds:
        trace = trace_of(seed, rate_per_s)
        for name, kv_bytes_per_s in SYSTEMS.items():
            tally = play(trace, TURNS, warm_up_s=WARM_UP_S, kv_bytes_per_s=kv_bytes_per_s)
            found[name].append(tally.figures())
            print(f"{rate_per_s:g} a second, {name}, seed {seed}: {tally}", file=sys.stderr)
    systems = {name: columns(figures) for name, figures in found.items()}
    rows = [
        [name, *(Summary.of(figures[figure]).format(3) for figure in FIGURES)]
        for name, figures in systems.items()
    ]
    title = f"{rate_per_s:g} requests a second of each model: shares on time, and swaps"
    show(title, ["KV blocks", "tokens", "first tokens", "swaps"], rows)
    return {"rate_per_s": rate_per_s, "systems": systems}


if __name__ == "__main__":
    sys.exit(main())
