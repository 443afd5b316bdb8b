"""The picture that `hotswap top` draws of a fleet, within the lines and columns that there are."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotswap.commands.table import to_size
from hotswap.commands.top_feed import FleetPicture

__all__ = ["Size", "clean", "drawn"]

Row = Mapping[str, Any]

WIDE = 110
BAR_CELLS = 8
PHASES = {"preflight": "checking", "preload": "preloading", "evict": "evicting", "unload": "unloading"}
STYLES = {"serving": "green", "lost": "bold red", "empty": "dim"}


@dataclass(frozen=True, slots=True)
class Size:
    """Columns and lines; without lines everything is drawn."""

    width: int
    height: int | None = None


def clean(text: str) -> str:
    """Return a text of a server without what would control the terminal, or turn the direction of text."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def drawn(picture: FleetPicture, title: str, size: Size, notice: str = "") -> RenderableType:
    """Return what shows a fleet; `title` names the server, `notice` says what is wrong with it."""
    instances, models = _by_interest(picture)
    tiers = [_tier(tier) for tier in picture.tiers]
    lost = [_loss(row) for row in instances if row["state"] == "LOST"]
    parts: list[RenderableType] = [_head(picture, title, notice)]
    if size.height is None:
        most = [len(instances), len(models), len(picture.swaps)]
    else:
        tiers, lost = tiers[:3], lost[:2]
        # The head, the foot, a line of heads for each table, and a line between all.
        left = size.height - 2 - len(tiers) - len(lost) - 3 - 3
        most = shares([len(instances), len(models), len(picture.swaps)], max(0, left))
    parts += [Text(), _instances(instances, most[0], size), *lost]
    parts += [Text(), _models(picture, models, most[1], size), *tiers]
    if most[2]:
        parts += [Text(), _swaps(picture, most[2], size)]
    if size.height is not None:
        parts.append(Text("q quits", style="dim"))
    return Group(*parts)


def shares(wanted: Sequence[int], lines: int) -> list[int]:
    """Return how many lines each part gets of those that there are: what it wants, or a fair share."""
    given = [0] * len(wanted)
    while lines and (open_ones := [at for at, most in enumerate(wanted) if given[at] < most]):
        for at in open_ones[:lines]:
            given[at] += 1
        lines -= len(open_ones[:lines])
    return given


def _by_interest(picture: FleetPicture) -> tuple[list[Row], list[Row]]:
    """The rows, those first that a look is for: sorting keeps the order of ids among others."""

    def of_instance(row: Row) -> int:
        return 0 if row["state"] == "LOST" else 1 if row["swapping"] else 2 if row["draining"] else 3

    hosted = {row["model"] for row in picture.instances} | {row["target"] for row in picture.instances}

    def of_model(row: Row) -> int:
        return 0 if row["num_waiting"] else 1 if row["num_running"] else 2 if row["id"] in hosted else 3

    return sorted(picture.instances, key=of_instance), sorted(picture.models, key=of_model)


# ---------------------------------------------------------------------- parts


def _head(picture: FleetPicture, title: str, notice: str) -> RenderableType:
    serving = sum(row["state"] == "SERVING" and not row["swapping"] for row in picture.instances)
    facts = (
        f"{serving} of {len(picture.instances)} serve · {picture.num_running} running · "
        f"{picture.num_waiting} waiting · {picture.tokens_per_s:,.0f} tokens/s"
    )
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    head.add_column(no_wrap=True, justify="right")
    right = Text(facts)
    if notice:
        right = Text(notice, style="bold red")
    elif not picture.is_open:
        right = Text.assemble(("closing", "bold red"), " · ", facts)
    head.add_row(Text.assemble(("hotswap ", "bold"), (clean(title), "dim")), right)
    return head


def _table(*columns: tuple[str, int | None, bool]) -> Table:
    """A table of columns by head, width or `None` for what is left, and whether they hold numbers."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for head, width, is_number in columns:
        table.add_column(
            head,
            width=width,
            ratio=1 if width is None else None,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if is_number else "left",
        )
    return table


def _shown(rows: Sequence[Row], most: int) -> tuple[Sequence[Row], int]:
    """The rows that have a line, and how many have none, which takes the last line."""
    if len(rows) <= most:
        return rows, 0
    kept = rows[: max(0, most - 1)]
    return kept, len(rows) - len(kept)


def _width_of(rows: Sequence[Row], least: int, most: int) -> int:
    return min(most, max([least, *(len(clean(row["id"])) for row in rows)]))


def _instances(rows: Sequence[Row], most: int, size: Size) -> Table:
    shown, hidden = _shown(rows, most)
    is_wide = size.width >= WIDE
    weights: tuple[tuple[str, int | None, bool], ...] = (("WEIGHTS", 20, True),) if is_wide else ()
    table = _table(
        ("INSTANCE", _width_of(shown, 8, size.width // 5), False),
        ("STATE", 10, False),
        ("MODEL", None, False),
        ("LOADED", BAR_CELLS + 6, False),
        ("REQS", 7, True),
        ("KV", 5, True),
        *weights,
    )
    for row in shown:
        word = _state(row)
        used, all_of = row["num_kv_blocks"] - row["num_free_kv_blocks"], row["num_kv_blocks"]
        cells = [
            Text(clean(row["id"])),
            Text(word, style=STYLES.get(word, "yellow")),
            _model(row),
            _progress(row.get("phase")),
            Text(f"{row['num_requests']}/{row['max_requests']}"),
            Text(f"{100 * used // all_of} %" if all_of else ""),
        ]
        if is_wide:
            memory = f" of {to_size(row['memory_bytes'])}" if row["memory_bytes"] else ""
            cells.append(Text(to_size(row["weight_bytes"]) + memory))
        table.add_row(*cells)
    if hidden:
        table.add_row(Text(f"and {hidden:,}", style="dim"), Text("more", style="dim"))
    return table


def _state(row: Row) -> str:
    if row["state"] == "LOST":
        return "lost"
    if row["swapping"]:
        phase = row.get("phase")
        return PHASES.get(phase["name"], "loading") if phase else "swapping"
    if row["draining"]:
        return "draining" if row["num_requests"] else "drained"
    return str(row["state"]).lower()


def _model(row: Row) -> Text:
    text = Text(clean(row["model"] or "-"))
    if row["swapping"] and row["target"] != row["model"]:
        target = clean(row["target"] or "nothing")
        text = Text(target if row["model"] is None else f"{text.plain} → {target}")
    return text


def _loss(row: Row) -> Text:
    why = row["lost_because"] or "the reason is not known"
    return Text(clean(f"{row['id']} is lost: {why}"), style="red", no_wrap=True, overflow="ellipsis")


def _progress(phase: Row | None) -> Text:
    if phase is None or not phase["total_bytes"]:
        return Text()
    part = min(1.0, phase["loaded_bytes"] / phase["total_bytes"])
    return _bar(part).append(f" {100 * part:3.0f} %")


def _bar(part: float) -> Text:
    cells = round(BAR_CELLS * part)
    return Text.assemble(("█" * cells, "yellow"), ("░" * (BAR_CELLS - cells), "dim"))


def _models(picture: FleetPicture, rows: Sequence[Row], most: int, size: Size) -> Table:
    shown, hidden = _shown(rows, most)
    table = _table(
        ("MODEL", _width_of(shown, 8, size.width // 3), False),
        ("SERVED BY", None, False),
        ("RUN", 5, True),
        ("WAIT", 5, True),
        ("OLDEST", 7, True),
        ("TOK/S", 7, True),
        ("WEIGHTS IN", 16 if size.width < WIDE else 30, False),
    )
    hosts: dict[str, list[str]] = {}
    for row in picture.instances:
        if row["state"] == "SERVING" and row["model"] is not None:
            hosts.setdefault(row["model"], []).append(clean(row["id"]))
    for row in shown:
        since = row["oldest_waiting_s"]
        rate = picture.rates.get(row["id"], 0.0)
        table.add_row(
            Text(clean(row["id"])),
            Text(", ".join(hosts.get(row["id"], ()))),
            Text(str(row["num_running"] or "")),
            Text(str(row["num_waiting"] or ""), style="yellow"),
            Text("" if since is None else seconds(picture.now_s - since), style="yellow"),
            Text(f"{rate:,.0f}" if rate >= 9.5 else f"{rate:.1f}" if rate else ""),
            Text(f"{clean(', '.join(row['tiers']))} {to_size(row['weight_bytes'])}".strip()),
        )
    if hidden:
        table.add_row(Text(f"and {hidden:,} more", style="dim"))
    return table


def _tier(tier: Row) -> Text:
    name, used, capacity = (
        clean(f"{tier['name']} {tier['node']}".strip()),
        tier["used_bytes"],
        tier["capacity_bytes"],
    )
    text = Text.assemble((f"{name:<10} ", "dim"), no_wrap=True, overflow="ellipsis")
    if capacity is None:
        text.append(f"{'':{BAR_CELLS}} {to_size(used)}")
    else:
        text.append_text(_bar(used / capacity if capacity else 0.0))
        text.append(f" {to_size(used)} of {to_size(capacity)}")
    if tier["queued_bytes"]:
        text.append(f", {to_size(tier['queued_bytes'])} to read", style="yellow")
    return text


def _swaps(picture: FleetPicture, most: int, size: Size) -> Table:
    table = _table(
        ("TIME", 8, False),
        ("SWAP", None, False),
        ("OUTCOME", 9, False),
        ("TOOK", 7, True),
        ("WHY", size.width // 3, False),
    )
    wall_s = time.time_ns() / 1e9 - picture.now_s
    for record in sorted(picture.swaps, key=itemgetter("started_s"), reverse=True)[:most]:
        before, after = record["model_before"], clean(record["model"] or "nothing")
        what = f"{record['instance']}: {f'{before} → ' if before else ''}"
        why = ": ".join(filter(None, (record["reason"], record["error"])))
        table.add_row(
            Text(time.strftime("%H:%M:%S", time.localtime(record["started_s"] + wall_s)), style="dim"),
            Text(clean(what) + after),
            Text(record["outcome"], style="" if record["outcome"] == "done" else "red"),
            Text(seconds(record["seconds"])),
            Text(clean(why), style="dim"),
        )
    return table


def seconds(value: float) -> str:
    """Return a duration for people."""
    if value < 0.9995:
        return f"{max(0.0, value) * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 5970 else f"{value / 3600:.1f} h"
