"""The report of a run, measured while it ran: a text that moved, every swap by phase, one trace."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from examples.demo.play import Loss, Play
from examples.demo.recital import Recital
from examples.demo.screen import color_of, recitations, short
from hotswap.testing import RecordedSpan, SpanRecorder

__all__ = ["print_report"]

AROUND_SEAM: Final = 150  # characters
PHASES: Final = ("preload", "evict", "unload", "load", "first_token")
NOTES: Final = (
    "down: from the old model's last admission until the new one serves. first token: from there until a\n"
    "client asked and got it. GB/s: over preload and load, which for so small a model is all fixed cost."
)


def print_report(console: Console, play: Play, spans: SpanRecorder) -> None:
    """Print the report, and last whether every text was exact."""
    swaps = spans.named("hotswap.swap")
    found = _moved_by_a_swap(play.recitals, spans.of_operation("text_completion"), swaps)
    if found is not None:
        console.rule("a text that moved", align="left", style="dim")
        console.print(_with_seams(found[0]))
    console.rule("every swap, by phase, in milliseconds", align="left", style="dim")
    console.print(_table(swaps))
    console.print(NOTES, style="dim")
    if found is not None:
        console.rule("the trace of the swap that moved the text", align="left", style="dim")
        console.print(_tree(found[1]))
    console.rule(style="dim")
    for line in _verdict(play, swaps):
        console.print(line)


# ---------------------------------------------------------------- a text that moved


def _moved_by_a_swap(
    recitals: Sequence[Recital], requests: Sequence[RecordedSpan], swaps: Sequence[RecordedSpan]
) -> tuple[Recital, RecordedSpan] | None:
    """The first recitation that a swap moved in the middle of its text, and that swap."""
    by_id = {swap.span_id: swap for swap in swaps}
    links = {span.attributes["hotswap.request.id"]: span.links for span in requests}
    for recital in recitals:
        for link in links.get(recital.request or "", ()) if recital.seams else ():
            return recital, by_id[link]
    return None


def _with_seams(recital: Recital) -> Text:
    """The text around its moves, each marked by the instances it went from and to."""
    color, text = color_of(recital.checkpoint.name), recital.text
    start = max(recital.seams[0].at - AROUND_SEAM, 0)
    shown = Text("…" if start else recital.opening, "dim")
    for seam in recital.seams:
        shown.append(text[start : seam.at], color)
        shown.append(f"⟨{seam.source}→{seam.target}⟩", "bold reverse")
        start = seam.at
    end = start + AROUND_SEAM
    return shown.append(text[start:end], color).append("…" if end < len(text) else "", "dim")


# ---------------------------------------------------------------- swaps


def _table(swaps: Sequence[RecordedSpan]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in ("on", "from", "to"):
        table.add_column(column, no_wrap=True)
    for column in ("moved", *(phase.replace("_", " ") for phase in PHASES), "down", "MB", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("tier", no_wrap=True)
    for swap in swaps:
        table.add_row(*_row(swap))
    return table


def _row(swap: RecordedSpan) -> list[str | Text]:
    seconds = {child.name.removeprefix("hotswap."): child.seconds for child in swap.children}
    facts = swap.attributes
    source, target = str(facts["hotswap.swap.from_model"]), str(facts["hotswap.swap.to_model"])
    loaded_bytes = _number(facts, "hotswap.load.bytes")
    reading_s = seconds.get("load", 0.0) + seconds.get("preload", 0.0)
    return [
        str(facts["hotswap.instance"]),
        Text(short(source), color_of(source)),
        Text(short(target), color_of(target)),
        f"{_number(facts, 'hotswap.swap.evicted_requests'):.0f}",
        *(f"{seconds[phase] * 1e3:.1f}" if phase in seconds else "–" for phase in PHASES),
        f"{_number(facts, 'hotswap.swap.downtime_s') * 1e3:.1f}",
        f"{loaded_bytes / 1e6:.1f}",
        f"{loaded_bytes / reading_s / 1e9:.3f}" if reading_s else "–",
        str(facts["hotswap.load.tier"]),
    ]


def _tree(span: RecordedSpan) -> Tree:
    tree = Tree(_label(span), guide_style="dim")
    for child in span.children:
        tree.add(_tree(child))
    return tree


def _label(span: RecordedSpan) -> Text:
    facts = "  ".join(
        f"{name.rpartition('.')[2]}={_brief(value)}"
        for name, value in span.attributes.items()
        if name != "hotswap.seconds" and value not in ("", 0)
    )
    return Text(span.name, "bold").append(f"  {span.seconds * 1e3:.1f} ms  ", "green").append(facts, "dim")


def _brief(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _number(facts: Mapping[str, object], name: str) -> float:
    value = facts.get(name, 0)
    assert isinstance(value, int | float)
    return value


# ---------------------------------------------------------------- the verdict


def _verdict(play: Play, swaps: Sequence[RecordedSpan]) -> Iterator[Text]:
    num_tokens = sum(len(recital.pieces) for recital in play.recitals)
    yield Text(
        f"{recitations(len(play.recitals))}, {num_tokens:,} tokens and {len(swaps)} swaps "
        f"on {len(play.engines)} engines in {play.seconds:.1f} s."
    )
    num_moved = sum(bool(recital.seams) for recital in play.recitals)
    yield Text(f"{recitations(num_moved)} moved in the middle of the text.")
    for loss in play.losses:
        yield Text(_loss(loss))
    if play.failure:
        yield Text(play.failure, "bold red")
        return
    for recital in (recital for recital in play.recitals if recital.fault):
        yield Text(f"WRONG: {recital.checkpoint.name} from {recital.opening!r}: {recital.fault}", "bold red")
    if play.passed:
        yield Text("Every text is exact: no character lost, doubled or foreign.", "bold green")


def _loss(loss: Loss) -> str:
    again = "and did not come back"
    if loss.recovered_s is not None:
        again = f"and served again {loss.recovered_s:.2f} s later"
    return f"{loss.instance} was lost with {recitations(loss.num_streams)}, {again}."
