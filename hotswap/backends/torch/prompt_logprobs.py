"""Log-probabilities of the tokens of a prompt, computed chunk by chunk beside the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotswap.request import ScoredPrompt

__all__ = ["PromptScores"]

# Rows that are normalized at a time, in fp32, which bounds the memory for a large vocabulary.
_ROWS = 8


class PromptScores:
    """The log-probabilities of a prompt's tokens, as far as they are computed.

    Args:
        prompt: The tokens.
        count: How many of the most probable tokens are told for each.

    Attributes:
        scored: Those that are computed, from the first token on.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt, self._count = prompt, count
        self.scored = ScoredPrompt(prompt[0])

    @property
    def num_scored(self) -> int:
        """How many tokens of the prompt have theirs, the first one included, which needs none."""
        return len(self.scored)

    def add(self, start: int, logits: Tensor) -> None:
        """Add the tokens that follow some rows of the prompt.

        Rows whose tokens have theirs change nothing, so that a preempted request may compute them again. The
        same holds for rows after a gap, of a step that was in flight when the request was preempted.

        Args:
            start: The position of the first row.
            logits: The model's, `[rows, vocabulary]`, of any floating dtype.
        """
        known = self.num_scored - 1 - start
        if known < 0:
            return
        for first in range(known, len(logits), _ROWS):
            rows = logits[first : first + _ROWS]
            tokens = self._prompt[self.num_scored : self.num_scored + len(rows)]
            _add(self.scored, rows, tokens, self._count)


def _add(scored: ScoredPrompt, logits: Tensor, tokens: Sequence[int], count: int) -> None:
    """Add the log-probabilities of tokens, given the logits of the rows before them."""
    logprobs = logits.float().log_softmax(-1)
    chosen: Any = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    top: Any = logprobs.topk(min(count, logprobs.shape[1]))
    for row in zip(tokens, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True):
        scored.add(*row)
