"""Attention over paged keys and values, called by every layer of an unmodified transformers model.

A step is one row of tokens `[1, T]`; the tokens of a request are contiguous. Layers call `paged_attention`
through transformers' attention interface. A context variable holds the current step, so that several
engines can run steps on their own threads.

On a CPU a kernel of hotswap reads the KV blocks in place. The bits of a row depend neither on the rest of the
batch nor on how its prompt was cut into chunks (`hotswap.kernels.paged_attention`). On other devices the
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
from hotswap.backends.torch.kv import KVCache, head_block_indices
from hotswap.backends.torch.recurrent.states import StepStates
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

# Arguments that models pass and that have no effect here.
_IGNORED_ARGUMENTS = frozenset(
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
    """The attention mask of one kind of layers, as a function of absolute positions.

    transformers would build the mask of a row as if the row were one sequence. hotswap takes transformers'
    mask *function* instead, so that windows and chunks are the model's own and no config is parsed for them.
    """

    def __init__(self, function: MaskFunction) -> None:
        self._function = function
        self._hidden: dict[tuple[int, int, int], Tensor] = {}
        self._seen: Seen | None = None

    def hidden(self, segment: Segment, first: int, last: int, num_keys: int) -> Tensor:
        """Return `[n, 1, last - first, 1, num_keys]` bools: the keys that are masked for these queries."""
        hidden = self._hidden.get((segment.start, first, num_keys))
        if hidden is None:
            hidden = ~self.visible(segment.positions[:, first:last], num_keys)[:, None, :, None]
            self._hidden[segment.start, first, num_keys] = hidden
        return hidden

    def seen(self, paged: Paged) -> Seen:
        """Return the key range and the mask of each row of a step. Cached: a pattern is used in one step."""
        if self._seen is None:
            self._seen = _seen(self, paged)
        return self._seen

    def visible(self, positions: Tensor, num_keys: int) -> Tensor:
        """Return `[..., num_keys]` bools: the keys that queries at `[...]` positions attend to."""
        queries = positions[..., None]
        keys = torch.arange(num_keys, device=queries.device)
        zero = torch.zeros((), dtype=torch.long, device=queries.device)
        return self._function(zero, zero, queries, keys) & (keys <= queries)


def _seen(pattern: MaskPattern, paged: Paged) -> Seen:
    """Evaluate a pattern for each part of a step; most patterns are one contiguous key range per query."""
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
    mask = None if all_in_one else _stack_padded(hidden)
    return Seen(torch.cat(firsts).int(), torch.cat(lasts).int(), mask)


def _stack_padded(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices along the rows, padded on the right to the widest."""
    width = max(part.shape[1] for part in parts)
    return torch.cat([functional.pad(part, (0, width - part.shape[1])) for part in parts])


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """The rows of a step in the form that the CPU kernel takes.

    Attributes:
        rows: The block tables of the rows' requests.
        parts: The positions of all rows, in order, in parts for which the mask is evaluated at once.
    """

    rows: Rows
    parts: Sequence[Tensor]


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


@dataclass(slots=True, eq=False)
class Step:
    """The metadata of one forward pass that its attention, recurrent and adapter layers read.

    Attributes:
        cache: The KV cache, to which keys and values are appended.
        blocks: `[T]`, the block to which each row's key and value are written; 0 for padding.
        offsets: `[T]`, the slot within that block.
        paged: On a CPU, the rows that attend; the other rows are padding.
        segments: On other devices, the same as contiguous segments.
        order: `[rows of the segments]`, the index in the step of each row of the segments; `None` if the
            segments have the step's order.
        adapters: The plan of the rows that have adapters; `None` if there are none.
        positions: `[T]`, the position of each row in its request.
        states: The recurrent states of the requests; `None` for models without any.
        lengths: `[T]`, by which RoPE factors are chosen; `None` where these depend on no length.
        layers: The layers that have called attention, in order.
    """

    cache: KVCache
    blocks: Tensor
    offsets: Tensor
    paged: Paged | None = None
    segments: tuple[Segment, ...] = ()
    order: Tensor | None = None
    adapters: Adaptation | None = None
    positions: Tensor | None = None
    states: StepStates | None = None
    lengths: Tensor | None = None
    layers: list[int] = field(default_factory=list[int])


_STEP: ContextVar[Step | None] = ContextVar("hotswap_step", default=None)


@contextmanager
def running(step: Step) -> Generator[None]:
    """Make `step` the current step of this thread within the block."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current() -> Step | None:
    """Return the current step of this thread; `None` outside of steps, as in a model's own eager pass."""
    return _STEP.get()


def register() -> None:
    """Register the implementation with transformers. Idempotent."""
    attention: Any = AttentionInterface  # untyped in transformers
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
    """Append the step's keys and values to the cache, and attend to all cached tokens of each request.

    Args:
        module: The layer, identified by its `layer_idx`.
        query: `[1, heads, T, key_dim]`.
        key: `[1, kv_heads, T, key_dim]`.
        value: `[1, kv_heads, T, value_dim]`.
        attention_mask: The pattern that transformers' mask builder returned.
        scaling: The factor of the scores; `key_dim ** -0.5` if `None`.
        softcap: Scores are `softcap * tanh(scores / softcap)`; `None` leaves them as they are.
        s_aux: `[heads]`, the logit of an attention sink; `None` without sinks.
        others: Arguments without effect here; any other argument that is not `None` is refused.

    Returns:
        `[1, T, heads, value_dim]`, zero in padding rows, and `None` in place of attention weights.

    Raises:
        UnsupportedModel: the layer builds its own mask or passes an argument that is not supported.
    """
    step = _STEP.get()
    if step is None:
        raise RuntimeError(f"{IMPLEMENTATION!r} attention is for engine steps only.")
    if not isinstance(attention_mask, MaskPattern):
        raise UnsupportedModel(
            f"{type(module).__name__} builds its attention mask itself, which is not possible when "
            "requests share a row; serve the model with another engine."
        )
    if unknown := {name for name, given in others.items() if given is not None} - _IGNORED_ARGUMENTS:
        raise UnsupportedModel(
            f"{type(module).__name__} passes {sorted(unknown)} to attention, which would be ignored; "
            "serve the model with another engine."
        )
    if not key.shape[2] == value.shape[2] == len(step.blocks):
        raise UnsupportedModel(
            f"{type(module).__name__} gives attention {key.shape[2]} keys for a row of {len(step.blocks)} "
            "tokens, of which the engine keeps one each; serve the model with another engine."
        )
    layer = int(getattr(module, "layer_idx"))  # noqa: B009 - nn.Module has types for tensors and modules only
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
    """Return `[1, T, heads, value_dim]`, with the blocks of each segment gathered first."""
    num_rows, value_dim = query.shape[2], step.cache.layers[layer].value_dim
    if step.order is not None:
        query = query.index_select(2, step.order)
    out = query.new_zeros(num_rows, query.shape[1], value_dim)
    for segment in step.segments:
        rows = slice(segment.start, segment.start + segment.num_rows)
        keys, values = step.cache.gather(layer, segment.block_indices(heads.kv_heads), segment.num_requests)
        queries = query[0, :, rows].transpose(0, 1)
        out[rows] = heads.attend(queries, keys, values, segment, pattern, step.cache.block_tokens)
    if step.order is not None:
        out = torch.zeros_like(out).index_copy_(0, step.order, out[: len(step.order)])
    return out.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class _Heads:
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
        pattern: MaskPattern,
        block_tokens: int,
    ) -> Tensor:
        """Return `[num_rows, heads, value_dim]` of a segment; tiles bound the memory of the scores."""
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
