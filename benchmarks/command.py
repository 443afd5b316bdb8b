"""What the command lines of all benchmarks share: `--full`, `--json` and the writing of the report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import write_json

__all__ = ["parser_of", "save"]


def parser_of(name: str, doc: str | None, *, full: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with `--full` and `--json`.

    Args:
        name: Name of the benchmark.
        doc: The docstring of its module, whose first line is shown.
        full: What `--full` does; `None` if the benchmark has one size only.
    """
    summary = (doc or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {name}", description=summary)
    parser.add_argument("--full", action="store_true", help=full or "the default; accepted by all benchmarks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes")
    return parser


def save(report: Mapping[str, Any], path: Path | None) -> None:
    """Write the report, if a path was given, and say where it is."""
    if path is not None:
        write_json(path, report)
        print(f"The report is in {path}.")
