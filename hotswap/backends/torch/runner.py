"""A model, its KV cache and its batcher: one `step` after another."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.attention import Segment, Step, running
from hotswap.backends.torch.batcher import Batcher, Chunk, Sequence
from hotswap.backends.torch.kv import KVCache, blocks_for
from hotswap.backends.torch.sampling import choose
from hotswap.request import FinishReason

__all__ = ["Batch", "Report", "Runner", "Sampled", "assemble", "least_rows"]

# Keys gathered at once for a batch of decodes, in tokens: bounds the scratch memory of the gather.
_GATHERED_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that a step brought forth."""

    ticket: int
    token: int
    index: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Report:
    """What the worker tells its engine: the tokens of a step, and how the books stand after it."""

    sampled: tuple[Sampled, ...] = ()
    num_running: int = 0
    num_free_blocks: int = 0
    num_preempted: int = 0


class Runner:
    """Runs the requests of one loaded model; belongs to one thread."""

    def __init__(self, model: nn.Module, cache: KVCache, batcher: Batcher, *, min_rows: int) -> None:
        self._model, self._cache, self._min_rows = model, cache, min_rows
        self.batcher = batcher

    @property
    def idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not self.batcher.running and not self.batcher.waiting

    def report(self, sampled: tuple[Sampled, ...] = ()) -> Report:
        """Return the books as they stand, with the tokens of a step."""
        return Report(
            sampled, len(self.batcher.running), self.batcher.blocks.num_free, self.batcher.num_preempted
        )

    def step(self) -> Report:
        """Compute one batch and return the tokens it brought forth."""
        chunks, fresh = self.batcher.schedule()
        self._cache.clear(fresh)
        chunks = sorted(chunks, key=_length, reverse=True)
        logits = assemble(chunks, self._cache, min_rows=self._min_rows).logits(self._model)
        sampling = [chunk.sequence for chunk in chunks if chunk.is_last]
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        if not sampling:
            return self.report()
        tokens = choose(logits, [s.sampler for s in sampling], [s.index for s in sampling])
        return self.report(tuple(self._extend(s, token) for s, token in zip(sampling, tokens, strict=True)))

    def _extend(self, sequence: Sequence, token: int) -> Sampled:
        index = sequence.index
        finish_reason = sequence.append(token)
        if finish_reason is not None:
            self.batcher.remove(sequence)
        return Sampled(sequence.ticket, token, index, finish_reason)


def least_rows(device: torch.device, threads: int, dtype: torch.dtype) -> int:
    """The least number of rows at which a matrix product on the CPU no longer rounds by its number of rows.

    Measured: fp32 takes another kernel below 4 rows, also for a part of the rows where several threads share
    fewer than 12; bf16 for a single row. 0 on other devices, where no such number is known.
    """
    if device.type != "cpu":
        return 0
    return 4 if threads == 1 or dtype is torch.bfloat16 else 12


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of one forward pass over a row of chunks.

    Attributes:
        ids: `[1, T]`.
        positions: `[1, T]`.
        keep: The rows whose logits are wanted, padded to the least number of rows.
        num_kept: How many of them are no padding.
        step: What the layers need to know.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    num_kept: int
    step: Step

    def logits(self, model: nn.Module) -> Tensor:
        """Run the model and return `[chunks that sample, vocabulary]`, in order."""
        with running(self.step):
            # The mask of ones keeps transformers from taking the row for packed sequences of its own.
            out: Any = model(
                input_ids=self.ids,
                position_ids=self.positions,
                attention_mask=torch.ones_like(self.ids),
                use_cache=False,
                logits_to_keep=self.keep,
            )
        return cast("Tensor", out.logits[0])[: self.num_kept]


def assemble(chunks: Items[Chunk], cache: KVCache, *, min_rows: int) -> Batch:
    """Lay the chunks out in one row of at least `min_rows` tokens.

    Neighbouring chunks of one token are batched: sort them by length, so that little padding is gathered.
    """
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    keep: list[int] = []
    segments: list[Segment] = []
    for group in _groups(chunks, cache.block_tokens):
        segments.append(_segment(len(ids), group, cache))
        for chunk in group:
            span = range(chunk.sequence.num_computed, chunk.end)
            ids += chunk.sequence.tokens[span.start : span.stop]
            positions += span
            blocks += [chunk.sequence.blocks[at // cache.block_tokens] for at in span]
            if chunk.is_last:
                keep.append(len(ids) - 1)
    num_kept, padding = len(keep), [0] * max(0, min_rows - len(ids))
    keep += [0] * max(0, min_rows - num_kept)
    on = cache.device
    at = torch.tensor(positions + padding, device=on)
    return Batch(
        ids=torch.tensor([ids + padding], device=on),
        positions=at[None],
        keep=torch.tensor(keep, dtype=torch.long, device=on),
        num_kept=num_kept,
        step=Step(
            cache=cache,
            blocks=torch.tensor(blocks + padding, device=on),
            offsets=at % cache.block_tokens,
            segments=tuple(segments),
            min_rows=min_rows,
        ),
    )


def _length(chunk: Chunk) -> tuple[bool, int]:
    """Decodes before prefills, the longest first."""
    return (chunk.num_tokens == 1, chunk.end)


def _groups(chunks: Items[Chunk], block_tokens: int) -> list[list[Chunk]]:
    """Put decodes of similar length together, and each prefill chunk by itself.

    A batch is gathered as wide as its longest member; half that is the least a member may be.
    """
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        group = groups[-1] if groups else []
        joins = (
            bool(group)
            and group[0].num_tokens == chunk.num_tokens == 1
            and 2 * blocks_for(chunk.end, block_tokens) >= blocks_for(group[0].end, block_tokens)
            and (len(group) + 1) * group[0].end <= _GATHERED_TOKENS
        )
        if joins:
            group.append(chunk)
        else:
            groups.append([chunk])
    return groups


def _segment(start: int, group: list[Chunk], cache: KVCache) -> Segment:
    width = max(blocks_for(chunk.end, cache.block_tokens) for chunk in group)
    table = [chunk.sequence.blocks[:width] for chunk in group]
    spans = [range(chunk.sequence.num_computed, chunk.end) for chunk in group]
    return Segment(
        start=start,
        table=torch.tensor([row + [0] * (width - len(row)) for row in table], device=cache.device),
        positions=torch.tensor([list(span) for span in spans], device=cache.device),
        ends=tuple(max(ends) + 1 for ends in zip(*spans, strict=True)),
    )
