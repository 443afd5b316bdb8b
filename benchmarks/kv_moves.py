"""A part of `benchmarks remote`: what a client waits when its request moves between nodes with its KV blocks.

The same move is made between two engines of this process, and by computing the blocks anew, in turns with it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from benchmarks import migrate
from benchmarks.kv_node import SECRET
from benchmarks.measure import Summary, ratios, rounds, workspace
from benchmarks.models import write_llama
from benchmarks.process import Process
from hotswap import Fleet
from hotswap.backends.remote import RemoteEngine
from hotswap.backends.transports import connect_tcp

__all__ = ["MOST_OF_LOCAL", "MOST_OF_RECOMPUTE", "Settings", "is_kept", "measure", "rows"]

MOST_OF_LOCAL, MOST_OF_RECOMPUTE = 1.5, 0.1

_WAYS = {"local": "kv", "remote": "kv", "recompute": "recompute"}
_ADDRESSES = {"e0": "127.0.0.2", "e1": "127.0.0.3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        context: Tokens that the moving request has.
        repeats: Rounds of all three ways.
        hidden: Width of the model.
        layers: Depth of the model.
    """

    context: int = 1000
    repeats: int = 5
    hidden: int = 1024
    layers: int = 12


def measure(settings: Settings, directory: Path) -> dict[str, Any]:
    """Return the gaps in seconds between two tokens, by the way in which the request moved."""
    asked = migrate.Settings(repeats=2)
    gaps: dict[str, list[float]] = {way: [] for way in _WAYS}
    with workspace("kv", directory) as root:
        write_llama(root, hidden=settings.hidden, layers=settings.layers, max_tokens=16_384, dtype="bfloat16")
        for way in rounds(tuple(_WAYS), settings.repeats):
            gaps[way] += anyio.run(partial(_gaps, way, root, settings, asked))
    return {"kv_gap_s": gaps}


def rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The lines of the table."""
    gaps = report["kv_gap_s"]
    ms = {way: Summary.of([1e3 * gap for gap in gaps[way]]) for way in _WAYS}
    names = {
        "local": "ms, a move in one process",
        "remote": "ms, between nodes",
        "recompute": "ms, computed anew",
    }
    over = {way: Summary.of(ratios(gaps["remote"], gaps[way])) for way in ("local", "recompute")}
    return [
        *([name, ms[way].format(1), ""] for way, name in names.items()),
        ["between nodes over one process", over["local"].format(2), f"{MOST_OF_LOCAL:g}"],
        ["between nodes over computing anew", over["recompute"].format(2), f"{MOST_OF_RECOMPUTE:g}"],
    ]


def is_kept(report: Mapping[str, Any]) -> bool:
    """Whether the figures are within their limits."""
    gaps = report["kv_gap_s"]
    return (
        Summary.of(ratios(gaps["remote"], gaps["local"])).median <= MOST_OF_LOCAL
        and Summary.of(ratios(gaps["remote"], gaps["recompute"])).median <= MOST_OF_RECOMPUTE
    )


async def _gaps(way: str, root: Path, settings: Settings, asked: migrate.Settings) -> list[float]:
    fleet = _between_nodes(root, settings) if way == "remote" else migrate.local_fleet(root, settings.context)
    async with fleet as opened:
        moved = await migrate.moves(opened, asked, settings.context, _WAYS[way])
    gaps: list[float] = moved["gap_s"]
    return gaps


@asynccontextmanager
async def _between_nodes(root: Path, settings: Settings) -> AsyncGenerator[Fleet]:
    with ExitStack() as nodes:
        engines: list[RemoteEngine] = []
        for id, address in _ADDRESSES.items():
            task = {"id": id, "address": address, "root": str(root), "context": settings.context}
            command = [sys.executable, "-m", "benchmarks.kv_node", json.dumps(task)]
            node = nodes.enter_context(Process(command, environment={}, timeout_s=120.0))
            connect = partial(connect_tcp, address, node.first()["port"], secret=SECRET)
            engines.append(RemoteEngine(id, connect, node=address))
        async with migrate.fleet_of(engines, root) as fleet:
            yield fleet
