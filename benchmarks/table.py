"""Tables on a terminal: by rich where it is installed, else in plain columns."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["show"]


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are figures."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return _show_plain(title, head, rows)
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
    return None


def _show_plain(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    print(f"\n{title}")
    for row in (head, *rows):
        first, *rest = (
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join((first, *rest)).rstrip())
