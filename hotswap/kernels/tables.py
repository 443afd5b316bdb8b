"""Tuning tables: the fastest measured configuration of a kernel by device, kind, shape and number of rows.

A table is a JSON file in the kernel's package, written by its sweep and read at run time; serving never
measures anything. The measured times stay in the file, so that claims about it can be checked:

    {"schema": 1, "devices": {"NVIDIA H200": {"target": "sm_90", "about": {...}, "kinds": {
        "bfloat16/g128": {"28672x4096": {"16": {"choice": {...}, "figures": {"us": 31.5, ...}}}}}}}}
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

from hotswap.errors import ConfigError

__all__ = ["Choice", "Record", "Table", "load", "write"]

Choice: TypeAlias = Mapping[str, int | str]
Shape: TypeAlias = tuple[int, ...]

_SCHEMA: Final = 1
# A shape that was not measured uses the nearest measured shape within this distance, summed over its sizes in
# octaves (doublings); beyond that, the heuristic is used.
_NEAR_OCTAVES: Final = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """The fastest configuration of one measured point.

    Attributes:
        kind: Other properties that matter, such as the dtype.
        shape: Shape of the weights.
        rows: Number of input rows.
        choice: The configuration.
        figures: Measured values, such as the microseconds of this kernel and of a baseline.
    """

    kind: str
    shape: Shape
    rows: int
    choice: Choice
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Measured:
    """The records of one device: kind, shape, and rows in ascending order."""

    target: str
    kinds: Mapping[str, Mapping[Shape, tuple[Record, ...]]]


class Table:
    """The tuning table of a kernel; may be empty.

    Args:
        parsed: The parsed JSON of the file.

    Raises:
        ConfigError: the schema is another one.
    """

    def __init__(self, parsed: Mapping[str, Any]) -> None:
        if parsed.get("schema") != _SCHEMA:
            raise ConfigError(
                f"A kernel's table has schema {parsed.get('schema')!r}, this release reads {_SCHEMA}; "
                "sweep again, or remove the table."
            )
        self._devices = {name: _measured(entry) for name, entry in parsed["devices"].items()}

    def find(self, device: str, target: str, kind: str, shape: Shape, rows: int) -> Choice | None:
        """Return the configuration for a point, or `None` if no measured point is near enough.

        Looks for the device, else for one with the same target; for the shape, else for the nearest within
        one octave in total; and for the next larger measured number of rows, else for the largest.
        """
        measured = self._devices.get(device) or next(
            (other for other in self._devices.values() if other.target == target), None
        )
        shapes = measured.kinds.get(kind) if measured else None
        near = min(shapes or (), key=lambda other: _octaves(shape, other), default=None)
        if not shapes or near is None or _octaves(shape, near) > _NEAR_OCTAVES:
            return None
        records = shapes[near]
        at = bisect_left(records, rows, key=lambda record: record.rows)
        return records[min(at, len(records) - 1)].choice

    def records(self) -> Iterator[tuple[str, Record]]:
        """Yield all records, each with the target of its device."""
        for measured in self._devices.values():
            for shapes in measured.kinds.values():
                for records in shapes.values():
                    yield from ((measured.target, record) for record in records)


@cache
def load(path: Path) -> Table:
    """Return the table in a file, which is read once; an empty table if there is no such file.

    Raises:
        ConfigError: the file is not a table.
    """
    if not path.is_file():
        return Table({"schema": _SCHEMA, "devices": {}})
    return Table(json.loads(path.read_text(encoding="utf-8")))


def write(path: Path, device: str, target: str, about: Mapping[str, Any], records: Iterable[Record]) -> None:
    """Replace the records of one device in a table file; other devices are kept.

    Args:
        path: The table file, created if it does not exist.
        device: Name of the device.
        target: Name of its target.
        about: Further facts: versions, bandwidth ceilings, the number of units.
        records: All measured points.
    """
    content: dict[str, Any] = {"schema": _SCHEMA, "devices": {}}
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    kinds: dict[str, Any] = {}
    for record in sorted(records, key=lambda record: (record.kind, record.shape, record.rows)):
        shapes = kinds.setdefault(record.kind, {})
        points = shapes.setdefault("x".join(map(str, record.shape)), {})
        points[str(record.rows)] = {"choice": dict(record.choice), "figures": dict(record.figures)}
    content["devices"][device] = {"target": target, "about": dict(about), "kinds": kinds}
    content["devices"] = dict(sorted(content["devices"].items()))
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _measured(entry: Mapping[str, Any]) -> _Measured:
    kinds = {
        kind: {_shape(text): _records(kind, _shape(text), points) for text, points in shapes.items()}
        for kind, shapes in entry["kinds"].items()
    }
    return _Measured(entry["target"], kinds)


def _records(kind: str, shape: Shape, points: Mapping[str, Any]) -> tuple[Record, ...]:
    records = (
        Record(kind, shape, int(rows), cast("Choice", point["choice"]), point["figures"])
        for rows, point in points.items()
    )
    return tuple(sorted(records, key=lambda record: record.rows))


def _shape(text: str) -> Shape:
    return tuple(int(size) for size in text.split("x"))


def _octaves(shape: Shape, other: Shape) -> float:
    if len(shape) != len(other):
        return math.inf
    return sum(abs(math.log2(max(a, 1) / max(b, 1))) for a, b in zip(shape, other, strict=True))
