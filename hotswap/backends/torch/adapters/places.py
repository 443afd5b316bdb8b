"""Where adapters lie in the pool of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["Place", "RankPages", "RankRange"]


class Place(Protocol):
    """Where an adapter lies in the pool of its engine.

    `serial` is given to no other adapter of the process, also not to the same one when it comes again: what
    was computed with an adapter belongs to it.
    """

    @property
    def serial(self) -> int:
        """Stands for the adapter."""
        ...


@dataclass(frozen=True, slots=True)
class RankRange:
    """The place of one adapter in a pool of ranges: rank rows `first` to `last`."""

    first: int
    last: int
    serial: int


@dataclass(frozen=True, slots=True)
class RankPages:
    """The place of one adapter in a pool of pages; `width_in` is the widest input of its layers."""

    pages: tuple[int, ...]
    serial: int
    width_in: int
