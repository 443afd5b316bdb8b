"""Random prompts, the same for every contestant; imported in environments that lack hotswap."""

from __future__ import annotations

from random import Random

__all__ = ["prompts"]


def prompts(batch: int, length: int, vocabulary: int = 500) -> list[list[int]]:
    """Return `batch` prompts of `length` tokens; a batch size always gives the same ones."""
    random = Random(batch)
    return [[random.randrange(3, vocabulary) for _ in range(length)] for _ in range(batch)]
