"""Attention of a step on a GPU by Triton kernels that read KV blocks in place, and the trial of these."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from hotswap.backends.torch.gathered import Gathering, Heads
from hotswap.backends.torch.kv import KVCache, LayerShape
from hotswap.backends.torch.mask_pattern import MaskPattern
from hotswap.backends.torch.pieces import Piece
from hotswap.backends.torch.step_numbers import send
from hotswap.kernels.paged_attention_gpu import DTYPES, Rows, attend, rows_per_tile

__all__ = ["DeviceRows", "LayerKind", "attend_on_device", "is_right", "numbers_of"]

log = logging.getLogger("hotswap")

# The largest difference of the trial from PyTorch's products, relative to all results.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2**-8, torch.bfloat16: 2**-5}


@dataclass(slots=True, eq=False)
class DeviceRows:
    """The rows of a step in the form that the kernels take; their numbers are on the device.

    Attributes:
        tables: `[requests, width]`, int32: the block table of each request.
        singles: `[n, 3]`, int32: the tiles of requests with one row.
        positions: `[T]`: the position of each row.
        num_keys: The greatest position plus one.
        is_padded: Whether some rows belong to no request.
        spans: (request, first row, number of rows) of the requests with more rows, on the host.
        tiles: Their tiles, by the most rows of a tile.
    """

    tables: Tensor
    singles: Tensor
    positions: Tensor
    num_keys: int
    is_padded: bool
    spans: Sequence[tuple[int, int, int]]
    tiles: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def rows(self, most: int) -> Rows:
        """Return the rows with tiles of at most `most` rows."""
        tiles = self.tiles.get(most) if self.spans else self.singles[:0]
        if tiles is None:
            sent = send({}, {"tiles": _tiles(self.spans, most)}, self.tables.device)
            tiles = self.tiles[most] = sent["tiles"].view(-1, 3)
        return Rows(self.tables, self.singles, tiles, self.is_padded)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The integers of the rows of a step, on the host.

    Attributes:
        ints: What is sent to the device, by name.
        num_requests: The requests.
        num_keys: The greatest position plus one.
        spans: See `DeviceRows`.
    """

    ints: Mapping[str, Sequence[int]]
    num_requests: int
    num_keys: int
    spans: Sequence[tuple[int, int, int]]

    def rows(self, sent: Mapping[str, Tensor], positions: Tensor, *, is_padded: bool) -> DeviceRows:
        """Return the rows, once the integers are on the device."""
        tiles = {
            int(name.removeprefix(_TILES)): part.view(-1, 3)
            for name, part in sent.items()
            if name.startswith(_TILES)
        }
        tables = sent["tables"].view(self.num_requests, len(sent["tables"]) // max(1, self.num_requests))
        singles = sent["singles"].view(-1, 3)
        return DeviceRows(tables, singles, positions, self.num_keys, is_padded, self.spans, tiles)


_TILES = "tiles of "


def numbers_of(pieces: Sequence[Piece], starts: Sequence[int], kv: KVCache) -> Numbers:
    """Return the integers of a step: block tables, and tiles of the sizes that layers have asked for."""
    tables = [piece.blocks_up_to_end(kv.block_tokens) for piece in pieces]
    width = max(map(len, tables), default=0)
    singles: list[int] = []
    spans: list[tuple[int, int, int]] = []
    for number, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
        if len(piece.tokens) == 1:
            singles += (number, start, 1)
        else:
            spans.append((number, start, len(piece.tokens)))
    padded = [block for table in tables for block in (*table, *[0] * (width - len(table)))]
    ints: dict[str, Sequence[int]] = {"tables": padded, "singles": singles}
    ints |= {f"{_TILES}{most}": _tiles(spans, most) for most in sorted(kv.tile_rows)}
    return Numbers(ints, len(pieces), max((piece.end for piece in pieces), default=0), spans)


def _tiles(spans: Sequence[tuple[int, int, int]], most: int) -> list[int]:
    return [
        number
        for request, start, count in spans
        for row in range(start, start + count, most)
        for number in (request, row, min(most, start + count - row))
    ]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What the kernels of a layer are built for."""

    device: torch.device
    dtype: torch.dtype
    block_tokens: int
    num_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    softcap: float | None
    has_sinks: bool


def attend_on_device(
    kv: KVCache, layer: int, rows: DeviceRows, heads: Heads, query: Tensor, pattern: MaskPattern
) -> Tensor:
    """Return `[1, T, heads, value_dim]` for queries `[1, heads, T, key_dim]`, zero in padding rows."""
    keys, values = kv.pools(layer)
    most = rows_per_tile(heads.num_heads, keys, values)
    kv.tile_rows.add(most)
    out = attend(
        query[0].transpose(0, 1).to(keys.dtype),
        keys,
        values,
        rows.rows(most),
        pattern.words(rows.positions, rows.num_keys),
        scale=heads.scale,
        softcap=heads.softcap,
        sinks=heads.sinks,
    )
    return out.to(query.dtype).unsqueeze(0)


@cache
def is_right(kind: LayerKind) -> bool:
    """Whether the kernels of a layer can be built and agree with PyTorch on random numbers. Blocking.

    Tried once per process and kind, in the check of a load; steps use what was compiled then. If not, a
    warning says why, and the layer gathers its blocks.
    """
    if kind.dtype not in DTYPES:
        return False
    try:
        error = max(_error(kind, pieces) for pieces in _TRIALS)
        if error <= _TOLERANCE[kind.dtype]:
            return True
        why = f"it differs from PyTorch by {error:.1e} of the result"
    except torch.OutOfMemoryError:
        raise
    except Exception as exc:  # errors of Triton, the compiler or the driver
        why = f"{type(exc).__name__}: {exc}"
    log.warning("attention on %s gathers KV blocks, because its kernel failed a trial: %s", kind.device, why)
    return False


# Requests by the tokens before their rows and of their rows: each kind of launch, with keys of one split and
# of several.
_TRIALS = (((40, 1), (20, 5)), ((299, 1), (3, 1), (0, 40), (270, 3)))


def _error(kind: LayerKind, requests: Sequence[tuple[int, int]]) -> float:
    """Return how far the kernels are from PyTorch; what they need not read is NaN."""
    pieces, free = list[Piece](), iter(range(1, 1 << 16))
    for before, count in requests:
        blocks = [next(free) for _ in range(-(-(before + count) // kind.block_tokens))]
        pieces.append(Piece([0] * count, before, blocks, True))
    shape = LayerShape(kind.kv_heads, kind.key_dim, kind.value_dim, kind.dtype)
    num_blocks = next(free)
    gathered, read = (KVCache(num_blocks, kind.block_tokens, kind.device, (shape,)) for _ in range(2))
    for pool in gathered.tensors:
        pool.zero_()
    for pool in read.tensors:
        pool.fill_(torch.nan)
    generator = torch.Generator(kind.device).manual_seed(0)

    def random(*sizes: int) -> Tensor:
        numbers = torch.randn(*sizes, generator=generator, device=kind.device)
        return numbers.to(kind.dtype)

    slots = [
        (piece.blocks[at // kind.block_tokens], at % kind.block_tokens)
        for piece in pieces
        for at in range(piece.end)
    ]
    longs = {"blocks": [block for block, _ in slots], "offsets": [offset for _, offset in slots]}
    longs["positions"] = [at for piece in pieces for at in range(piece.start, piece.end)]
    starts = list(accumulate((len(piece.tokens) for piece in pieces[:-1]), initial=0))
    numbers = numbers_of(pieces, starts, read)
    sent = send(longs, numbers.ints, kind.device)
    key, value = (random(1, len(slots), kind.kv_heads, dim) for dim in (kind.key_dim, kind.value_dim))
    for kv, by_kernel in ((gathered, False), (read, True)):
        kv.write(
            0,
            key.transpose(1, 2),
            value.transpose(1, 2),
            sent["blocks"],
            sent["offsets"],
            by_kernel=by_kernel,
        )
    sinks = random(kind.num_heads) if kind.has_sinks else None
    heads = Heads(kind.num_heads, kind.kv_heads, kind.key_dim**-0.5, kind.softcap, sinks)
    query = random(1, len(longs["positions"]), kind.num_heads, kind.key_dim).transpose(1, 2)
    pattern = MaskPattern(lambda batch, head, query, key: key <= query)
    right = Gathering(pieces, starts, gathered).attend(0, heads, query, pattern.hidden).double()
    rows = numbers.rows(sent, sent["positions"], is_padded=False)
    found = attend_on_device(read, 0, rows, heads, query, pattern).double()
    error = float(((found - right).square().sum() / right.square().sum()).sqrt())
    return error if error == error else float("inf")
