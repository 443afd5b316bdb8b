"""Attention over paged keys and values, called by every layer of an unmodified transformers model.

A step is one row of tokens `[1, T]` made of segments: a batch of decodes, or one prefill chunk. Layers reach
`paged_attention` through transformers' attention interface; which step they belong to is known by a context
variable, so that any number of engines can step on threads of their own.

Batch invariance, where it is asked for: a row's result has the same bits whatever shares its batch and
however its prompt was cut. Three things make it so (He et al., Defeating Nondeterminism in LLM Inference,
2025): decode and prefill take the same kernels, matrix products have a least number of rows, and the product
with the values sums over chunks of keys that lie at fixed positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from hotswap.backends.torch.adapters.plan import Adaptation
from hotswap.backends.torch.device import multiplies_bf16
from hotswap.backends.torch.kv import KVCache, lines_of
from hotswap.backends.torch.rounding import keys_across
from hotswap.backends.torch.runs import Run
from hotswap.errors import UnsupportedModel

__all__ = [
    "IMPLEMENTATION",
    "MaskPattern",
    "Segment",
    "Step",
    "current",
    "even_blocks",
    "register",
    "running",
]

IMPLEMENTATION = "hotswap_paged"

# Longer sums are cut by the CPU's matrix libraries in ways that depend on their length: measured beyond 192
# terms in fp32 (MKL), and in bf16 beyond about 768 (oneDNN, with bf16 instructions) or already below 512
# (without them).
_SHORT_CHUNK, _LONG_CHUNK = 128, 512
# Rows of a request up to which the products of its chunks are taken together.
_FEW_ROWS = 64
# From so many chunks on a decode gathers whole ones, so that none is copied to be multiplied.
_MANY_CHUNKS = 8
# Floats of the CPU's widest vector.
_LANES = 16
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


def even_blocks(num_blocks: int, block_tokens: int) -> int:
    """How many blocks to gather for a decode that has `num_blocks`."""
    chunk = max(1, _LONG_CHUNK // block_tokens)
    return num_blocks if num_blocks < _MANY_CHUNKS * chunk else -(-num_blocks // chunk) * chunk


@dataclass(frozen=True, slots=True, eq=False)
class _Hidden:
    """Which scores are left out: `mask`, `[n, 1, queries, 1, keys - first]`, of the keys from `first` on."""

    mask: Tensor
    first: int

    def strike(self, scores: Tensor) -> None:
        """Leave them out of `[n, kv_heads, queries, group, keys]`."""
        scores[..., self.first :].masked_fill_(self.mask, float("-inf"))


class MaskPattern:
    """Which keys a query may see, as a function of absolute positions, for the layers that share it.

    transformers would build a mask of the row as if it were one sequence. It is asked for the *function*
    instead, so that windows and chunks are the model's own and need no reading of configs.
    """

    def __init__(self, function: MaskFunction) -> None:
        self._function = function
        self._cache: dict[tuple[int, int, int], _Hidden] = {}

    def of(self, segment: Segment, first: int, last: int, num_keys: int) -> _Hidden:
        """Return what the queries `first` to `last` of each request may not see of `num_keys` keys."""
        cached = self._cache.get((segment.start, first, num_keys))
        if cached is None:
            hidden = ~self.visible(segment, first, last, num_keys)
            since = _first_hidden(hidden)
            cached = _Hidden(hidden[:, None, :, None, since:], since)
            self._cache[segment.start, first, num_keys] = cached
        return cached

    def visible(self, segment: Segment, first: int, last: int, num_keys: int) -> Tensor:
        """Return `[n, last - first, num_keys]` bools for the queries `first` to `last` of each request."""
        queries = segment.positions[:, first:last, None]
        keys = torch.arange(num_keys, device=queries.device)
        zero = torch.zeros((), dtype=torch.long, device=queries.device)
        return self._function(zero, zero, queries, keys) & (keys <= queries)


def _first_hidden(hidden: Tensor) -> int:
    """The first key that a query may not see; 0 on devices that would have to be waited for."""
    if hidden.device.type != "cpu":
        return 0
    columns = hidden.flatten(0, -2).any(0)
    return int(columns.to(torch.uint8).argmax()) if bool(columns.any()) else len(columns)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Requests with the same number of query rows, which lie one after the other.

    Attributes:
        start: The first row of the segment.
        tables: The blocks of each request.
        num_blocks: What each is padded to with block 0.
        positions: `[n, m]`, the absolute position of each query.
        ends: The greatest position plus one among the first *i* + 1 queries, on the host.
        run: What is kept of them from step to step, where each has one query.
    """

    start: int
    tables: Sequence[Sequence[int]]
    num_blocks: int
    positions: Tensor
    ends: tuple[int, ...]
    run: Run | None = None
    _lines: dict[tuple[int, ...], Tensor] = field(default_factory=dict[tuple[int, ...], Tensor])

    def lines(self, heads: int) -> Tensor:
        """`[n * heads * num_blocks]`: where each head's blocks lie in pools of so many heads."""
        padded = ([*table, *[0] * (self.num_blocks - len(table))] for table in self.tables)
        return self._lines_of(padded, heads, ())

    def lines_of_one(self, heads: int, index: int, first: int) -> Tensor:
        """`[heads * blocks]`: the same of one request's own blocks from its block `first` on."""
        return self._lines_of([self.tables[index][first:]], heads, (index, first))

    def _lines_of(self, tables: Iterable[Sequence[int]], heads: int, which: tuple[int, ...]) -> Tensor:
        lines = self._lines.get((heads, *which))
        if lines is None:
            table = torch.tensor([list(table) for table in tables], device=self.positions.device)
            lines = self._lines[heads, *which] = lines_of(table, heads)
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
        segments: The rows that attend, one after the other; the others only pad.
        order: `[rows of the segments]`, where the rows are that the segments' follow in this order; `None` if
            they are in this order.
        min_rows: The least number of rows of a matrix product; 0 where bits may depend on the batch.
        adapters: Which rows have adapters; `None` if none has.
        layers: Which layers have called, in order.
    """

    cache: KVCache
    blocks: Tensor
    offsets: Tensor
    segments: tuple[Segment, ...]
    order: Tensor | None = None
    min_rows: int = 0
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
    heads = _Heads(query.shape[1], key.shape[1], scale, softcap, s_aux, step.min_rows)
    num_rows = query.shape[2]
    if step.order is not None:
        query, key, value = (part.index_select(2, step.order) for part in (query, key, value))
    out = query.new_zeros(num_rows, query.shape[1], value.shape[3])
    for segment in step.segments:
        rows = slice(segment.start, segment.start + segment.num_rows)
        keys, values = _read(
            step.cache, layer, segment, key[0, :, rows], value[0, :, rows], num_rows=heads.decode_rows
        )
        queries = query[0, :, rows].transpose(0, 1)
        out[rows] = heads.attend(queries, keys, values, segment, attention_mask, step.cache.block_tokens)
    if step.order is not None:
        out = torch.zeros_like(out).index_copy_(0, step.order, out[: len(step.order)])
    return out.unsqueeze(0), None


def _read(
    cache: KVCache, layer: int, segment: Segment, key: Tensor, value: Tensor, *, num_rows: int
) -> tuple[Tensor, Tensor]:
    """`[n, kv_heads, tokens, dim]` of a segment's blocks, to which `[kv_heads, rows, dim]` were appended."""
    heads = key.shape[0]

    def gather() -> tuple[Tensor, Tensor]:
        return cache.gather(layer, segment.lines(heads), segment.num_requests)

    def gather_one(index: int, first: int) -> tuple[Tensor, Tensor]:
        return cache.gather(layer, segment.lines_of_one(heads, index, first), 1)

    if segment.run is None:
        return gather()
    keys, values = key.transpose(0, 1), value.transpose(0, 1)
    tokens, across = segment.num_blocks * cache.block_tokens, keys_across(key.dtype, num_rows)
    return segment.run.read(layer, keys, values, tokens, gather, gather_one, across=across)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The arithmetic of one layer's heads; query heads that share a key head are folded into its rows."""

    num_heads: int
    kv_heads: int
    scale: float
    softcap: float | None
    sinks: Tensor | None
    min_rows: int

    @property
    def group(self) -> int:
        return self.num_heads // self.kv_heads

    @property
    def decode_rows(self) -> int:
        """Rows by which the keys of a request that decodes are multiplied."""
        return max(self.group, self.min_rows)

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
            # Whole blocks, so that rows are summed in lanes of the same width however a prompt is cut.
            end = -(-segment.ends[last - 1] // block_tokens) * block_tokens if m > 1 else keys.shape[2]
            hidden = pattern.of(segment, first, last, end)
            part = self._tile(folded[:, :, first:last], keys[:, :, :end], values[:, :, :end], hidden)
            tiles.append(part)
        out = torch.cat(tiles, 2) if len(tiles) > 1 else tiles[0]
        return out.transpose(1, 2).reshape(n * m, self.num_heads, -1)

    def _tile(self, queries: Tensor, keys: Tensor, values: Tensor, hidden: _Hidden) -> Tensor:
        """`[n, kv_heads, m, group, value_dim]` of queries `[n, kv_heads, m, group, key_dim]`."""
        n, kv_heads, m, group, dim = queries.shape
        rows = queries.reshape(n, kv_heads, m * group, dim)
        scores = self._product(rows, keys.transpose(-1, -2)).float().mul_(self.scale)
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores.view(n, kv_heads, m, group, -1)
        hidden.strike(scores)
        weights = self._softmax(scores).to(values.dtype).view(n, kv_heads, m * group, -1)
        return self._weigh(weights, values).view(n, kv_heads, m, group, -1)

    def _softmax(self, scores: Tensor) -> Tensor:
        if self.sinks is None:
            return torch.softmax(scores, -1)
        # The sink is one more key, whose weight is dropped. It brings a full vector's width of columns along,
        # so that the sum over the keys is still taken in the same lanes.
        columns = scores.new_full((*scores.shape[:-1], _LANES), float("-inf"))
        columns[..., 0] = self.sinks.float().view(1, self.kv_heads, 1, self.group)
        return torch.softmax(torch.cat([columns, scores], -1), -1)[..., _LANES:]

    def _weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        native = values.dtype is torch.bfloat16 and multiplies_bf16()
        num_keys, chunk = weights.shape[-1], _LONG_CHUNK if native else _SHORT_CHUNK
        if not self.min_rows or num_keys <= chunk:
            return self._product(weights, values)
        total, *others = self._chunk_products(weights, values, chunk)
        for part in others:  # one after the other: their number must not change the order
            total += part
        return total.to(values.dtype)

    def _chunk_products(self, weights: Tensor, values: Tensor, chunk: int) -> list[Tensor]:
        """The products of each chunk of keys, in fp32."""
        num_keys, parts = weights.shape[-1], list[Tensor]()
        whole = num_keys // chunk
        # Of a decode all at once, since they are small; but where values end elsewhere they would be copied.
        if (
            whole > 1
            and weights.shape[-2] <= _FEW_ROWS
            and values.stride(1) == whole * chunk * values.stride(2)
        ):
            first = slice(whole * chunk)
            rows = weights[..., first].reshape(*weights.shape[:-1], whole, chunk).transpose(2, 3)
            keyed = values[:, :, first].reshape(*values.shape[:2], whole, chunk, -1)
            parts += self._product(rows, keyed).float().unbind(2)
        for at in range(len(parts) * chunk, num_keys, chunk):
            keys = slice(at, at + chunk)
            parts.append(self._product(weights[..., keys], values[..., keys, :]).float())
        return parts

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """`left @ right` with at least `min_rows` rows: fewer would take a kernel of another rounding."""
        rows = left.shape[-2]
        if rows >= self.min_rows:
            return torch.matmul(left, right)
        more = functional.pad(left, (0, 0, 0, self.min_rows - rows))
        return torch.matmul(more, right)[..., :rows, :]
