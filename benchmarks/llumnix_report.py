"""Simulated values of Llumnix's figures: the report, tables by metric, and claims over many points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from benchmarks.llumnix_paper import TOLERANCES, Key, geometric_mean, verdict
from benchmarks.measure import Summary
from benchmarks.table import show

__all__ = ["Series", "Values", "claims", "from_json", "series_of", "show_series", "to_json"]

# Values over the seeds, by point and metric.
Series = Mapping[Key, Mapping[str, "Values"]]
Paper = Mapping[Key, Mapping[str, float]]

_GAIN_ROWS = ("M-M", "L-L")
# Figures in which the number of instances scales.
SCALING = ("14", "15")


@dataclass(frozen=True, slots=True)
class Values:
    """A metric at a point, over seeds; `first` is seed 0, which has the arrivals of the artifact."""

    median: float
    least: float
    most: float
    first: float


def series_of(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Series:
    """Return the judged metrics of runs, kept by name, over their seeds; seed 0 comes first.

    The number of instances, the last of `TOLERANCES`, is a result where they scale alone.
    """
    found: dict[Key, dict[str, list[float]]] = {}
    for name, rows in runs.items():
        figure, _, at, system, _ = name.split("/")
        for row, figures in rows.items():
            series = found.setdefault(Key(figure, row, system, float(at)), {})
            for metric, value in figures.items():
                if metric in TOLERANCES and (metric != "avg_instances" or figure in SCALING):
                    series.setdefault(metric, []).append(value)
    return {key: {metric: _values(each) for metric, each in of.items()} for key, of in found.items()}


def _values(figures: Sequence[float]) -> Values:
    summary = Summary.of(figures)
    return Values(summary.median, summary.least, summary.most, figures[0])


def to_json(series: Series) -> dict[str, dict[str, Any]]:
    """Return series as the report has them: for each point lists in the order of `TOLERANCES`."""
    return {
        f"{key.figure}/{key.row}/{key.at:g}/{key.system}": {
            name: [getattr(of_it[metric], name) for metric in TOLERANCES if metric in of_it]
            for name in Values.__slots__
        }
        for key, of_it in sorted(series.items(), key=lambda item: _order(item[0]))
    }


def from_json(points: Mapping[str, Mapping[str, Any]]) -> Series:
    """Return the series of a report."""
    found: dict[Key, dict[str, Values]] = {}
    for name, point in points.items():
        figure, row, at, system = name.split("/")
        lists = [point[name] for name in Values.__slots__]
        each = zip(*lists, strict=True)
        values = {metric: Values(*of_it) for metric, of_it in zip(TOLERANCES, each, strict=False)}
        found[Key(figure, row, system, float(at))] = values
    return found


def show_series(series: Series, paper: Paper) -> None:
    """Print everything."""
    for figure in sorted({key.figure for key in series}):
        of_it = {key: series[key] for key in sorted(series, key=_order) if key.figure == figure}
        for metric in TOLERANCES:
            _show_metric(figure, metric, of_it, paper)
        _show_rows(figure, of_it, paper)
        for line in claims(figure, of_it, paper):
            print(line)
        own = {
            key: {metric: replace(values, median=values.first) for metric, values in metrics.items()}
            for key, metrics in of_it.items()
        }
        for line in claims(figure, own, paper):
            print(f"with the artifact's arrivals alone, {line}")


def claims(figure: str, series: Series, paper: Paper) -> Iterator[str]:
    """Yield the claims over all points of a figure."""
    judged = [
        verdict(metric, values.median, paper[key][metric]) == "within"
        for key, of_it in series.items()
        for metric, values in of_it.items()
        if metric in paper.get(key, {})
    ]
    if judged:
        yield f"figure {figure}: {sum(judged)} of {len(judged)} medians within their tolerance"
    if figure == "11":
        yield from _orderings(series)
        yield from _gain(series, paper)
        yield from _less(figure, "preemption_loss_s", series, paper)
    if figure == "13":
        yield from _priorities(series, paper)
    if figure in SCALING:
        yield from _less(figure, "avg_instances", series, paper)
        yield from _less(figure, "prefill_p99_s", series, paper)


def _orderings(series: Series) -> Iterator[str]:
    """At how many points the prefills of one system end later than those of another."""
    for later, sooner in (("Round-Robin", "INFaaS++"), ("INFaaS++", "Llumnix")):
        pairs = list(_pairs("prefill_p99_s", series, later, sooner))
        if pairs:
            right = sum(one > other for _, one, other in pairs)
            yield f"prefill P99, {later} > {sooner}: at {right} of {len(pairs)} points"


def _gain(series: Series, paper: Paper) -> Iterator[str]:
    gains = {key: one / other for key, one, other in _pairs("prefill_p99_s", series) if key.row in _GAIN_ROWS}
    if gains:
        best = max(gains, key=lambda key: gains[key])
        theirs = max(_known_gains(paper))
        yield (
            f"largest gain of moves in prefill P99 on {' or '.join(_GAIN_ROWS)}: {gains[best]:.1f} times "
            f"({best.row} {best.at:g}); the paper's {theirs:.1f}"
        )


def _known_gains(paper: Paper) -> Iterator[float]:
    for key, figures in paper.items():
        if key.figure == "11" and key.system == "INFaaS++" and key.row in _GAIN_ROWS:
            moved = paper[Key("11", key.row, "Llumnix", key.at)]
            yield figures["prefill_p99_s"] / moved["prefill_p99_s"]


def _priorities(series: Series, paper: Paper) -> Iterator[str]:
    """How many times as long it takes without priorities, by class."""
    for row, metric in (("high", "prefill_p99_s"), ("high", "request_mean_s"), ("normal", "request_mean_s")):
        pairs = [pair for pair in _pairs(metric, series, "Llumnix-base") if pair[0].row == row]
        if pairs:
            ours = [one / other for _, one, other in pairs]
            theirs = [paper[key][metric] / paper[_moved(key)][metric] for key, _, _ in pairs]
            spans = [f"{min(ratios):.2f} to {max(ratios):.2f}" for ratios in (ours, theirs)]
            yield f"{row} priority, {metric}: {spans[0]} times as long without; the paper's {spans[1]}"


def _less(figure: str, metric: str, series: Series, paper: Paper) -> Iterator[str]:
    """By how much less a figure is with moves, on average over the points."""
    pairs = list(_pairs(metric, series))
    if not pairs:
        return
    ours = fmean(1 - other / one for _, one, other in pairs if one)
    known = [(paper.get(key, {}), paper.get(_moved(key), {})) for key, _, _ in pairs]
    theirs = [1 - other[metric] / one[metric] for one, other in known if metric in one and metric in other]
    beside = f"; the paper's {100 * fmean(theirs):.1f} %" if theirs else ""
    yield f"{metric} with moves, figure {figure}: {100 * ours:.1f} % less on average{beside}"


def _moved(key: Key) -> Key:
    return Key(key.figure, key.row, "Llumnix", key.at)


def _pairs(
    metric: str, series: Series, one: str = "INFaaS++", other: str = "Llumnix"
) -> Iterator[tuple[Key, float, float]]:
    """Medians of two systems at the points of both."""
    for key, figures in series.items():
        beside = series.get(Key(key.figure, key.row, other, key.at))
        if key.system == one and beside is not None and metric in figures:
            yield key, figures[metric].median, beside[metric].median


def _show_metric(figure: str, metric: str, series: Series, paper: Paper) -> None:
    rows: list[list[str]] = []
    for key, figures in series.items():
        if metric not in figures:
            continue
        theirs = paper.get(key, {}).get(metric)
        ours = figures[metric]
        judged = "-" if theirs is None else verdict(metric, ours.median, theirs)
        row = [
            f"{key.row} {key.at:g}, {key.system}",
            Summary(ours.median, ours.least, ours.most).format(3),
            f"{ours.first:.3f}",
        ]
        rows.append([*row, "-" if theirs is None else f"{theirs:.3f}", judged])
    if rows:
        show(f"figure {figure}, {metric}", ["", "ours", "seed 0", "the paper's", "judged"], rows)


def _show_rows(figure: str, series: Series, paper: Paper) -> None:
    """The geometric mean of ratios to the paper over the points of a row."""
    table: list[list[str]] = []
    for row, system in dict.fromkeys((key.row, key.system) for key in series):
        cells: list[str] = []
        for metric, tolerance in TOLERANCES.items():
            ratios = [
                figures[metric].median / paper[key][metric]
                for key, figures in series.items()
                if (key.row, key.system) == (row, system)
                and metric in figures
                and paper.get(key, {}).get(metric)
            ]
            mean = geometric_mean(ratios)
            near = 1 / tolerance.row_factor <= mean <= tolerance.row_factor
            cells.append(f"{mean:.2f} {'within' if near else 'not'}" if ratios else "-")
        if any(cell != "-" for cell in cells):
            table.append([f"{row}, {system}", *cells])
    if table:
        show(f"figure {figure}, ours over the paper's", ["", *TOLERANCES], table)


def _order(key: Key) -> tuple[str, str, float, str]:
    return key.figure, key.row, key.at, key.system
