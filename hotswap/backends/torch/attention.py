"""Attention over paged keys and values, called by every layer of an unmodified transformers model.

A step is one row of tokens `[1, T]`, those of a request side by side. Layers reach
`paged_attention` through transformers' attention interface; which step they belong to is known by a context
variable, so that any number of engines can step on threads of their own.

On a CPU a kernel of hotswap's own reads the blocks where they lie, and gives a row the same bits whatever
shares its batch and however its prompt was cut (`hotswap.kernels.paged_attention`). On other devices the
blocks of a segment are gathered, and PyTorch multiplies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from hotswap.backends.torch.adapters.plan import Adaptation
from hotswap.backends.torch.kv import KVCache, lines_of
from hotswap.errors import UnsupportedModel
from hotswap.kernels.paged_attention import DTYPES, Rows, Seen, attend

__all__ = [
    "IMPLEMENTATION",
    "MaskPattern",
    "Paged",
    "Segment",
    "Step",
    "current",
    "register",
    "running",
]

IMPLEMENTATION = "hotswap_paged"

# Scores of one tile of queries, in elements: 16 MiB of fp32.
_TILE_SCORES = 4 << 20

# Arguments that models pass along and that change nothing here.
_HARMLESS = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "layer_idx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "sliding_window",
        "use_cache",
    }
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskPattern:
    """Which keys a query may see, as a function of absolute positions, for the layers that share it.

    transformers would build a mask of the row as if it were one sequence. It is asked for the *function*
    instead, so that windows and chunks are the model's own and need no reading of configs.
    """

    def __init__(self, function: MaskFunction) -> None:
        self._function = function
        self._hidden: dict[tuple[int, int, int], Tensor] = {}
        self._seen: Seen | None = None

    def hidden(self, segment: Segment, first: int, last: int, num_keys: int) -> Tensor:
        """Return `[n, 1, last - first, 1, num_keys]`: what these queries of each request may not see."""
        hidden = self._hidden.get((segment.start, first, num_keys))
        if hidden is None:
            hidden = ~self.visible(segment.positions[:, first:last], num_keys)[:, None, :, None]
            self._hidden[segment.start, first, num_keys] = hidden
        return hidden

    def seen(self, paged: Paged) -> Seen:
        """Return what each row of a step may see; the pattern is one step's."""
        if self._seen is None:
            self._seen = _seen(self, paged)
        return self._seen

    def visible(self, positions: Tensor, num_keys: int) -> Tensor:
        """Return `[..., num_keys]` bools for queries at `[...]` positions."""
        queries = positions[..., None]
        keys = torch.arange(num_keys, device=queries.device)
        zero = torch.zeros((), dtype=torch.long, device=queries.device)
        return self._function(zero, zero, queries, keys) & (keys <= queries)


def _seen(pattern: MaskPattern, paged: Paged) -> Seen:
    """Ask a pattern about each part of a step. Most let a query see all from one key to another."""
    firsts, lasts, hidden = list[Tensor](), list[Tensor](), list[Tensor]()
    all_in_one = True
    for positions in paged.parts:
        num_keys = int(positions.max()) + 1
        visible = pattern.visible(positions, num_keys)
        shown = visible.to(torch.uint8)
        first, last = shown.argmax(1), num_keys - shown.flip(1).argmax(1)
        all_in_one = all_in_one and torch.equal(visible.sum(1), last - first)
        firsts.append(first)
        lasts.append(last)
        hidden.append(~visible)
    mask = None if all_in_one else _beneath(hidden)
    return Seen(torch.cat(firsts).int(), torch.cat(lasts).int(), mask)


def _beneath(parts: Sequence[Tensor]) -> Tensor:
    """Matrices one beneath the other, filled up on the right."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([functional.pad(part, (0, width - part.shape[1])) for part in parts])


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """The rows of a step as the kernel for CPUs takes them.

    Attributes:
        rows: Where the blocks of each row's request lie.
        parts: The positions of all rows, in their order, in parts that are asked about together.
    """

    rows: Rows
    parts: Sequence[Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Requests with the same number of query rows, which lie one after the other.

    Attributes:
        start: The first row of the segment.
        tables: The blocks of each request.
        num_blocks: What each is padded to with block 0.
        positions: `[n, m]`, the absolute position of each query.
        ends: The greatest position plus one among the first *i* + 1 queries, on the host.
    """

    start: int
    tables: Sequence[Sequence[int]]
    num_blocks: int
    positions: Tensor
    ends: tuple[int, ...]
    _lines: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def lines(self, heads: int) -> Tensor:
        """`[n * heads * num_blocks]`: where each head's blocks lie in pools of so many heads."""
        lines = self._lines.get(heads)
        if lines is None:
            padded = [[*table, *[0] * (self.num_blocks - len(table))] for table in self.tables]
            table = torch.tensor(padded, device=self.positions.device)
            lines = self._lines[heads] = lines_of(table, heads)
        return lines

    @property
    def num_requests(self) -> int:
        """*n*."""
        return self.positions.shape[0]

    @property
    def num_queries(self) -> int:
        """*m*, of each request."""
        return self.positions.shape[1]

    @property
    def num_rows(self) -> int:
        """Rows of the step that the segment takes."""
        return self.positions.numel()


@dataclass(slots=True, eq=False)
class Step:
    """Everything the layers of one forward pass need to know of the batch.

    Attributes:
        cache: Where keys and values are appended and read.
        blocks: `[T]`, the block that each row's key and value go to; 0 for padding.
        offsets: `[T]`, the slot within that block.
        paged: The rows that attend, on a CPU; the others only pad.
        segments: The same on other devices, one after the other.
        order: `[rows of the segments]`, where the rows are that the segments' follow in this order; `None` if
            they are in this order.
        adapters: Which rows have adapters; `None` if none has.
        layers: Which layers have called, in order.
    """

    cache: KVCache
    blocks: Tensor
    offsets: Tensor
    paged: Paged | None = None
    segments: tuple[Segment, ...] = ()
    order: Tensor | None = None
    adapters: Adaptation | None = None
    layers: list[int] = field(default_factory=list[int])


_STEP: ContextVar[Step | None] = ContextVar("hotswap_step", default=None)


@contextmanager
def running(step: Step) -> Generator[None]:
    """Make `step` the one that layers called on this thread belong to."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current() -> Step | None:
    """Return the step that runs on this thread; `None` outside one, as in a model's own eager pass."""
    return _STEP.get()


def register() -> None:
    """Make the implementation known to transformers; again changes nothing."""
    attention: Any = AttentionInterface  # untyped there
    masks: Any = AttentionMaskInterface
    attention.register(IMPLEMENTATION, paged_attention)
    masks.register(IMPLEMENTATION, _mask_pattern)


def _mask_pattern(*, mask_function: MaskFunction, **_: object) -> MaskPattern:
    return MaskPattern(mask_function)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: MaskPattern | Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Append the step's keys and values to the cache and attend to all that it holds for each request.

    Args:
        module: The layer; its `layer_idx` names it.
        query: `[1, heads, T, key_dim]`.
        key: `[1, kv_heads, T, key_dim]`.
        value: `[1, kv_heads, T, value_dim]`.
        attention_mask: The pattern that transformers' mask builder returned.
        scaling: The factor of the scores; `key_dim ** -0.5` if `None`.
        softcap: Scores are `softcap * tanh(scores / softcap)`.
        s_aux: `[heads]`, the logit of an attention sink.
        others: Must be of the kinds known to change nothing.

    Returns:
        `[1, T, heads, value_dim]`, zero in rows that only pad, and no weights.
    """
    step = _STEP.get()
    if step is None:
        raise RuntimeError(f"{IMPLEMENTATION!r} attention is for engine steps only.")
    if not isinstance(attention_mask, MaskPattern):
        raise UnsupportedModel(
            f"{type(module).__name__} builds its attention mask itself, which cannot be followed when "
            "requests share a row; serve the model with another engine."
        )
    if unknown := {name for name, given in others.items() if given is not None} - _HARMLESS:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {sorted(unknown)} to attention, which would be ignored; "
            "serve the model with another engine."
        )
    layer = int(getattr(module, "layer_idx"))  # noqa: B009 - nn.Module knows only tensors and modules
    step.layers.append(layer)
    step.cache.write(layer, key, value, step.blocks, step.offsets)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if step.paged is None:
        heads = _Heads(query.shape[1], key.shape[1], scale, softcap, s_aux)
        return _gathered(step, layer, heads, query, attention_mask), None
    if key.dtype not in DTYPES:
        raise UnsupportedModel(
            f"{type(module).__name__} computes in {key.dtype} on a CPU; give float32 weights."
        )
    keys, values = step.cache.pools(layer)
    seen = attention_mask.seen(step.paged)
    out = attend(
        query[0].transpose(0, 1),
        keys,
        values,
        step.paged.rows,
        seen,
        scale=scale,
        softcap=softcap,
        sinks=s_aux,
    )
    return out.to(query.dtype).unsqueeze(0), None


def _gathered(step: Step, layer: int, heads: _Heads, query: Tensor, pattern: MaskPattern) -> Tensor:
    """`[1, T, heads, value_dim]` by way of gathering what the blocks of each segment hold."""
    num_rows, value_dim = query.shape[2], step.cache.layers[layer].value_dim
    if step.order is not None:
        query = query.index_select(2, step.order)
    out = query.new_zeros(num_rows, query.shape[1], value_dim)
    for segment in step.segments:
        rows = slice(segment.start, segment.start + segment.num_rows)
        keys, values = step.cache.gather(layer, segment.lines(heads.kv_heads), segment.num_requests)
        queries = query[0, :, rows].transpose(0, 1)
        out[rows] = heads.attend(queries, keys, values, segment, pattern, step.cache.block_tokens)
    if step.order is not None:
        out = torch.zeros_like(out).index_copy_(0, step.order, out[: len(step.order)])
    return out.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The arithmetic of one layer's heads; query heads that share a key head are folded into its rows."""

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
        pattern: MaskPattern,
        block_tokens: int,
    ) -> Tensor:
        """`[num_rows, heads, value_dim]` of a segment, in tiles that bound the memory of the scores."""
        n, m = segment.num_requests, segment.num_queries
        tile = max(16, _TILE_SCORES // (n * self.num_heads * keys.shape[2]))
        tiles: list[Tensor] = []
        folded = queries.reshape(n, m, self.kv_heads, self.group, -1).transpose(1, 2)
        for first, last in itertools.pairwise((*range(0, m, tile), m)):
            end = -(-segment.ends[last - 1] // block_tokens) * block_tokens if m > 1 else keys.shape[2]
            hidden = pattern.hidden(segment, first, last, end)
            part = self._tile(folded[:, :, first:last], keys[:, :, :end], values[:, :, :end], hidden)
            tiles.append(part)
        out = torch.cat(tiles, 2) if len(tiles) > 1 else tiles[0]
        return out.transpose(1, 2).reshape(n * m, self.num_heads, -1)

    def _tile(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
        """`[n, kv_heads, m, group, value_dim]` of queries `[n, kv_heads, m, group, key_dim]`."""
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
        # The sink is one more key, whose weight is dropped.
        sinks = self.sinks.float().view(1, self.kv_heads, 1, self.group, 1)
        column = sinks.expand(*scores.shape[:-1], 1)
        return torch.softmax(torch.cat([column, scores], -1), -1)[..., 1:]
