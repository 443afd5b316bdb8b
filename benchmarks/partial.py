"""Results of a long benchmark so far, in a file, so that it may be interrupted."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["PartialResults"]


class PartialResults:
    """Results by key, written to a file as they come.

    The file does not record the code or the data that gave the results: delete it when these change.

    Args:
        path: The file, JSON; `None` keeps results in memory alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._results: dict[str, Any] = {}
        if path is not None and path.exists():
            self._results = json.loads(path.read_text())
            print(f"{len(self._results)} results are in {path}; delete it to start again.", file=sys.stderr)

    @classmethod
    def of(cls, report: Path | None) -> PartialResults:
        """Return those beside a report, in a file with the suffix `.part`."""
        return cls(report and report.with_suffix(".part"))

    def get(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the result of a key, as JSON has it, and compute and keep it if it is not there."""
        if key not in self._results:
            self._results[key] = json.loads(json.dumps(compute()))
            self._save()
        return self._results[key]

    def clear(self) -> None:
        """Delete all results, once the report has them."""
        self._results.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _save(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(self._results))
            new.replace(self._path)
