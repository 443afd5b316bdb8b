"""`attend`: attention over pools of KV blocks on a GPU. `append`: writes keys and values to the pools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.calls import Call
from hotswap.kernels.paged_attention_gpu.tiles import MOST_SPLITS, SPLIT, Tile, tile_for
from hotswap.kernels.targets import TARGETS, Target, device_of, runs_triton

__all__ = [
    "DTYPES",
    "Rows",
    "Visible",
    "append",
    "append_call",
    "attend",
    "attend_calls",
    "has_kernels",
    "pack_call",
    "rows_per_tile",
]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Supported dtypes of keys and values."""

_KERNELS: Final = "hotswap.kernels.paged_attention_gpu.kernel"
# Elements of keys that a program of `append` copies, about.
_APPENDED: Final = 2048
# Splits that are summed in one step.
_SUMMED: Final = 8
# A mask has whole steps of the main loop.
_ALIGNED_KEYS: Final = 64
# Words of a mask that a program of `pack_call` makes in one step.
_PACKED_WORDS: Final = 64


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The query rows of a step and their block tables; int32 and contiguous, on the device.

    The numbers are not checked, because reading them would wait for the device. Their shapes alone decide
    what is launched: a captured graph serves all numbers, with tiles of 0 rows as padding.

    Attributes:
        tables: `[requests, width]`: the block table of each request, padded with 0.
        singles: `[n, 3]`: (request, row, 1) of requests with one row, or (0, 0, 0).
        tiles: `[n, 3]`: (request, first row, number of rows) of neighbouring rows of one request, at most
            `rows_per_tile` of them; 0 rows are padding. A row is in at most one tile of all.
        is_padded: Whether some rows of the step are in no tile; they become zeros.

    Raises:
        ConfigError: a tensor has another dtype, shape or layout.
    """

    tables: Tensor
    singles: Tensor
    tiles: Tensor
    is_padded: bool = True

    def __post_init__(self) -> None:
        for name, tensor in (("tables", self.tables), ("singles", self.singles), ("tiles", self.tiles)):
            if tensor.dtype is not torch.int32 or tensor.ndim != 2 or not tensor.is_contiguous():
                raise ConfigError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)}; give a contiguous int32 matrix."
                )
            if name != "tables" and tensor.shape[1] != 3:
                raise ConfigError(f"{name} is {list(tensor.shape)}; give three numbers for each tile.")


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """The keys that each row attends to, in the form that `attend` takes.

    Attributes:
        words: `[T, num_keys / 32]`, int32: bit `i % 32` of word `i // 32` is set if the row sees the key at
            position *i* of its request.
        first: `[T]`, int32: the first visible position; 0 for rows without one.
        last: `[T]`, int32: the position after the last visible one; 0 for rows without one.
    """

    words: Tensor
    first: Tensor
    last: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Visible:
        """Return the form of a mask, `[T, num_keys]` bools with contiguous rows: one launch."""
        visible = cls.empty(mask.shape[0], mask.shape[1], mask.device)
        visible.put(0, mask)
        return visible

    @classmethod
    def empty(cls, num_rows: int, num_keys: int, device: torch.device) -> Visible:
        """Allocate the form of a mask, with undefined content."""
        num_words = -(-num_keys // _ALIGNED_KEYS) * (_ALIGNED_KEYS // 32)
        # Both vectors are aligned to 16 bytes.
        ends = torch.empty(2, -(-num_rows // 4) * 4, dtype=torch.int32, device=device)[:, :num_rows]
        return cls(torch.empty(num_rows, num_words, dtype=torch.int32, device=device), ends[0], ends[1])

    def put(self, row: int, mask: Tensor) -> None:
        """Write the mask of rows from `row` on, a multiple of 4: `[n, num_keys]` bools."""
        if not len(mask):
            return
        if mask.stride(1) != 1:
            mask = mask.contiguous()
        rows = slice(row, row + len(mask))
        pack_call(mask, Visible(self.words[rows], self.first[rows], self.last[rows])).launch()

    @property
    def num_keys(self) -> int:
        """The number of columns, rounded up."""
        return self.words.shape[1] * 32


def has_kernels(device: torch.device) -> bool:
    """Whether `attend` and `append` run on a device: Triton with tensor cores, or Triton's interpreter."""
    return runs_triton(device) and bool(_target(device).mma)


def rows_per_tile(query_heads: int, keys: Tensor, values: Tensor) -> int:
    """Return the most rows of a tile of `Rows.tiles`, for a layer with these pools."""
    return _tile(query_heads, keys, values, _target(keys.device), single=False).rows


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    visible: Visible,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention of the rows of a step over the KV blocks of their requests, in place.

    At most three launches, for any number of requests: tiles of many rows, rows of one token, and the sum
    over the splits of the latter. Nothing is read on the host. Sums are in fp32 and in a fixed order: the
    bits of a row depend on its query, its keys and values and what it sees, and on which of the two kinds of
    tiles it is in, but not on other rows. Sums of fp32 are not rounded to TF32.

    KV slots that no row of a tile sees may hold anything, NaN included.

    Args:
        queries: `[T, heads, key_dim]` with contiguous columns.
        keys: `[num_blocks, kv_heads, block_tokens, key_dim]`, contiguous; of one of `DTYPES`.
        values: `[num_blocks, kv_heads, block_tokens, value_dim]`, contiguous, of the same dtype.
        rows: The tiles of rows.
        visible: What each row sees.
        scale: Factor of the scores.
        softcap: Scores become `softcap * tanh(score / softcap)`; `None` leaves them as they are.
        sinks: `[heads]`: a logit that takes a share of the weights and has no value; `None` without sinks.

    Returns:
        `[T, heads, value_dim]` of the queries' dtype; zeros in rows that see no key or are in no tile.

    Raises:
        ConfigError: an argument does not match the others.

    Sources: Dao, FlashAttention-2, arXiv:2307.08691, section 3; Kwon et al., PagedAttention,
    arXiv:2309.06180, section 4.1; Dao et al., Flash-Decoding for long-context inference (2023).
    """
    _check(queries, keys, values, visible)
    shape = (queries.shape[0], queries.shape[1], values.shape[3])
    out = (torch.zeros if rows.is_padded else torch.empty)(shape, dtype=queries.dtype, device=queries.device)
    for call in attend_calls(out, queries, keys, values, rows, visible, scale, softcap, sinks):
        call.launch()
    return out


def append(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Copy row *i* of each head to slot `offsets[i]` of block `blocks[i]`: one launch for keys and values.

    The numbers are not checked. Rows with the same slot leave one of them in it, or parts of both.

    Args:
        key: `[kv_heads, T, key_dim]` with contiguous columns, of the dtype of the pools.
        value: `[kv_heads, T, value_dim]`, likewise.
        keys: `[num_blocks, kv_heads, block_tokens, key_dim]`, contiguous.
        values: `[num_blocks, kv_heads, block_tokens, value_dim]`, contiguous.
        blocks: `[T]`, int32 or int64.
        offsets: `[T]`, int32 or int64.
    """
    if key.shape[1]:
        append_call(key, value, keys, values, blocks, offsets).launch()


def attend_calls(
    out: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    visible: Visible,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    target: Target | None = None,
) -> list[Call]:
    """Return the kernel launches of `attend`; `target` is that of the device if not given."""
    heads, value_dim = queries.shape[1], values.shape[3]
    target = target or _target(queries.device)
    calls: list[Call] = []
    num_splits = min(MOST_SPLITS, -(-visible.num_keys // SPLIT))
    for tiles, single in ((rows.tiles, False), (rows.singles, True)):
        if not len(tiles):
            continue
        is_split = single and num_splits > 1
        tile = _tile(heads, keys, values, target, single=single)
        parts = stats = out
        if is_split:
            shape = (len(tiles), heads, num_splits)
            parts = torch.empty(*shape, value_dim, dtype=torch.float32, device=out.device)
            stats = torch.empty(*shape, 2, dtype=torch.float32, device=out.device)
        sunk = queries if sinks is None else sinks
        arguments = (
            queries, keys, values, out, parts, stats, sunk, rows.tables, tiles, visible.words, visible.first,
            visible.last, scale, softcap or 1.0, queries.stride(0), queries.stride(1), rows.tables.stride(0),
            visible.words.stride(0), num_splits,
        )  # fmt: skip
        constants = {
            **_constants(queries, keys, values, tile),
            "WHOLE": not is_split,
            "HAS_CAP": softcap is not None,
            "HAS_SINKS": sinks is not None,
            "STAGES": tile.stages,
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }
        grid = (len(tiles), keys.shape[1], num_splits if is_split else 1)
        calls.append(Call(f"{_KERNELS}:attend_kernel", grid, arguments, constants))
        if is_split:
            calls.append(_sum_call(out, parts, stats, sunk, tiles, visible, sinks is not None))
    return calls


def _constants(queries: Tensor, keys: Tensor, values: Tensor, tile: Tile) -> dict[str, Any]:
    return {
        "KV_HEADS": keys.shape[1],
        "GROUP": queries.shape[1] // keys.shape[1],
        "KEY_DIM": keys.shape[3],
        "VALUE_DIM": values.shape[3],
        "BLOCK_TOKENS": keys.shape[2],
        "ROWS": tile.rows,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": _padded(keys.shape[3]),
        "BLOCK_V": _padded(values.shape[3]),
        "SPLIT": SPLIT,
        "MOST_SPLITS": MOST_SPLITS,
    }


def _sum_call(
    out: Tensor,
    parts: Tensor,
    stats: Tensor,
    sinks: Tensor,
    tiles: Tensor,
    visible: Visible,
    has_sinks: bool,
) -> Call:
    num_tiles, heads, num_splits, value_dim = parts.shape
    constants = {
        "HEADS": heads,
        "VALUE_DIM": value_dim,
        "BLOCK_V": _padded(value_dim),
        "SPLIT": SPLIT,
        "MOST_SPLITS": MOST_SPLITS,
        "STEP": _SUMMED,
        "HAS_SINKS": has_sinks,
        "num_warps": 4,
    }
    arguments = (parts, stats, out, sinks, tiles, visible.first, visible.last, num_splits)
    return Call(f"{_KERNELS}:sum_kernel", (num_tiles, heads), arguments, constants)


def pack_call(mask: Tensor, visible: Visible) -> Call:
    """Return the kernel launch of `Visible.of`."""
    num_rows, num_keys = mask.shape
    arguments = (
        mask.view(torch.uint8), visible.words, visible.first, visible.last, num_keys, mask.stride(0),
        visible.words.stride(0),
    )  # fmt: skip
    constants = {"BLOCK_WORDS": _PACKED_WORDS, "num_warps": 4}
    return Call(f"{_KERNELS}:pack_kernel", (num_rows,), arguments, constants)


def append_call(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, offsets: Tensor
) -> Call:
    """Return the kernel launch of `append`."""
    kv_heads, num_rows, key_dim = key.shape
    wide = max(_padded(key_dim), _padded(value.shape[2]))
    heads = 1
    while heads < kv_heads and 2 * heads * wide <= _APPENDED:
        heads *= 2
    constants = {
        "KV_HEADS": kv_heads,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value.shape[2],
        "BLOCK_TOKENS": keys.shape[2],
        "HEADS": heads,
        "BLOCK_K": _padded(key_dim),
        "BLOCK_V": _padded(value.shape[2]),
        "num_warps": min(4, max(1, heads * wide // 256)),
    }
    strides = (key.stride(0), key.stride(1), value.stride(0), value.stride(1))
    arguments = (key, value, keys, values, blocks, offsets, *strides)
    return Call(f"{_KERNELS}:append_kernel", (num_rows, -(-kv_heads // heads)), arguments, constants)


def _tile(query_heads: int, keys: Tensor, values: Tensor, target: Target, *, single: bool) -> Tile:
    group = query_heads // keys.shape[1]
    return tile_for(group, keys.shape[3], values.shape[3], keys.itemsize, target, single=single)


def _target(device: torch.device) -> Target:
    """Return the target whose tiles are used; the interpreter can run those of any."""
    return device_of(device).target or TARGETS["sm_90"]


def _padded(width: int) -> int:
    """Return the width of a tile: a power of two, at least what a matrix product takes."""
    return max(16, 1 << (width - 1).bit_length())


def _check(queries: Tensor, keys: Tensor, values: Tensor, visible: Visible) -> None:
    for name, pool in (("keys", keys), ("values", values)):
        if pool.dtype not in DTYPES or pool.dtype is not queries.dtype or not pool.is_contiguous():
            raise ConfigError(
                f"{name} is {pool.dtype} with strides {pool.stride()} and queries {queries.dtype}; give "
                "contiguous pools of the queries' dtype: float32, bfloat16 or float16."
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ConfigError(f"keys is {list(keys.shape)} and values {list(values.shape)}; blocks must match.")
    if queries.shape[1] % keys.shape[1] or queries.shape[2] != keys.shape[3] or queries.stride(2) != 1:
        raise ConfigError(
            f"queries is {list(queries.shape)} with strides {queries.stride()} and keys {list(keys.shape)}: "
            "columns must be contiguous, widths equal, and heads a multiple of the KV heads."
        )
    if len(visible.words) != len(queries):
        raise ConfigError(f"visible has {len(visible.words)} rows and queries has {len(queries)}.")
