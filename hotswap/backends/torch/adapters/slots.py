"""The slot of a loaded adapter in the adapter pool of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = ["AdapterSlot", "RankPages", "RankRange"]


class AdapterSlot(Protocol):
    """The memory of one loaded adapter in the pool of its engine.

    `serial` is unique per load in the process: an adapter that is loaded again gets another one. `key` is the
    digest of its matrices. It is part of prefix keys, so KV blocks are reused by requests with an equal
    adapter only.
    """

    @property
    def serial(self) -> int:
        """The unique number of this load."""
        ...

    @property
    def key(self) -> bytes:
        """The digest of the adapter's matrices."""
        ...


@dataclass(frozen=True, slots=True)
class RankRange:
    """A slot in a pool of ranges: the rank rows from `first` to before `last`."""

    first: int
    last: int
    serial: int
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class RankPages:
    """A slot in a pool of pages; `width_in` is the largest input width of the model's layers."""

    pages: tuple[int, ...]
    serial: int
    width_in: int
    key: bytes = b""
