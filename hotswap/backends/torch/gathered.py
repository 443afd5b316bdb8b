"""Attention of a step on devices without a kernel for it: KV blocks are gathered, and PyTorch multiplies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from hotswap.backends.torch.kv import KVCache, blocks_for, head_block_indices
from hotswap.backends.torch.pieces import Piece

__all__ = ["Gathering", "Heads", "Segment"]

# Scores of one tile of queries, in elements: 16 MiB of fp32.
_TILE_SCORES = 4 << 20
# The maximum number of keys gathered at once for a batch of decodes, in tokens; bounds the gather's memory.
_GATHERED_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Requests with the same number of query rows, contiguous in the step.

    Attributes:
        start: The first row of the segment.
        tables: The block table of each request.
        num_blocks: The length to which each table is padded with block 0.
        positions: `[n, m]`, the absolute position of each query.
        ends: The greatest position plus one among the first *i* + 1 queries, on the host.
    """

    start: int
    tables: Sequence[Sequence[int]]
    num_blocks: int
    positions: Tensor
    ends: tuple[int, ...]
    _block_indices: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def block_indices(self, heads: int) -> Tensor:
        """Return `[n * heads * num_blocks]`: the index of each head's blocks in pools with `heads` heads."""
        indices = self._block_indices.get(heads)
        if indices is None:
            padded = [[*table, *[0] * (self.num_blocks - len(table))] for table in self.tables]
            table = torch.tensor(padded, device=self.positions.device)
            indices = self._block_indices[heads] = head_block_indices(table, heads)
        return indices

    @property
    def num_requests(self) -> int:
        """*n*, the requests of the segment."""
        return self.positions.shape[0]

    @property
    def num_queries(self) -> int:
        """*m*, the queries of each request."""
        return self.positions.shape[1]

    @property
    def num_rows(self) -> int:
        """The number of rows of the step in this segment."""
        return self.positions.numel()


Hidden: TypeAlias = Callable[[Segment, int, int, int], Tensor]


class Gathering:
    """The rows of a step as contiguous segments, made when the first layer needs them.

    Neighbouring pieces of one token attend in one batch: pieces sorted by length need less padding.

    Args:
        pieces: The pieces of the step.
        starts: The first row of each.
        cache: The KV cache.
    """

    def __init__(self, pieces: Sequence[Piece], starts: Sequence[int], cache: KVCache) -> None:
        self._pieces, self._starts, self._cache = pieces, starts, cache
        self._segments: tuple[Segment, ...] | None = None
        self._order: Tensor | None = None

    def attend(self, layer: int, heads: Heads, query: Tensor, hidden: Hidden) -> Tensor:
        """Return `[1, T, heads, value_dim]`, zero in padding rows.

        Args:
            layer: The layer.
            heads: Its heads.
            query: `[1, heads, T, key_dim]`.
            hidden: The keys that are masked for queries of a segment; see `MaskPattern.hidden`.
        """
        if self._segments is None:
            self._segments, order = _segments(self._pieces, self._starts, self._cache)
            if order != sorted(order):
                self._order = torch.tensor(order, device=self._cache.device)
        cache, order_of_rows = self._cache, self._order
        num_rows, value_dim = query.shape[2], cache.layers[layer].value_dim
        if order_of_rows is not None:
            query = query.index_select(2, order_of_rows)
        out = query.new_zeros(num_rows, query.shape[1], value_dim)
        for segment in self._segments:
            rows = slice(segment.start, segment.start + segment.num_rows)
            keys, values = cache.gather(layer, segment.block_indices(heads.kv_heads), segment.num_requests)
            queries = query[0, :, rows].transpose(0, 1)
            out[rows] = heads.attend(queries, keys, values, segment, hidden, cache.block_tokens)
        if order_of_rows is not None:
            out = torch.zeros_like(out).index_copy_(0, order_of_rows, out[: len(order_of_rows)])
        return out.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one layer in PyTorch; query heads that share a key head are folded into its rows."""

    num_heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    sinks: Tensor | None

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        segment: Segment,
        hidden: Hidden,
        block_tokens: int,
    ) -> Tensor:
        """Return `[num_rows, heads, value_dim]` of a segment; tiles bound the memory of the scores."""
        n, m = segment.num_requests, segment.num_queries
        tile = max(16, _TILE_SCORES // (n * self.num_heads * keys.shape[2]))
        tiles: list[Tensor] = []
        folded = queries.reshape(n, m, self.kv_heads, self.group, -1).transpose(1, 2)
        for first, last in itertools.pairwise((*range(0, m, tile), m)):
            end = -(-segment.ends[last - 1] // block_tokens) * block_tokens if m > 1 else keys.shape[2]
            masked = hidden(segment, first, last, end)
            part = self._tile(folded[:, :, first:last], keys[:, :, :end], values[:, :, :end], masked)
            tiles.append(part)
        out = torch.cat(tiles, 2) if len(tiles) > 1 else tiles[0]
        return out.transpose(1, 2).reshape(n * m, self.num_heads, -1)

    def _tile(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """Return `[n, kv_heads, m, group, value_dim]` for queries `[n, kv_heads, m, group, key_dim]`."""
        n, kv_heads, m, group, dim = queries.shape
        rows = queries.reshape(n, kv_heads, m * group, dim)
        scores = torch.matmul(rows, keys.transpose(-1, -2)).float().mul_(self.scale)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.view(n, kv_heads, m, group, -1)
        scores.masked_fill_(hidden, float("-inf"))
        weights = self._softmax(scores).to(values.dtype).view(n, kv_heads, m * group, -1)
        return torch.matmul(weights, values).view(n, kv_heads, m, group, -1)

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.sinks is None:
            return torch.softmax(scores, -1)
        # The sink is an additional key, whose weight is dropped.
        sinks = self.sinks.float().view(1, self.kv_heads, 1, self.group, 1)
        column = sinks.expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([column, scores], -1), -1)[..., 1:]


def _segments(
    pieces: Sequence[Piece], starts: Sequence[int], cache: KVCache
) -> tuple[tuple[Segment, ...], list[int]]:
    """Return the segments of a step and their rows; each prefill is its own segment."""
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


def _by_length(decodes: Sequence[int], pieces: Sequence[Piece], block_tokens: int) -> list[list[int]]:
    """Group neighbouring decodes of similar length.

    A group is gathered with the length of its longest member; every member has at least half of it.
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
    tables = [piece.blocks_up_to_end(cache.block_tokens) for piece in group]
    spans = [range(piece.start, piece.end) for piece in group]
    return Segment(
        start=start,
        tables=tables,
        num_blocks=max(map(len, tables)),
        positions=torch.tensor([list(span) for span in spans], device=cache.device),
        ends=tuple(max(ends) + 1 for ends in zip(*spans, strict=True)),
    )
