"""Masks of the tokens that may come next: computed beside the forward pass, applied to the rows of a step.

The library of grammars gives packed masks: bit `i % 32` of word `i // 32` is set if token `i` may come. A
step applies them as lists of token ids, which takes a few microseconds for a row: nearly all states of a
grammar allow few tokens, or almost all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hotswap.backends.torch.step_numbers import to_device
from hotswap.errors import HotswapError, InstanceError

__all__ = ["Constraint", "Mask", "MaskThread", "Masks", "apply_mask"]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The tokens that may come next in one request, or why the request cannot go on.

    Attributes:
        listed: Token ids.
        allows: Whether these are the tokens that may come; if not, they are those that may not.
        vocabulary: The number of token ids that the mask knows; others may not come.
        error: Ends the request; its mask is not used then.
    """

    listed: npt.NDArray[np.int64]
    allows: bool
    vocabulary: int
    error: HotswapError | None = None

    @classmethod
    def unpack(cls, words: Tensor, vocabulary: int) -> Mask:
        """Return the mask of packed words, `[ceil(vocabulary / 32)]`, int32."""
        bits = np.unpackbits(words.numpy().view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)
        allows = 2 * int(np.count_nonzero(bits)) < vocabulary
        listed = np.flatnonzero(bits if allows else ~bits)
        return cls(listed, allows, vocabulary)

    @classmethod
    def failed(cls, error: HotswapError) -> Mask:
        """Return the mask of a request that an error ends."""
        return cls(np.zeros(0, np.int64), True, 0, error)


Masks: TypeAlias = "tuple[Mask | None, ...]"


class Constraint(ABC):
    """What a request may generate: a function of the tokens that it has generated.

    Args:
        vocabulary: The number of token ids.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

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


def apply_mask(logits: Tensor, mask: Mask) -> None:
    """Set the logits of the tokens that may not come to minus infinity, in place.

    Args:
        logits: `[vocabulary]`, fp32; its vocabulary may have another size than that of the mask.
        mask: The mask, without an error.
    """
    listed = mask.listed
    if mask.vocabulary > len(logits):
        listed = listed[listed < len(logits)]
    ids = to_device(listed, logits.device)
    if mask.allows:
        kept = logits[ids]
        logits.fill_(-torch.inf)
        logits[ids] = kept
    else:
        logits.index_fill_(0, ids, -torch.inf)
        logits[mask.vocabulary :] = -torch.inf


def _fill_all(constraints: Sequence[Constraint | None]) -> Masks:
    return tuple(None if constraint is None else _fill(constraint) for constraint in constraints)


def _fill(constraint: Constraint) -> Mask:
    words = torch.zeros(-(-constraint.vocabulary // 32), dtype=torch.int32)
    try:
        constraint.fill(words)
    except HotswapError as exc:
        return Mask.failed(exc)
    except Exception as exc:  # of a library: it is this request's alone
        return Mask.failed(InstanceError(f"The mask of the request cannot be computed: {exc!r}"))
    return Mask.unpack(words, constraint.vocabulary)
