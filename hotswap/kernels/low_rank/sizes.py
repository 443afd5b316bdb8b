"""Sizes that the callers of the low-rank kernel and the kernel itself agree on."""

from __future__ import annotations

from typing import Final

__all__ = ["ALIGNMENT", "TOGETHER"]

ALIGNMENT: Final = 8
"""Ranks that are multiplied together; a row's number of ranks is a multiple of it."""

TOGETHER: Final = 4
"""Rows of one adapter that are multiplied together, if they follow each other."""
