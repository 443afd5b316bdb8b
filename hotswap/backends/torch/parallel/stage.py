"""What one rank has of a loaded model, and how it takes part in a step."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotswap.backends.torch.forward import assemble
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.parallel import plan, stages
from hotswap.backends.torch.parallel.collectives import Boundary, Group
from hotswap.backends.torch.parallel.messages import Bind, OpenCache, Step
from hotswap.backends.torch.parallel.part import part_of
from hotswap.backends.torch.parallel.places import Place
from hotswap.errors import UnsupportedModel

__all__ = ["Stage"]


class Stage:
    """One rank's part of a model, bound to its weights.

    Args:
        place: The rank's.
        command: What it was told of the model.
        weights: uint8, the memory in which its weights lie; a CPU uses them there.
        logits: `[slots, rows, num_logits]` in fp32, where logits go.
        group: The ranks of the stage.
        boundary: To the stages before and after.
        device: Where it computes.
        invariant: Whether logits have the same bits whatever shares the batch.
    """

    def __init__(
        self,
        place: Place,
        command: Bind,
        *,
        weights: Tensor,
        logits: Tensor,
        group: Group,
        boundary: Boundary,
        device: torch.device,
        invariant: bool,
    ) -> None:
        self._place, self._group, self._boundary, self._device = place, group, boundary, device
        self._skeleton = Skeleton(command.config, device)
        part = part_of(self._skeleton, place)
        self._layers = part.layers
        self._logits = logits
        self._embedding_size = int(self._skeleton.module.get_input_embeddings().embedding_dim)
        self._hidden_size = int(self._skeleton.config.get_text_config().hidden_size)
        self._skeleton.narrow(part.shapes)
        self._skeleton.bind(weights.to(device), command.specs)
        self._entrance = stages.StageInput()
        if place.grid.tp > 1:
            plan.install(self._skeleton.module, group, part.whole)
        stages.install(self._skeleton.module, self._skeleton.num_layers, place, self._entrance)
        self._invariant, self._linear_only = invariant, self._skeleton.linear_only
        self._cache: KVCache | None = None

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What each layer of the stage keeps of a token, as far as they were seen."""
        seen = {} if self._cache is None else self._cache.layers
        return tuple(seen[index] for index in self._layers if index in seen)

    def open_cache(self, command: OpenCache) -> None:
        """Make KV blocks, in place of those there are."""
        self._cache = None
        self._cache = KVCache(
            command.num_blocks,
            command.block_tokens,
            self._device,
            command.layers,
            first_layer=self._layers.start,
        )

    def step(self, command: Step) -> tuple[int, ...]:
        """Do this stage's share of a step, and return the layers that called attention, in order."""
        assert self._cache is not None, "the engine opens a cache before it steps"
        self._cache.copy(command.work.copies)
        self._cache.clear(command.work.fresh)
        pieces = command.work.pieces
        batch = assemble(pieces, self._cache, invariant=self._invariant, linear_only=self._linear_only)
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        embeds = self._enter(num_tokens, num_tokens if command.eager else batch.ids.shape[1])
        try:
            logits = self._eager(command, embeds) if command.eager else batch.logits(self._model, embeds)
        except stages.StageEnd as end:
            self._leave(end.hidden[0, :num_tokens])
        else:
            self._put(logits, command.slot)
        finally:
            self._entrance.hidden = None
        return tuple(batch.step.layers)

    @property
    def _model(self) -> nn.Module:
        return cast("nn.Module", self._skeleton.module)

    def _enter(self, num_tokens: int, num_rows: int) -> Tensor | None:
        """Receive what this stage begins with; return what stands in for embeddings that it does not have."""
        if self._place.is_first:
            return None
        hidden = self._boundary.receive(num_tokens, self._hidden_size, self._skeleton.dtype)
        # Rows that only pad do not cross.
        self._entrance.hidden = functional.pad(hidden, (0, 0, 0, num_rows - num_tokens))[None]
        return hidden.new_zeros(1, num_rows, self._embedding_size)

    def _leave(self, hidden: Tensor) -> None:
        if hidden.dtype is not self._skeleton.dtype or hidden.shape[-1] != self._hidden_size:
            raise UnsupportedModel(
                f"The hidden state between layers is {hidden.dtype} of {hidden.shape[-1]}, not what the "
                "config says; serve the model with pp=1."
            )
        self._boundary.send(hidden)

    def _eager(self, command: Step, embeds: Tensor | None) -> Tensor:
        (piece,) = command.work.pieces
        ids = torch.tensor([list(piece.tokens)], device=self._device)
        start = {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
        with self._skeleton.eager():
            out: Any = self._model(
                **start, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=1
            )
        return cast("Tensor", out.logits[0])

    def _put(self, logits: Tensor, slot: int) -> None:
        """Write logits, or this rank's slice of them, to where the engine's process reads them."""
        rows = self._logits[slot, : len(logits)]
        if logits.shape[-1] < rows.shape[-1]:
            rows = self._group.slice_of(rows)
        elif self._group.part:
            return
        rows.copy_(logits)
