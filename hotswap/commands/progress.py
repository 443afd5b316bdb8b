"""A progress bar on standard error."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Show", "progress_bar"]


class Show(Protocol):
    """Shows how far something has come."""

    def __call__(self, done: int, total: int, /) -> None:
        """Show `done` of `total`; a total of 0 is not known."""
        ...


@contextmanager
def progress_bar(title: str, unit: str = "") -> Generator[Show]:
    """A progress bar on standard error, in bytes or a unit; none without `rich` or a terminal."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
    except ImportError:
        yield lambda done, total: None
        return
    of_bytes: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    of_units: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), *(of_units if unit else of_bytes))
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)

        def show(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total or None)

        yield show
