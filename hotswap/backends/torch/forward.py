"""The half of a step that needs the model: rows of tokens in, logits out.

What is computed is told in plain values, so that the model may be in this process or in others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor, nn

from hotswap.backends.torch.adapters.places import Place
from hotswap.backends.torch.adapters.plan import adaptation
from hotswap.backends.torch.attention import Paged, Segment, Step, running
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.kv import KVCache, blocks_for
from hotswap.backends.torch.linear import LEAST_ROWS
from hotswap.backends.torch.products import RowInvariant
from hotswap.kernels.paged_attention import Rows

__all__ = ["Batch", "Forward", "LocalForward", "Piece", "Work", "assemble"]

# Keys gathered at once for a batch of decodes, in tokens: bounds the memory of the gather.
_GATHERED_TOKENS = 1 << 16
# Rows of a prompt that are computed together on a CPU: their scores lie in its cache.
_TILE_ROWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Neighbouring tokens of one request.

    Attributes:
        tokens: Their ids.
        start: The position of the first.
        blocks: The request's KV blocks, from its first token to the last of these at least.
        samples: Whether the logits of the last one are wanted.
        adapter: Where its adapter lies; `None` without one.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    adapter: Place | None = None

    @property
    def end(self) -> int:
        """The position after the last."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What one step computes.

    Attributes:
        pieces: The tokens, of at most one piece for each request.
        fresh: KV blocks that were handed out anew, to be cleared first.
        copies: What is copied from KV block to KV block before that.
    """

    pieces: tuple[Piece, ...]
    fresh: Sequence[int] = ()
    copies: Sequence[Copy] = ()


class Forward(ABC):
    """A model with its KV cache, wherever they are. One thread calls `submit` and `result`.

    Work is done in the order in which it was submitted. So a request may be cut into works that are under
    way together, and blocks may be handed on while works that write to them still are.

    Attributes:
        num_blocks: How many KV blocks there are.
        size_bytes: The memory they take.
        depth: How much work can be under way at once.
    """

    num_blocks: int
    size_bytes: int
    depth: int = 1

    @abstractmethod
    def submit(self, work: Work) -> None:
        """Begin some work; at most `depth` are under way."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the logits of the oldest work, `[pieces that sample, vocabulary]`, in the pieces' order.

        Valid until the next `submit`. Logits have the same bits in whatever order pieces come, where bits do
        not depend on the batch.
        """

    def improve(self) -> bool:
        """Do a small piece of what makes later work faster, between two steps; false if nothing is left."""
        return False


class LocalForward(Forward):
    """A model in this process; `chore` is what `improve` does, the rest is for `assemble`."""

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        *,
        invariant: bool,
        linear_only: bool = False,
        chore: Callable[[], bool] = lambda: False,
    ) -> None:
        self.num_blocks, self.size_bytes = cache.num_blocks, cache.size_bytes
        self.cache = cache
        self._model, self._chore = model, chore
        self._invariant, self._linear_only = invariant, linear_only
        self._work = Work(())

    def submit(self, work: Work) -> None:
        self._work = work

    def result(self) -> Tensor:
        self.cache.copy(self._work.copies)
        self.cache.clear(self._work.fresh)
        pieces = self._work.pieces
        batch = assemble(pieces, self.cache, invariant=self._invariant, linear_only=self._linear_only)
        return batch.logits(self._model)

    def improve(self) -> bool:
        return self._chore()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The tensors of one forward pass over a row of pieces.

    Attributes:
        ids: `[1, T]`.
        positions: `[1, T]`.
        keep: The rows whose logits are wanted, padded to the least number of rows.
        num_kept: How many of them are no padding.
        step: What the layers need to know.
        watched: Whether products that are not those of linear layers are to be rounded alike for any batch.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    num_kept: int
    step: Step
    watched: bool = False

    def logits(self, model: nn.Module, embeds: Tensor | None = None) -> Tensor:
        """Run the model and return `[pieces that sample, vocabulary]`, in order.

        With `embeds`, `[1, T, width]`, the model is given these in place of the ids.
        """
        start: dict[str, Tensor] = {"input_ids": self.ids} if embeds is None else {"inputs_embeds": embeds}
        with running(self.step), RowInvariant() if self.watched else nullcontext():
            # The mask of ones keeps transformers from taking the row for packed sequences of its own.
            out: Any = model(
                **start,
                position_ids=self.positions,
                attention_mask=torch.ones_like(self.ids),
                use_cache=False,
                logits_to_keep=self.keep,
            )
        return cast("Tensor", out.logits[0])[: self.num_kept]


def assemble(pieces: Sequence[Piece], cache: KVCache, *, invariant: bool, linear_only: bool = False) -> Batch:
    """Lay the pieces out in one row.

    Where blocks are gathered, pieces of one token attend in batches of neighbours: sort them by length, and
    little padding is gathered.

    Args:
        pieces: The tokens, of at most one piece for each request.
        cache: Where their keys and values lie.
        invariant: Whether logits have the same bits whatever shares the batch.
        linear_only: Whether linear layers are all that multiplies by weights: these do with `LEAST_ROWS`.
            Where they are not, the others are watched over, which costs time.
    """
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    keep: list[int] = []
    adapted: list[tuple[Place, range, int | None]] = []
    starts: list[int] = []
    for piece in pieces:
        starts.append(len(ids))
        span = range(piece.start, piece.end)
        ids += piece.tokens
        positions += span
        blocks += [piece.blocks[at // cache.block_tokens] for at in span]
        if piece.adapter is not None:
            rows = range(len(ids) - len(span), len(ids))
            adapted.append((piece.adapter, rows, len(keep) if piece.samples else None))
        if piece.samples:
            keep.append(len(ids) - 1)
    least = LEAST_ROWS if invariant else 0
    num_kept, padding = len(keep), [0] * (least - len(ids))
    keep += [0] * max(0, least - num_kept)
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
            adapters=adaptation(adapted, on),
            **_reading(pieces, starts, at, cache),
        ),
        watched=invariant and not linear_only,
    )


class _Reading(TypedDict, total=False):
    """How a step reads the cache: the fields of `Step` that say so."""

    paged: Paged
    segments: tuple[Segment, ...]
    order: Tensor


def _reading(pieces: Sequence[Piece], starts: Sequence[int], at: Tensor, cache: KVCache) -> _Reading:
    if cache.in_place:
        return {"paged": _paged(pieces, starts, at, cache)}
    segments, order = _segments(pieces, starts, cache)
    reading: _Reading = {"segments": segments}
    if order != sorted(order):
        reading["order"] = torch.tensor(order, device=cache.device)
    return reading


def _paged(pieces: Sequence[Piece], starts: Sequence[int], at: Tensor, cache: KVCache) -> Paged:
    """Say where each row's blocks lie, prompts in tiles."""
    tables = [_held(piece, cache) for piece in pieces]
    width = max(map(len, tables), default=0)
    tiles: list[tuple[int, int, int]] = []
    parts: list[range] = []
    for number, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
        end = start + len(piece.tokens)
        tiles += ((number, row, min(_TILE_ROWS, end - row)) for row in range(start, end, _TILE_ROWS))
        if parts and len(piece.tokens) == 1 == len(pieces[number - 1].tokens):
            parts[-1] = range(parts[-1].start, end)
        else:
            parts.append(range(start, end))
    num_rows = parts[-1].stop if parts else 0
    return Paged(
        rows=Rows(
            tables=_integers([[*table, *[0] * (width - len(table))] for table in tables]),
            tiles=_integers(tiles),
            order=torch.arange(num_rows, dtype=torch.int32),
        ),
        parts=[at[part.start : part.stop] for part in parts],
    )


def _integers(values: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _segments(
    pieces: Sequence[Piece], starts: Sequence[int], cache: KVCache
) -> tuple[tuple[Segment, ...], list[int]]:
    """Return what attends together, and the rows of each, one after the other: each prefill by itself."""
    decodes = [number for number, piece in enumerate(pieces) if len(piece.tokens) == 1]
    groups = _by_length(decodes, pieces, cache.block_tokens)
    groups += [[number] for number, piece in enumerate(pieces) if len(piece.tokens) > 1]
    segments: list[Segment] = []
    order: list[int] = []
    for numbers in groups:
        segments.append(_segment(len(order), [pieces[number] for number in numbers], cache))
        for number in numbers:
            order += range(starts[number], starts[number] + len(pieces[number].tokens))
    return tuple(segments), order


def _held(piece: Piece, cache: KVCache) -> Sequence[int]:
    """The blocks up to the piece's last token."""
    return piece.blocks[: blocks_for(piece.end, cache.block_tokens)]


def _by_length(decodes: Sequence[int], pieces: Sequence[Piece], block_tokens: int) -> list[list[int]]:
    """Put neighbours of similar length together.

    A batch is gathered as wide as its longest member; half that is the least a member may be.
    """
    groups: list[list[int]] = []
    longest = 0
    for number in decodes:
        end = pieces[number].end
        most = max(longest, end)
        joins = (
            bool(groups)
            and 2 * blocks_for(min(end, longest), block_tokens) >= blocks_for(most, block_tokens)
            and (len(groups[-1]) + 1) * most <= _GATHERED_TOKENS
        )
        if joins:
            groups[-1].append(number)
            longest = most
        else:
            groups.append([number])
            longest = end
    return groups


def _segment(start: int, group: Sequence[Piece], cache: KVCache) -> Segment:
    tables = [_held(piece, cache) for piece in group]
    spans = [range(piece.start, piece.end) for piece in group]
    return Segment(
        start=start,
        tables=tables,
        num_blocks=max(map(len, tables)),
        positions=torch.tensor([list(span) for span in spans], device=cache.device),
        ends=tuple(max(ends) + 1 for ends in zip(*spans, strict=True)),
    )
