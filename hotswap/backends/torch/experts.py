"""Mixtures of experts whose bits do not depend on how many tokens chose the same expert.

An expert that a single token chose multiplies a matrix of one row, which the CPU's matrix library rounds
another way, and so are odd numbers of rows by some. Experts are therefore given as many tokens as no library
rounds apart, and the results of those that were added are thrown away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from hotswap.backends.torch.attention import current
from hotswap.backends.torch.forward import row_multiple

__all__ = ["IMPLEMENTATION", "register"]

IMPLEMENTATION = "hotswap_padded"


def register() -> None:
    """Make the implementation known to transformers; again changes nothing."""
    registry: Any = ALL_EXPERTS_FUNCTIONS  # untyped there
    registry.register(IMPLEMENTATION, padded_experts)


def padded_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, with as few rows as the running step allows.

    Args:
        experts: A module whose weights are `[num_experts, ...]`.
        hidden: `[T, hidden_size]`.
        chosen: `[T, top_k]`, expert ids.
        weights: `[T, top_k]`.
    """
    step = current()
    if step is None or not step.min_rows:
        unpadded: Tensor = grouped_mm_experts_forward(experts, hidden, chosen, weights)
        return unpadded
    num_tokens, top_k = chosen.shape
    pairs, flat = chosen.reshape(-1, 1), hidden.repeat_interleave(top_k, 0)
    counts = torch.bincount(pairs.view(-1), minlength=1)
    wanted = counts.clamp(min=step.min_rows)
    wanted += -wanted % row_multiple()
    lacking = torch.where(counts > 0, wanted - counts, 0)
    extra = torch.repeat_interleave(torch.arange(len(counts), device=hidden.device), lacking)[:, None]
    out: Tensor = grouped_mm_experts_forward(
        experts,
        torch.cat([flat, flat.new_zeros(len(extra), flat.shape[1])]),
        torch.cat([pairs, extra]),
        torch.cat([weights.reshape(-1, 1), weights.new_zeros(len(extra), 1)]),
    )
    return out[: num_tokens * top_k].view(num_tokens, top_k, -1).sum(1)
