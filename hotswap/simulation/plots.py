"""Pictures of outcomes for a report; needs matplotlib (the `plots` extra)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hotswap.errors import ConfigError
from hotswap.simulation.outcome import Outcome, Sample, Served

__all__ = ["draw"]

_LATENCIES: tuple[tuple[str, Callable[[Served], float]], ...] = (
    ("time to first token, s", lambda served: served.ttft_s),
    ("time per token after it, s", lambda served: served.tpot_s),
    ("whole request, s", lambda served: served.seconds),
)
# Colours of models go round.
_COLOURS = 20


def draw(outcomes: Sequence[Outcome], directory: Path | str, *, suffix: str = "png") -> list[Path]:
    """Draw latencies of all outcomes beside each other, and for each one what its instances held when.

    Writes `latency.png`, and `residency-<n>.png` and `memory-<n>.png` for the n-th outcome; returns where.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ConfigError("Plots need matplotlib; install hotswap[plots].") from exc
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    drawn = [
        _save(Figure(figsize=(13, 4), layout="constrained"), _latency, outcomes, place / f"latency.{suffix}")
    ]
    for number, outcome in enumerate(outcomes, start=1):
        height = 1.6 + 0.32 * len({sample.instance for sample in outcome.samples})
        for what, fill in (("residency", _residency), ("memory", _memory)):
            figure = Figure(
                figsize=(11, max(3.0, height if what == "residency" else 3.5)), layout="constrained"
            )
            drawn.append(_save(figure, fill, outcome, place / f"{what}-{number}.{suffix}"))
    return drawn


def _save(figure: Any, fill: Callable[[Any, Any], None], shown: object, path: Path) -> Path:
    fill(figure, shown)
    figure.savefig(path, dpi=130, metadata={"Software": None} if path.suffix == ".png" else None)
    return path


def _latency(figure: Any, outcomes: Sequence[Outcome]) -> None:
    figure.suptitle("Share of requests that take no longer")
    panels = figure.subplots(1, len(_LATENCIES))
    for axes, (label, take) in zip(panels, _LATENCIES, strict=True):
        for outcome in outcomes:
            values = sorted(filter(None, (take(served) for served in outcome.requests if not served.error)))
            shares = [(number + 1) / len(values) for number in range(len(values))]
            axes.plot(values, shares, drawstyle="steps-post", label=outcome.name)
        axes.set(xlabel=label, ylim=(0, 1), xscale="log")
        axes.grid(alpha=0.3)
    panels[-1].legend(fontsize="small", loc="lower right")


def _residency(figure: Any, outcome: Outcome) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    instances = sorted({sample.instance for sample in outcome.samples}, key=lambda name: (len(name), name))
    models = sorted(
        {sample.model for sample in outcome.samples if sample.model}, key=lambda name: (len(name), name)
    )
    palette = colormaps["tab20"]
    colours = {model: palette(number % _COLOURS) for number, model in enumerate(models)}
    axes = figure.subplots()
    for row, instance in enumerate(instances):
        for model, start_s, end_s in _stays([s for s in outcome.samples if s.instance == instance]):
            if model:
                axes.broken_barh([(start_s, end_s - start_s)], (row - 0.4, 0.8), facecolor=colours[model])
    rows = {instance: row for row, instance in enumerate(instances)}
    done = [swap for swap in outcome.swaps if swap.instance in rows]
    axes.plot([s.started_s for s in done], [rows[s.instance] for s in done], "|", color="black", markersize=8)
    axes.set(
        yticks=range(len(instances)),
        yticklabels=instances,
        xlabel="s",
        title=f"{outcome.name}: who held what",
    )
    axes.invert_yaxis()
    if len(models) <= _COLOURS:
        handles = [Patch(color=colours[model], label=model) for model in models]
        figure.legend(
            handles=handles, loc="outside right upper", fontsize="small", title="model (| swap begins)"
        )


def _stays(samples: Sequence[Sample]) -> list[tuple[str, float, float]]:
    """Which model an instance held from when to when."""
    stays: list[tuple[str, float, float]] = []
    for sample, after in itertools.pairwise(samples):
        if stays and stays[-1][0] == sample.model:
            stays[-1] = (sample.model, stays[-1][1], after.at_s)
        else:
            stays.append((sample.model, sample.at_s, after.at_s))
    return stays


def _memory(figure: Any, outcome: Outcome) -> None:
    left = figure.subplots()
    by_time = [
        (at_s, list(group))
        for at_s, group in itertools.groupby(outcome.samples, key=lambda sample: sample.at_s)
    ]
    times = [at_s for at_s, _ in by_time]
    left.plot(
        times, [sum(s.kv_used for s in group) / len(group) for _, group in by_time], label="KV blocks used"
    )
    left.set(ylim=(0, 1), xlabel="s", ylabel="share of KV blocks", title=f"{outcome.name}: memory")
    right = left.twinx()
    right.plot(
        times, [sum(s.memory_bytes for s in group) / 1e9 for _, group in by_time], "C1", label="weights, GB"
    )
    right.set(ylabel="GB of weights on devices")
    right.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
