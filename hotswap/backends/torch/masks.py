"""Masks of the tokens that may come next: computed beside the forward pass, applied to the rows of a step.

A mask is packed: bit `i % 32` of word `i // 32` is set if token `i` may come.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hotswap.errors import HotswapError, InstanceError

__all__ = ["Constraint", "Mask", "MaskThread", "Masks", "apply_mask"]

# What is added to the logits of eight tokens for each value of their byte of a mask: `[256, 8]`.
_ADDED = torch.where((torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1, 0.0, -torch.inf)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The tokens that may come next in one request, or why the request cannot go on.

    Attributes:
        words: The packed mask, `[ceil(vocabulary / 32)]`, int32, on the CPU.
        error: Ends the request; its mask is not used then.
    """

    words: Tensor
    error: HotswapError | None = None


Masks: TypeAlias = "tuple[Mask | None, ...]"


class Constraint(ABC):
    """What a request may generate: a function of the tokens that it has generated.

    Args:
        vocabulary: The number of token ids.
    """

    def __init__(self, vocabulary: int) -> None:
        self.num_words = -(-vocabulary // 32)

    @abstractmethod
    def add_token(self, token: int) -> None:
        """Take note of a generated token. Called on the engine's thread, also during a `fill`."""

    @abstractmethod
    def fill(self, words: Tensor) -> None:
        """Write the packed mask of the next token. Calls do not overlap; may run in any thread.

        Raises:
            HotswapError: the request cannot go on.
        """


class MaskThread:
    """Computes masks in a thread of its own, which starts with the first constrained request."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, constraints: Sequence[Constraint | None]) -> Future[Masks] | None:
        """Start to compute the masks of the rows of a step; `None` if no row is constrained.

        The result has `None` for the other rows. It never has an exception: an error is its row's own.
        """
        if not any(constraints):
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="hotswap masks")
        return self._pool.submit(_fill_all, tuple(constraints))

    def close(self) -> None:
        """End the thread after what it computes now; does not wait for it."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def apply_mask(logits: Tensor, words: Tensor) -> None:
    """Set the logits of the tokens that may not come to minus infinity, in place.

    Args:
        logits: `[vocabulary]`, fp32; none is infinite.
        words: The packed mask.
    """
    words = words.to(logits.device)
    added = torch.nn.functional.embedding(words.view(torch.uint8).int(), _ADDED.to(logits.device)).view(-1)
    num_known = min(len(added), len(logits))
    logits[:num_known] += added[:num_known]
    logits[num_known:] = -torch.inf


def _fill_all(constraints: Sequence[Constraint | None]) -> Masks:
    return tuple(None if constraint is None else _fill(constraint) for constraint in constraints)


def _fill(constraint: Constraint) -> Mask:
    words = torch.zeros(constraint.num_words, dtype=torch.int32)
    try:
        constraint.fill(words)
    except HotswapError as exc:
        return Mask(words, exc)
    except Exception as exc:  # of a library: it is this request's alone
        return Mask(words, InstanceError(f"The mask of the request cannot be computed: {exc!r}"))
    return Mask(words)
