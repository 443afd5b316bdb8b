"""Random steps over pools of KV blocks, for tests of attention on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import torch
from torch import Tensor

from hotswap.kernels.paged_attention_gpu import Rows, Visible, rows_per_tile

__all__ = ["MASKS", "TOLERANCE", "Layer", "Step", "make_step", "relative_error", "tables_of"]

# Of the norm of a result; weights and results are rounded to the dtype of the values.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}

MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda query, key: key <= query,
    "window": lambda query, key: (key <= query) & (query - key < 24),
    "chunks": lambda query, key: (key <= query) & (query // 20 == key // 20),
    "first and last": lambda query, key: (key <= query) & ((key < 4) | (query - key < 9)),
    "blind": lambda query, key: (key <= query) & (query % 3 > 0),
}


@dataclass(frozen=True)
class Layer:
    """Heads and widths of a layer of attention."""

    heads: int = 8
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32
    block_tokens: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, eq=False)
class Step:
    """The input of `attend`.

    Attributes:
        visible: `[T, num_keys]` bools.
    """

    layer: Layer
    queries: Tensor
    keys: Tensor
    values: Tensor
    rows: Rows
    visible: Tensor
    sinks: Tensor | None

    def to(self, device: torch.device | str) -> Step:
        """Return the same on a device."""
        rows = Rows(
            self.rows.tables.to(device),
            self.rows.singles.to(device),
            self.rows.tiles.to(device),
            self.rows.is_padded,
        )
        moved = {name: getattr(self, name).to(device) for name in ("queries", "keys", "values", "visible")}
        sinks = None if self.sinks is None else self.sinks.to(device)
        return replace(self, rows=rows, sinks=sinks, **moved)

    @property
    def form(self) -> Visible:
        """What each row sees, in the form that `attend` takes."""
        return Visible.of(self.visible)


def tables_of(pieces: Sequence[tuple[int, int]], block_tokens: int, free: list[int]) -> list[list[int]]:
    """Take blocks for requests, each with a number of tokens before its rows, and of rows."""
    return [[free.pop() for _ in range(-(-(before + count) // block_tokens))] for before, count in pieces]


def make_step(
    layer: Layer,
    pieces: Sequence[tuple[int, int]],
    *,
    mask: str = "causal",
    seed: int = 1,
    padding: tuple[int, int, int] = (0, 0, 0),
    poison: float = float("nan"),
    spare: int = 3,
) -> Step:
    """Return a step of requests, each with a number of tokens before its rows, and of rows.

    Rows are in random order of requests. Slots without a token are poisoned in keys and values.

    Args:
        layer: The layer.
        pieces: The requests.
        mask: Of `MASKS`.
        seed: Of the random numbers.
        padding: Additional rows, single tiles and tiles of many, which belong to no request.
        poison: What is in slots without a token.
        spare: Blocks that no request has.
    """
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    tokens = layer.block_tokens
    num_blocks = 1 + spare + sum(-(-(before + count) // tokens) for before, count in pieces)
    free = random.sample(range(1, num_blocks), num_blocks - 1)
    tables = tables_of(pieces, tokens, free)
    keys, values = (
        torch.full((num_blocks, layer.kv_heads, tokens, dim), poison)
        for dim in (layer.key_dim, layer.value_dim)
    )
    for table, (before, count) in zip(tables, pieces, strict=True):
        for pool in (keys, values):
            content = torch.randn(before + count, layer.kv_heads, pool.shape[3], generator=generator)
            at = torch.arange(before + count)
            pool[torch.tensor(table)[at // tokens], :, at % tokens] = content
    num_rows = sum(count for _, count in pieces) + padding[0]
    queries = 2 * torch.randn(layer.heads, num_rows, layer.key_dim, generator=generator)
    keys, values = keys.to(layer.dtype), values.to(layer.dtype)
    most = rows_per_tile(layer.heads, keys, values)
    singles: list[tuple[int, int, int]] = []
    tiles: list[tuple[int, int, int]] = []
    positions = torch.zeros(num_rows, dtype=torch.long)
    row = 0
    for number, (before, count) in enumerate(pieces):
        positions[row : row + count] = torch.arange(before, before + count)
        if count == 1:
            singles.append((number, row, 1))
        else:
            tiles += [(number, at, min(most, row + count - at)) for at in range(row, row + count, most)]
        row += count
    singles += [(0, 0, 0)] * padding[1]
    tiles += [(0, 0, 0)] * padding[2]
    random.shuffle(singles)
    random.shuffle(tiles)
    width = max(map(len, tables))
    num_keys = max(before + count for before, count in pieces)
    visible = MASKS[mask](positions[:, None], torch.arange(num_keys)[None])
    return Step(
        layer=layer,
        queries=queries.to(layer.dtype).transpose(0, 1),
        keys=keys,
        values=values,
        rows=Rows(
            _integers([[*table, *[0] * (width - len(table))] for table in tables], width),
            _integers(singles, 3),
            _integers(tiles, 3),
            padding[0] > 0,
        ),
        visible=visible,
        sinks=torch.randn(layer.heads, generator=generator).to(layer.dtype) if layer.has_sinks else None,
    )


def relative_error(found: Tensor, right: Tensor) -> float:
    """Return the largest error of a row and head, relative to its norm; infinite if there is a NaN.

    Norms below a quarter of their mean count as that much: zeros have no relative error.
    """
    if not right.numel():
        return 0.0
    error, norms = (found.cpu().double() - right).norm(dim=-1), right.norm(dim=-1)
    worst = float((error / norms.clamp(min=float(norms.mean()) / 4 + 1e-30)).max())
    return worst if worst == worst else float("inf")


def _integers(rows: Sequence[Sequence[int]], width: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), width)
