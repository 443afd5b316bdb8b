"""Pictures of outcomes for a report; needs matplotlib (the `plots` extra)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hotswap.errors import ConfigError
from hotswap.simulation.outcome import Outcome, Sample

__all__ = ["draw"]

# Attributes of a served request, and what their axes are called.
_LATENCIES = (
    ("ttft_s", "time to first token, s"),
    ("tpot_s", "time per token after it, s"),
    ("seconds", "whole request, s"),
)
# Colours of models go round.
_COLOURS = 20


def draw(outcomes: Sequence[Outcome], directory: Path | str, *, suffix: str = "png") -> list[Path]:
    """Draw latencies of all outcomes beside each other, and for each one what its instances held when.

    Writes `latency.png`, and `residency-<n>.png` and `memory-<n>.png` for the n-th outcome; returns where.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    figures = {"latency": _latency(outcomes)}
    for number, outcome in enumerate(outcomes, start=1):
        figures[f"residency-{number}"] = _residency(outcome)
        figures[f"memory-{number}"] = _memory(outcome)
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    paths = [place / f"{name}.{suffix}" for name in figures]
    for path, figure in zip(paths, figures.values(), strict=True):
        figure.savefig(path, dpi=130, metadata={"Software": None} if suffix == "png" else None)
    return paths


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("Plots need matplotlib; install hotswap[plots].") from exc
    return Figure(figsize=(width, height), layout="constrained")


def _latency(outcomes: Sequence[Outcome]) -> Any:
    figure = _figure(13, 4)
    figure.suptitle("Share of requests that take no longer")
    panels = figure.subplots(1, len(_LATENCIES))
    for axes, (name, label) in zip(panels, _LATENCIES, strict=True):
        for outcome in outcomes:
            taken_s: list[float] = [getattr(served, name) for served in outcome.requests if not served.error]
            values = sorted(filter(None, taken_s))
            shares = [(number + 1) / len(values) for number in range(len(values))]
            axes.plot(values, shares, drawstyle="steps-post", label=outcome.name)
        axes.set(xlabel=label, ylim=(0, 1), xscale="log")
        axes.grid(alpha=0.3)
    panels[-1].legend(fontsize="small", loc="lower right")
    return figure


def _residency(outcome: Outcome) -> Any:
    instances = _in_order(sample.instance for sample in outcome.samples)
    figure = _figure(11, max(3.0, 1.6 + 0.32 * len(instances)))
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    models = _in_order(sample.model for sample in outcome.samples if sample.model)
    palette = colormaps["tab20"]
    colours = {model: palette(number % _COLOURS) for number, model in enumerate(models)}
    axes = figure.subplots()
    rows = {instance: row for row, instance in enumerate(instances)}
    for instance, row in rows.items():
        for model, start_s, end_s in _stays([s for s in outcome.samples if s.instance == instance]):
            if model:
                axes.broken_barh([(start_s, end_s - start_s)], (row - 0.4, 0.8), facecolor=colours[model])
    done = [swap for swap in outcome.swaps if swap.instance in rows]
    axes.plot([s.started_s for s in done], [rows[s.instance] for s in done], "|", color="black", markersize=8)
    axes.set(
        yticks=range(len(instances)),
        yticklabels=instances,
        xlabel="s",
        title=f"{outcome.name}: models by instance",
    )
    axes.invert_yaxis()
    if len(models) <= _COLOURS:
        handles = [Patch(color=colours[model], label=model) for model in models]
        figure.legend(
            handles=handles, loc="outside right upper", fontsize="small", title="model (| swap begins)"
        )
    return figure


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once, `e2` before `e10`."""
    return sorted(set(names), key=lambda name: (len(name), name))


def _stays(samples: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """Which model an instance held from when to when."""
    stays: list[tuple[str, float, float]] = []
    for sample, after in itertools.pairwise(samples):
        if stays and stays[-1][0] == sample.model:
            stays[-1] = (sample.model, stays[-1][1], after.at_s)
        else:
            stays.append((sample.model, sample.at_s, after.at_s))
    return stays


def _memory(outcome: Outcome) -> Any:
    figure = _figure(11, 3.5)
    groups = itertools.groupby(outcome.samples, key=lambda sample: sample.at_s)
    by_time = {at_s: list(group) for at_s, group in groups}
    used = [fmean(sample.kv_used for sample in group) for group in by_time.values()]
    weights_gb = [sum(sample.memory_bytes for sample in group) / 1e9 for group in by_time.values()]
    left = figure.subplots()
    left.plot([*by_time], used, label="KV blocks used")
    left.set(ylim=(0, 1), xlabel="s", ylabel="share of KV blocks", title=f"{outcome.name}: memory")
    right = left.twinx()
    right.plot([*by_time], weights_gb, "C1", label="weights, GB")
    right.set(ylabel="GB of weights on devices")
    right.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure
