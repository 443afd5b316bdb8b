"""The tensors of one forward pass, and the pass itself."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import Step, running
from hotswap.backends.torch.batch_invariant import BatchInvariantMode

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of one forward pass over a row of pieces.

    Attributes:
        ids: `[1, T]`, token ids.
        positions: `[1, T]`, their positions.
        keep: The rows whose logits are needed, padded to the minimum number of rows.
        num_kept: The length of `keep` without padding.
        step: The metadata that the layers read.
        watched: Whether the pass runs in `BatchInvariantMode`.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    num_kept: int
    step: Step
    watched: bool = False

    def logits(self, model: nn.Module, embeds: Tensor | None = None) -> Tensor:
        """Run the model and return the logits of the rows in `keep`, `[num_kept, vocabulary]`.

        `embeds`, `[1, T, width]`, replaces the token ids as the model's input.
        """
        start: dict[str, Tensor] = {"input_ids": self.ids} if embeds is None else {"inputs_embeds": embeds}
        with running(self.step), BatchInvariantMode() if self.watched else nullcontext():
            # Without a mask of ones transformers would treat the row as packed sequences.
            out: Any = model(
                **start,
                position_ids=self.positions,
                attention_mask=torch.ones_like(self.ids),
                use_cache=False,
                logits_to_keep=self.keep,
            )
        return cast("Tensor", out.logits[0])[: self.num_kept]
