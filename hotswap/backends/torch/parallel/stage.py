"""One rank's part of a loaded model: modules, weights, KV blocks and states, and its share of each step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from hotswap.backends.torch import attention
from hotswap.backends.torch.forward import assemble
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.parallel import plan, stages
from hotswap.backends.torch.parallel.collectives import Boundary, Group
from hotswap.backends.torch.parallel.grid import RankPosition
from hotswap.backends.torch.parallel.messages import Bind, OpenCache, RestoreKV, SaveKV, Step
from hotswap.backends.torch.parallel.part import part_of
from hotswap.backends.torch.preflight import symptom_of_scores
from hotswap.backends.torch.recurrent.states import StatePool
from hotswap.backends.torch.routing import Choices, Comparison, HeldChoices, RecordedChoices
from hotswap.errors import UnsupportedModel

__all__ = ["Stage"]


class Stage:
    """One rank's part of a model, bound to its weights.

    Args:
        position: The position of the rank.
        command: The command to bind the model.
        weights: uint8, the memory of its weights; a CPU uses it in place.
        logits: `[slots, rows, num_logits]` in fp32, the shared memory for logits.
        group: The ranks of the stage.
        boundary: The connection to the stages before and after.
        device: The rank's device.
        invariant: Whether steps are batch-invariant.
    """

    def __init__(
        self,
        position: RankPosition,
        command: Bind,
        *,
        weights: Tensor,
        logits: Tensor,
        group: Group,
        boundary: Boundary,
        device: torch.device,
        invariant: bool,
    ) -> None:
        self._position, self._group, self._boundary, self._device = position, group, boundary, device
        self._skeleton = Skeleton(command.config, device)
        part = part_of(self._skeleton, position)
        self._layers = part.layers
        self._logits = logits
        self._embedding_size = int(self._skeleton.module.get_input_embeddings().embedding_dim)
        self._hidden_size = int(self._skeleton.config.get_text_config().hidden_size)
        self._skeleton.narrow(part.shapes)
        self._skeleton.bind(weights.to(device), command.specs)
        self._hidden_dtype = self._skeleton.dtype
        if position.grid.pp > 1:
            self._hidden_dtype = stages.residual_dtype(
                self._skeleton.module, self._skeleton.num_layers, self._skeleton.dtype
            )
        self._stage_input = stages.StageInput()
        if position.grid.tp > 1:
            plan.install(self._skeleton.module, group, part.whole)
        stages.install(self._skeleton.module, self._skeleton.num_layers, position, self._stage_input)
        self._invariant, self._linear_only = invariant, self._skeleton.linear_only
        self._cache: KVCache | None = None
        self._states: StatePool | None = None
        self._continuing = {mixer.layer for mixer in self._skeleton.mixers} & set(self._layers)
        self._choices: dict[int, Choices] = {}  # of a preflight, by the first KV block of the request
        self._comparison = Comparison()

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        """What a request keeps in each layer of the stage, for layers used so far."""
        seen, states = {} if self._cache is None else self._cache.layers, self._states
        if states is None:
            return tuple(seen[index] for index in self._layers if index in seen)
        without = LayerShape(kv_heads=0, key_dim=0, value_dim=0, dtype=self._skeleton.dtype)
        return tuple(replace(seen.get(index, without), states=states.shapes(index)) for index in self._layers)

    def open_cache(self, command: OpenCache) -> None:
        """Allocate KV blocks and states, and free existing ones."""
        self._cache = self._states = None
        self._choices, self._comparison = {}, Comparison()
        first, layers = self._layers.start, command.layers
        self._cache = KVCache(
            command.num_blocks, command.block_tokens, self._device, layers, first_layer=first
        )
        if self._skeleton.mixers:
            kept = [layer.states for layer in layers]
            self._states = StatePool(command.num_slots, self._device, kept, first_layer=first)
            self._states.build_kernels()

    def step(self, command: Step) -> None:
        """Compute this stage's share of a step.

        Raises:
            UnsupportedModel: in a preflight, this part of the model cannot be served exactly.
        """
        assert self._cache is not None, "the engine opens a cache before it steps"
        work, states = command.work, self._states
        self._cache.copy(work.copies)
        self._cache.clear(work.fresh)
        if states is not None:
            states.copy(work.restored)
        pieces = work.pieces
        batch = assemble(
            pieces, self._cache, invariant=self._invariant, linear_only=self._linear_only, states=states
        )
        num_tokens = sum(len(piece.tokens) for piece in pieces)
        embeds = self._enter(num_tokens, num_tokens if command.eager else batch.ids.shape[1])
        try:
            with self._held(command, batch.ids.shape[1]):
                logits = self._eager(command, embeds) if command.eager else batch.logits(self._model, embeds)
        except stages.StageEnd as end:
            self._leave(end.hidden[0, :num_tokens])
        else:
            self._put(logits, command.slot)
        finally:
            self._stage_input.hidden = None
        if states is not None:
            states.copy(work.saved)
        if command.is_preflight:
            self._check(None if command.eager else batch.step)

    def save_kv(self, command: SaveKV) -> bytes:
        """Return this stage's part of KV blocks or states."""
        assert self._cache is not None, "the engine opens a cache before it copies from it"
        if command.slot is None:
            out = torch.empty(len(command.blocks) * self._cache.block_bytes, dtype=torch.uint8)
            self._cache.save(command.blocks, out)
        else:
            out = torch.empty(0 if self._states is None else self._states.slot_bytes, dtype=torch.uint8)
            if self._states is not None:
                self._states.save(command.slot, out)
        return out.numpy().tobytes()

    def restore_kv(self, command: RestoreKV) -> None:
        """Fill this stage's part of KV blocks or states."""
        assert self._cache is not None, "the engine opens a cache before it copies to it"
        if not command.data:
            return
        data = torch.frombuffer(bytearray(command.data), dtype=torch.uint8)
        if command.slot is None:
            self._cache.restore(command.blocks, data)
        elif self._states is not None:
            self._states.restore(command.slot, data)

    def _check(self, step: attention.Step | None) -> None:
        """Refuse the model if routers disagree, or a layer did not do once in a step what layers of it do."""
        symptom = symptom_of_scores(self._comparison, self._skeleton.dtype)
        if step is not None and not symptom:
            symptom = self._symptom_of_layers(step)
        if symptom:
            kind = self._skeleton.config.model_type
            raise UnsupportedModel(f"The {kind!r} model {symptom}; serve it with another engine.")

    def _symptom_of_layers(self, step: attention.Step) -> str:
        called, num_layers = sorted(step.layers), len(self._layers)
        expected = list(self._layers) if step.states is None else sorted(set(called))
        if called != expected:
            return f"called attention {len(called)} times in a pass through {num_layers} layers of a stage"
        if step.states is not None and step.states.taken.keys() != self._continuing:
            num_mixers = len(self._continuing)
            return f"continues recurrent states in {len(step.states.taken)} of {num_mixers} layers of a stage"
        return ""

    def _held(self, command: Step, num_rows: int) -> AbstractContextManager[object]:
        """Record the choices of routers in a preflight with the model's own attention, or repeat them."""
        if not command.is_preflight:
            return nullcontext()
        pieces = command.work.pieces
        if command.eager:
            recorder = RecordedChoices(pieces[0].end)
            self._choices[pieces[0].blocks[0]] = recorder.choices
            return recorder
        parts = [(self._choices[piece.blocks[0]], range(piece.start, piece.end)) for piece in pieces]
        return HeldChoices(parts, num_rows, self._comparison)

    @property
    def _model(self) -> nn.Module:
        return cast("nn.Module", self._skeleton.module)

    def _enter(self, num_tokens: int, num_rows: int) -> Tensor | None:
        """Receive the stage's input; return a placeholder for the embeddings if it is not the first stage."""
        if self._position.is_first:
            return None
        hidden = self._boundary.receive(num_tokens, self._hidden_size, self._hidden_dtype)
        # Padding rows are not sent.
        self._stage_input.hidden = functional.pad(hidden, (0, 0, 0, num_rows - num_tokens))[None]
        return hidden.new_zeros(1, num_rows, self._embedding_size, dtype=self._skeleton.dtype)

    def _leave(self, hidden: Tensor) -> None:
        if hidden.dtype is not self._hidden_dtype or hidden.shape[-1] != self._hidden_size:
            raise UnsupportedModel(
                f"The hidden state between layers is {hidden.dtype} of width {hidden.shape[-1]}, which does "
                "not match the config; serve the model with pp=1."
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
        """Write logits, or this rank's slice of them, to the memory shared with the engine's process."""
        rows = self._logits[slot, : len(logits)]
        if logits.shape[-1] < rows.shape[-1]:
            rows = self._group.slice_of(rows)
        elif self._group.part:
            return
        rows.copy_(logits)
