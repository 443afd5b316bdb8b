"""What Llumnix's figures came out as: tables by metric, and the claims that are of many points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from benchmarks.llumnix_paper import TOLERANCES, Key, geometric_mean, verdict
from benchmarks.measure import Summary
from benchmarks.table import show

__all__ = ["Series", "claims", "report", "series_of"]

# The figures of every seed, by point and metric.
Series = Mapping[Key, Mapping[str, Sequence[float]]]
Paper = Mapping[Key, Mapping[str, float]]

_GAIN_ROWS = ("M-M", "L-L")


def series_of(runs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Series:
    """Return the figures of runs, kept by name, as series over their seeds."""
    found: dict[Key, dict[str, list[float]]] = {}
    for name, rows in runs.items():
        figure, _, at, system, _ = name.split("/")
        for row, figures in rows.items():
            series = found.setdefault(Key(figure, row, system, float(at)), {})
            for metric, value in figures.items():
                series.setdefault(metric, []).append(value)
    return found


def report(runs: Mapping[str, Mapping[str, Mapping[str, float]]], paper: Paper) -> None:
    """Print everything."""
    series = series_of(runs)
    for figure in sorted({key.figure for key in series}):
        of_it = {key: series[key] for key in sorted(series, key=_order) if key.figure == figure}
        for metric in TOLERANCES:
            _show_metric(figure, metric, of_it, paper)
        _show_rows(figure, of_it, paper)
        for line in claims(figure, of_it, paper):
            print(line)
        own = series_of({name: rows for name, rows in runs.items() if name.endswith("/0")})
        of_own = {key: own[key] for key in sorted(own, key=_order) if key.figure == figure}
        for line in claims(figure, of_own, paper):
            print(f"with the artifact's arrivals alone, {line}")


def claims(figure: str, series: Series, paper: Paper) -> Iterator[str]:
    """Yield what is claimed of all points of a figure together."""
    judged = [
        verdict(metric, median(values), paper[key][metric]) == "within"
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
    if figure in ("14", "15"):
        yield from _less(figure, "avg_instances", series, paper)
        yield from _less(figure, "prefill_p99_s", series, paper)


def _orderings(series: Series) -> Iterator[str]:
    """Whose prefills end later, at points where both systems were played."""
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
    """Medians of two systems at the points that both were played at."""
    for key, figures in series.items():
        beside = series.get(Key(key.figure, key.row, other, key.at))
        if key.system == one and beside is not None and metric in figures:
            yield key, median(figures[metric]), median(beside[metric])


def _show_metric(figure: str, metric: str, series: Series, paper: Paper) -> None:
    rows: list[list[str]] = []
    for key, figures in series.items():
        if metric not in figures or (metric == "avg_instances" and figure not in ("14", "15")):
            continue
        theirs = paper.get(key, {}).get(metric)
        judged = "-" if theirs is None else verdict(metric, median(figures[metric]), theirs)
        row = [f"{key.row} {key.at:g}, {key.system}", Summary.of(figures[metric]).format(3)]
        rows.append([*row, "-" if theirs is None else f"{theirs:.3f}", judged, str(len(figures[metric]))])
    if rows:
        show(f"figure {figure}, {metric}", ["", "ours", "the paper's", "judged", "seeds"], rows)


def _show_rows(figure: str, series: Series, paper: Paper) -> None:
    """The geometric mean of ratios to the paper over the points of a row."""
    table: list[list[str]] = []
    for row, system in dict.fromkeys((key.row, key.system) for key in series):
        cells: list[str] = []
        for metric, tolerance in TOLERANCES.items():
            ratios = [
                median(figures[metric]) / paper[key][metric]
                for key, figures in series.items()
                if (key.row, key.system) == (row, system) and paper.get(key, {}).get(metric)
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
