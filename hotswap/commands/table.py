"""Tables, sizes and times as the command line prints them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

__all__ = ["table", "to_size", "to_time"]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under their heads, in columns."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (heads, *rows)
    )
    return "\n".join(line.rstrip() for line in lines)


def to_time(nanoseconds: int) -> datetime:
    """Return a time since the epoch."""
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC)


def to_size(size_bytes: int) -> str:
    """Return a size in binary units, for people."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
