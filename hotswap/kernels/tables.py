"""What was measured to be the best way to run a kernel, by device, kind, shape and number of rows.

A table is a JSON file beside the kernel, written by its sweep and read at run time; nothing is ever measured
while a model serves. Its times stay in the file, so that a claim about it can be checked:

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
# A shape that was not measured goes by the nearest that was, if all its sizes together are this near, in
# doublings; beyond that a rule of thumb knows better.
_NEAR_OCTAVES: Final = 1.0


@dataclass(frozen=True, slots=True)
class Record:
    """What was best at one point.

    Attributes:
        kind: What else matters, such as the dtype.
        shape: Of the weights.
        rows: Of the input.
        choice: How to run it.
        figures: What was measured there, such as the microseconds of it and of what it is compared with.
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
    """The measurements that a kernel comes with; may be empty.

    Args:
        parsed: The JSON of its file.

    Raises:
        ConfigError: it is not one of this schema.
    """

    def __init__(self, parsed: Mapping[str, Any]) -> None:
        if parsed.get("schema") != _SCHEMA:
            raise ConfigError(
                f"A kernel's table has schema {parsed.get('schema')!r}, this release reads {_SCHEMA}; "
                "sweep again, or remove the table."
            )
        self._devices = {name: _measured(entry) for name, entry in parsed["devices"].items()}

    def find(self, device: str, target: str, kind: str, shape: Shape, rows: int) -> Choice | None:
        """Return how to run a kernel there, or `None` where nothing near enough was measured.

        The device itself counts, else one of the same target; the shape itself, else the nearest within a
        doubling of all sizes together; and the least number of rows that was measured and is no fewer, or
        else the most.
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
        """Everything in it, each with the target of its device."""
        for measured in self._devices.values():
            for shapes in measured.kinds.values():
                for records in shapes.values():
                    yield from ((measured.target, record) for record in records)


@cache
def load(path: Path) -> Table:
    """Return the table of a file, read once; an empty one if there is no such file.

    Raises:
        ConfigError: the file is no table.
    """
    if not path.is_file():
        return Table({"schema": _SCHEMA, "devices": {}})
    return Table(json.loads(path.read_text(encoding="utf-8")))


def write(path: Path, device: str, target: str, about: Mapping[str, Any], records: Iterable[Record]) -> None:
    """Put what a device was measured to do in place of what the file says of it; other devices stay.

    Args:
        path: The table's file, made if there is none.
        device: Its name.
        target: What it is built for.
        about: What else is worth knowing: versions, ceilings, the number of units.
        records: Everything that was measured.
    """
    whole: dict[str, Any] = {"schema": _SCHEMA, "devices": {}}
    if path.is_file():
        whole = json.loads(path.read_text(encoding="utf-8"))
    kinds: dict[str, Any] = {}
    for record in sorted(records, key=lambda record: (record.kind, record.shape, record.rows)):
        shapes = kinds.setdefault(record.kind, {})
        points = shapes.setdefault("x".join(map(str, record.shape)), {})
        points[str(record.rows)] = {"choice": dict(record.choice), "figures": dict(record.figures)}
    whole["devices"][device] = {"target": target, "about": dict(about), "kinds": kinds}
    whole["devices"] = dict(sorted(whole["devices"].items()))
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


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
