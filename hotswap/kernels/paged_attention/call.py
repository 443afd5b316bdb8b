"""`attend`: attention over pools of KV blocks on a CPU. `append`: writes keys and values to the pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.threads import float_bits, run_threads

__all__ = ["DTYPES", "Rows", "Seen", "append", "attend", "compile_for"]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Supported dtypes of keys and values."""

_BLOCK_TOKENS: Final = 16  # the tokens of a block are a multiple of this
_SHARED_PRODUCTS: Final = 4_000_000  # multiplications from which several threads are used, about 0.2 ms

_compiling = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The query rows of a step and their block tables; all int32, contiguous and on the CPU.

    Attributes:
        tables: `[n, width]`: the block table of each request, padded with 0.
        tiles: `[k, 3]`: (request, first row, number of rows) of rows of one request that are computed
            together, at least one. Each of the *m* rows is in at most one tile.
        order: `[m]`: the index of each row in the batch, for its query and its result.

    Raises:
        ConfigError: a tensor has another dtype, shape or layout. The values are not checked.
    """

    tables: Tensor
    tiles: Tensor
    order: Tensor

    def __post_init__(self) -> None:
        _check("tables", self.tables, torch.int32, 2)
        _check("tiles", self.tiles, torch.int32, 2)
        _check("order", self.order, torch.int32, 1)
        if self.tiles.shape[1] != 3:
            raise ConfigError(f"tiles is {list(self.tiles.shape)}; give three numbers for each tile.")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The positions that each of *m* rows attends to: `firsts <= position < lasts`, except hidden ones.

    Attributes:
        firsts: `[m]`, int32, at least 0.
        lasts: `[m]`, int32, greater than `firsts`, within the request's blocks and the width of `hidden`.
        hidden: `[m, width]`, bool or uint8, or `None`: nonzero at positions that a row does not attend to. A
            column is a position in the request.

    Raises:
        ConfigError: a tensor has another dtype, shape or layout. The values are not checked.
    """

    firsts: Tensor
    lasts: Tensor
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        _check("firsts", self.firsts, torch.int32, 1)
        _check("lasts", self.lasts, torch.int32, 1)
        if self.hidden is not None:
            _check("hidden", self.hidden, torch.bool if self.hidden.dtype is torch.bool else torch.uint8, 2)
        for name, tensor in (("lasts", self.lasts), ("hidden", self.hidden)):
            if tensor is not None and len(tensor) != len(self.firsts):
                raise ConfigError(f"{name} has {len(tensor)} rows and firsts has {len(self.firsts)}.")


def compile_for(dtype: torch.dtype) -> None:
    """Compile `attend` and `append` for a dtype, once per process: some seconds, in any thread.

    Raises:
        ConfigError: the dtype is not in `DTYPES`.
    """
    _kernel(dtype)
    _appender(dtype.itemsize)


def append(rows: Tensor, pool: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Copy row *i* of each head to slot `offsets[i]` of block `blocks[i]`; the numbers are not checked.

    Args:
        rows: `[heads, T, dim]`, of any strides and one of `DTYPES`.
        pool: `[num_blocks, heads, block_tokens, dim]`, contiguous, of the same dtype.
        blocks: `[T]`, int64.
        offsets: `[T]`, int64.
    """
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    heads, count, dim = rows.shape
    _appender(rows.itemsize)(
        rows.data_ptr(), rows.stride(0), rows.stride(1), pool.data_ptr(), heads, pool.shape[2], dim,
        blocks.data_ptr(), offsets.data_ptr(), count,
    )  # fmt: skip


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    seen: Seen,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `softmax(scale * query @ keys) @ values` for each row over its positions, in float32.

    A row's result has the same bits for any tiling, any other rows, and any number of threads. It is NaN if
    one of its scores is NaN, or if all of them are minus infinity. Keys at other positions may have any
    value; values at other positions in the blocks of the tile must be finite, because they are multiplied by
    0. The first call for a dtype compiles the kernel.

    Args:
        queries: `[T, heads, key_dim]`, of any dtype and strides; converted to float32.
        keys: `[blocks, kv_heads, block_tokens, key_dim]`, contiguous, of one of `DTYPES`; a block is a
            multiple of 16 tokens.
        values: `[blocks, kv_heads, block_tokens, value_dim]`, likewise, of the same dtype.
        rows: *m* rows, at most T.
        seen: The positions of the same *m* rows.
        scale: Factor of the scores, greater than 0.
        softcap: Scores become `softcap * tanh(score / softcap)`; greater than 0.
        sinks: `[heads]`: attention sinks, extra logits of each row's softmax without a value.

    Returns:
        `[T, heads, value_dim]`, zero in rows that are in no tile.

    Raises:
        ConfigError: pools or sinks do not match, the dtype is not supported, or scale or cap is not positive.
    """
    kernel, order, tables, hidden = _kernel(keys.dtype), rows.order, rows.tables, seen.hidden
    (count, heads, key_dim), (_, kv_heads, tokens, value_dim) = queries.shape, values.shape
    (num_rows,), (num_tiles, _), (_, table_width) = order.shape, rows.tiles.shape, tables.shape
    _check_pools(keys, values, heads, key_dim)
    if not (scale > 0 and (softcap is None or softcap > 0) and seen.firsts.shape == (num_rows,)):
        raise ConfigError("Give a scale and a cap greater than 0, and as many rows in `seen` as in `rows`.")
    if sinks is not None and sinks.shape != (heads,):
        raise ConfigError(f"Give a sink for each of the {heads} heads, not {list(sinks.shape)}.")
    queries = queries.float()
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.zeros((count, heads, value_dim), dtype=torch.float32, device="cpu")
    products = num_rows * heads * table_width * tokens * (key_dim + value_dim)
    parts = torch.get_num_threads() if products >= _SHARED_PRODUCTS else 1
    arguments = (
        0, parts, queries.data_ptr(), out.data_ptr(), tables.data_ptr(), rows.tiles.data_ptr(),
        seen.firsts.data_ptr(), seen.lasts.data_ptr(), order.data_ptr(),
        0 if hidden is None else hidden.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        queries.stride(0), queries.stride(1), table_width, num_tiles,
        0 if hidden is None else hidden.shape[1], kv_heads, heads // kv_heads, float_bits(scale),
        float_bits(softcap or 0.0), keys.data_ptr(), values.data_ptr(), key_dim, value_dim, tokens,
    )  # fmt: skip
    run_threads(kernel, arguments, parts)
    return out


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if dtype not in DTYPES:
        raise ConfigError(f"There is no attention kernel for {dtype}; give float32, bfloat16 or float16.")
    with _compiling:
        from hotswap.kernels.paged_attention.kernel import build

        return build(str(dtype).removeprefix("torch."))


@cache
def _appender(item_bytes: int) -> Callable[..., None]:
    with _compiling:
        from hotswap.kernels.paged_attention.slots import build

        return build(item_bytes)


def _check_pools(keys: Tensor, values: Tensor, heads: int, key_dim: int) -> None:
    num_blocks, kv_heads, tokens, _ = values.shape
    if keys.dtype is not values.dtype or keys.shape != (num_blocks, kv_heads, tokens, key_dim):
        raise ConfigError(
            f"Keys {list(keys.shape)} of {keys.dtype} do not match values {list(values.shape)}."
        )
    if tokens % _BLOCK_TOKENS or heads % kv_heads or not (keys.is_contiguous() and values.is_contiguous()):
        raise ConfigError(
            "Give contiguous pools with blocks of 16 tokens, or a multiple, and KV heads that divide the "
            "query heads."
        )


def _check(name: str, tensor: Tensor, dtype: torch.dtype, dims: int) -> None:
    if tensor.dtype is not dtype or tensor.dim() != dims or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ConfigError(
            f"{name} is {list(tensor.shape)} of {tensor.dtype}; give {dims} dimensions of {dtype}, "
            "contiguous and on the CPU."
        )
