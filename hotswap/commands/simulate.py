"""`hotswap simulate`: every scheduler that is named, on the same trace."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from hotswap.commands.table import table
from hotswap.errors import ConfigError
from hotswap.hardware import parse_bytes
from hotswap.offline.workloads import Lengths, log_normal_lengths, power_law_lengths, zipf_mix
from hotswap.policies.by_name import router_named, scheduler_named
from hotswap.profiling.profiles import Profile
from hotswap.simulation.cluster import Cluster
from hotswap.simulation.outcome import Outcome, Slo
from hotswap.simulation.plots import draw
from hotswap.simulation.run import simulate
from hotswap.simulation.trace import Trace, generate

__all__ = ["DEFAULT", "asked_cluster", "asked_trace", "check_scale", "simulate_all"]

# Schedulers, where none is named.
DEFAULT = ("CostSwap()",)

COLUMNS = (
    "num_requests",
    "num_failed",
    "attainment",
    "ttft_s_p50",
    "ttft_s_p99",
    "tpot_s_mean",
    "latency_s_p99",
)
COUNTS = ("num_swaps", "num_evicted", "num_moved")
_MADE = ("poisson", "gamma")
_MOST_MODELS = 1_000_000
# With more engines, or plans more often, a simulation takes days or all memory.
_MOST_ENGINES = 100_000
_LEAST_INTERVAL_S = 0.001


def simulate_all(
    arguments: argparse.Namespace, progress: Callable[[str], Callable[[int, int], None]]
) -> tuple[dict[str, object], str]:
    """Run every scheduler of the arguments on the same trace; return the report, and a table for people."""
    check_scale(arguments, "engines")
    trace = asked_trace(arguments)
    cluster = replace(
        asked_cluster(arguments),
        num_engines=arguments.engines,
        num_nodes=arguments.nodes,
        losses=tuple(_loss(text) for text in arguments.lose),
    )
    slo = Slo(ttft_s=arguments.ttft, tpot_s=arguments.tpot)
    if arguments.out:
        _make_directory(arguments.out)
    outcomes = [
        simulate(
            trace,
            cluster,
            router=router_named(arguments.router),
            scheduler=scheduler_named(text),
            interval_s=arguments.interval,
            driver=arguments.driver,
            name=text,
            progress=progress(text),
        )
        for text in arguments.scheduler or DEFAULT
    ]
    for number, outcome in enumerate(outcomes if arguments.out else (), start=1):
        (arguments.out / f"outcome-{number}.json").write_text(outcome.as_json(slo) + "\n", encoding="utf-8")
    if arguments.out and arguments.plots:
        draw(outcomes, arguments.out)
    report: dict[str, object] = {
        "trace": {"name": trace.name, "num_requests": len(trace.requests), "models": trace.models},
        "engines": arguments.engines,
        "device": cluster.measured.device.name if arguments.profile else arguments.device,
        "slo": asdict(slo),
        "outcomes": [{"scheduler": o.name, **o.summary(slo)} for o in outcomes],
    }
    heads = ("SCHEDULER", *map(str.upper, (*COLUMNS, *COUNTS)))
    rows = [_row(outcome, slo) for outcome in outcomes]
    return report, f"{table(heads, rows)}\nATTAINMENT: {_in_time_text(slo)}"


def _make_directory(place: Path) -> None:
    """Make the directory for the report, before hours of simulation end without a place for it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{str(place)!r} cannot be made: {exc}; give another --out.") from exc


def _in_time_text(slo: Slo) -> str:
    """Return what the share of requests in time is of."""
    return (
        f"the share of requests with TTFT up to {slo.ttft_s:g} s (--ttft) and TPOT up to {slo.tpot_s:g} s "
        "(--tpot)."
    )


def asked_trace(arguments: argparse.Namespace) -> Trace:
    """Return the trace of the arguments, scaled and cut as they say."""
    trace = trace_of(arguments.trace, arguments.seed)
    if arguments.rate is not None:
        trace = trace.at_rate(arguments.rate)
    return trace if arguments.requests is None else trace.first(arguments.requests)


def check_scale(arguments: argparse.Namespace, engines: str) -> None:
    """Raise an error if the most engines, or how often plans are made, would never end."""
    if (number := getattr(arguments, engines)) > _MOST_ENGINES:
        raise ConfigError(f"--{engines} is {number}; give {_MOST_ENGINES} at most.")
    if not arguments.interval >= _LEAST_INTERVAL_S:
        raise ConfigError(f"--interval is {arguments.interval:g}; give {_LEAST_INTERVAL_S:g} s or more.")


def asked_cluster(arguments: argparse.Namespace) -> Cluster:
    """Return engines as the arguments describe them, but for their number."""
    return Cluster(
        profile=Profile.read(arguments.profile) if arguments.profile else arguments.device,
        host_bytes=None if arguments.host is None else parse_bytes(arguments.host),
        token_budget=arguments.token_budget,
        prefix_reuse=arguments.prefix_reuse,
        min_replicas=arguments.min_replicas,
    )


def trace_of(text: str, seed: int) -> Trace:
    """Return the trace of a file, or one that is made: `poisson:rate=5,seconds=600,models=8`.

    Words of a made one are `rate`, `seconds`, `models` (how many), `zipf` (the exponent of their shares, 0
    for equal ones), `cv` (with `gamma`), and `input` and `output`: a median, or with `law=power` the mean of
    a power law.

    Raises:
        ConfigError: there is no such file, or a word is not known.
    """
    kind, _, rest = text.partition(":")
    if kind not in _MADE:
        return Trace.read(text)
    words: dict[str, str] = {"cv": "1" if kind == "poisson" else "8"}
    for word in filter(None, rest.split(",")):
        key, separator, value = word.partition("=")
        if not separator or key not in _WORDS:
            raise ConfigError(
                f"{word!r} in {text!r} is not understood; there are {', '.join(sorted(_WORDS))}."
            )
        words[key] = value
    try:
        numbers = {key: float(value) for key, value in words.items() if key != "law"}
    except ValueError as exc:
        raise ConfigError(f"{text!r} has a word that is no number: {exc}.") from exc
    num_models = numbers.get("models", 1.0)
    if not (1 <= num_models <= _MOST_MODELS and num_models.is_integer()):
        raise ConfigError(f"models is {num_models:g}; give a whole number from 1 to {_MOST_MODELS:,}.")
    models = [f"m{number}" for number in range(int(num_models))]
    return generate(
        seed,
        models=zipf_mix(models, exponent=numbers.get("zipf", 0.0)),
        rate_per_s=numbers.get("rate", 1.0),
        seconds=numbers.get("seconds", 600.0),
        cv=numbers["cv"],
        prompt_tokens=_lengths(numbers.get("input"), words.get("law", "log-normal")),
        output_tokens=_lengths(numbers.get("output"), words.get("law", "log-normal")),
        name=text,
    )


_WORDS = frozenset({"cv", "input", "law", "models", "output", "rate", "seconds", "zipf"})


def _lengths(tokens: float | None, law: str) -> Lengths | None:
    if law not in ("log-normal", "power"):
        raise ConfigError(f"law is {law!r}; give 'log-normal' or 'power'.")
    if tokens is None:
        return None
    return power_law_lengths(tokens) if law == "power" else log_normal_lengths(tokens)


def _loss(text: str) -> tuple[float, str]:
    engine, _, at_s = text.partition("@")
    try:
        return float(at_s), engine
    except ValueError:
        raise ConfigError(f"{text!r} is no loss; write it like 'e0@30', seconds after the start.") from None


def _row(outcome: Outcome, slo: Slo) -> tuple[str, ...]:
    figures: Mapping[str, float] = outcome.summary(slo)
    cells: Sequence[str] = [f"{figures[column]:.4g}" for column in COLUMNS]
    return (outcome.name, *cells, *(f"{figures[column]:.0f}" for column in COUNTS))
