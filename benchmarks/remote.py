"""What goes between nodes and processes, beside the least that it could take: weights, KV blocks and tokens.

    python -m benchmarks remote --json remote.json
    python -m benchmarks remote --part peers

Each part measures one thing in turns with its limit, in processes of their own on addresses of this machine,
and adds its figures to the report.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import killed, kv_moves, peer_weights, process_tokens, ray_tokens, status_load
from benchmarks.command import parser_of, save
from benchmarks.measure import WORK, Summary, brief, machine
from benchmarks.table import show

__all__ = ["main", "measure"]

PARTS = {
    "peers": "weights from one node to another, beside a plain socket, and to four at once",
    "kv": "a move with KV blocks between nodes, beside one in a process and beside computing anew",
    "killed": "what 20 streams wait when the process of their engine is killed",
    "process": "tokens of an engine in a process of its own, beside the same engine here",
    "status": "what the status of a hundred engines costs their controller",
    "ray": "tokens of an engine in an actor of Ray, beside Ray's own generators; needs `make ray-env`",
}


_STEP_S = 0.02  # of the model of `killed` with 20 streams, about


def measure(parts: Sequence[str], directory: Path = WORK, *, full: bool = False) -> dict[str, Any]:
    """Measure parts, and return their figures in one report."""
    directory.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(directory)}
    if "peers" in parts:
        settings = peer_weights.Settings(**({"spread_bytes": 1_000_000_000} if full else {}))
        report |= peer_weights.measure(settings, directory)
    if "kv" in parts:
        report |= kv_moves.measure(kv_moves.Settings(), directory)
    if "killed" in parts:
        report |= {"killed": _killed(directory)}
    if "process" in parts:
        report |= process_tokens.measure(process_tokens.Settings())
    if "status" in parts:
        report |= status_load.measure(status_load.Settings())
    if "ray" in parts:
        report |= ray_tokens.measure(ray_tokens.Settings())
    return report


def _killed(directory: Path) -> dict[str, Any]:
    """Kill the process of an engine with 20 streams; the bound is a prefill, a step and 0.2 s."""
    settings = killed.Settings(streams=40, victim="process", allowed_s=0.2 + _STEP_S)
    found = killed.measure(settings, directory)
    return {name: found[name] for name in ("gap_s", "prefill_s", "longest_over_bound")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write the report; 1 if a figure is beyond its limit."""
    parser = parser_of("remote", __doc__, full="1 GB to four nodes, not a quarter of it")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="measure this part alone")
    options = parser.parse_args(arguments)
    report = measure(options.part or list(PARTS), full=options.full)
    lines: list[list[str]] = []
    kept = True
    if "peer_over_socket" in report:
        lines += peer_weights.rows(report)
        kept &= Summary.of(report["peer_over_socket"]).median >= peer_weights.LEAST_OF_SOCKET
        kept &= Summary.of(report["peer_four_over_one"]).median <= peer_weights.MOST_OF_ONE
    if "kv_gap_s" in report:
        lines += kv_moves.rows(report)
        kept &= kv_moves.is_kept(report)
    if "killed" in report:
        over = report["killed"]["longest_over_bound"]
        lines.append(
            ["longest wait of 20 streams of a killed engine, over its bound", Summary.of(over).format(2), "1"]
        )
        kept &= max(over) <= 1
    if "process_us_per_token" in report:
        lines += process_tokens.rows(report)
        kept &= Summary.of(report["process_us_per_token"]["added"]).median <= process_tokens.MOST_US
    if "status" in report:
        lines += status_load.rows(report)
        kept &= Summary.of(report["status"]["of_a_core"]).median <= status_load.MOST_OF_A_CORE
    if "cpu_us_per_token" in report:
        lines += ray_tokens.rows(report)
        kept &= ray_tokens.is_kept(report)
    show("between nodes", ["", "median [min-max]", "limit"], lines)
    save(brief(report), options.json)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
