"""Constants shared by the LoRA kernel for CPUs and its callers."""

from __future__ import annotations

from typing import Final

__all__ = ["ALIGNMENT", "TOGETHER"]

ALIGNMENT: Final = 8
"""Ranks that are multiplied together; the number of ranks of a row is a multiple of it."""

TOGETHER: Final = 4
"""Consecutive rows of one adapter that are multiplied together."""
