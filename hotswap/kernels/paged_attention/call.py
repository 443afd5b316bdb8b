"""`attend`: attention of the rows of a step over pools of KV blocks, on a CPU; `append` fills them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.team import float_bits, run_together

__all__ = ["DTYPES", "Rows", "Seen", "append", "attend", "compile_for"]

DTYPES: Final[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Of the keys and values that `attend` takes."""

_BLOCK_TOKENS: Final = 16  # a block holds a multiple of these
_SHARED_PRODUCTS: Final = 4_000_000  # multiplications that are worth waking other threads for, about 0.2 ms

_compiling = Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Which rows of a step attend to what; all int32, contiguous and on the CPU.

    Attributes:
        tables: `[n, width]`: the blocks of each request, padded with 0.
        tiles: `[k, 3]`: (request, first row, number of rows) of rows of one request that are computed
            together, at least one. Each of the *m* rows is in at most one tile.
        order: `[m]`: where among the step's rows each of these lies; its query is read there, and its result
            written there.

    Raises:
        ConfigError: a tensor of another dtype, shape or layout. The numbers themselves are not looked at.
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
    """Which positions each of *m* rows attends to: those of `firsts <= position < lasts` that are not hidden.

    Attributes:
        firsts: `[m]`, int32, at least 0.
        lasts: `[m]`, int32, more than `firsts`, and within the request's blocks and the width of `hidden`.
        hidden: `[m, width]`, bool or uint8: not 0 at positions that a row does not attend to, or `None`. The
            column is the position in its request.

    Raises:
        ConfigError: a tensor of another dtype, shape or layout. The numbers themselves are not looked at.
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
                raise ConfigError(f"{name} is of {len(tensor)} rows and firsts of {len(self.firsts)}.")


def compile_for(dtype: torch.dtype) -> None:
    """Compile what `attend` and `append` run for a dtype, once in a process: some seconds, in any thread.

    Raises:
        ConfigError: a dtype that is not in `DTYPES`.
    """
    _kernel(dtype)
    _appender(dtype.itemsize)


def append(rows: Tensor, pool: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Copy row *i* of each head to slot `offsets[i]` of block `blocks[i]`, which are not looked at.

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
    """Return `softmax(scale * query @ keys) @ values` of each row over what it sees, in float32.

    A row's result has the same bits in whatever tile it is, whatever else is in the step, and with any number
    of threads. It is NaN where a score that it sees is NaN, and where it sees nothing but scores of minus
    infinity. Keys that it does not see may be anything; values that it does not see must be finite throughout
    the blocks of its tile, as they are multiplied by 0. Compiles its kernel in the first call for a dtype.

    Args:
        queries: `[T, heads, key_dim]`, of any dtype and strides; computed with in float32.
        keys: `[blocks, kv_heads, block_tokens, key_dim]`, contiguous, of one of `DTYPES`; a block is a
            multiple of 16 tokens.
        values: `[blocks, kv_heads, block_tokens, value_dim]`, likewise, of the same dtype.
        rows: Of *m* rows, at most T.
        seen: Of the same *m* rows.
        scale: Of scores; more than 0.
        softcap: Scores become `softcap * tanh(score / softcap)`; more than 0.
        sinks: `[heads]`: logits that join each row's softmax, and whose weights are dropped.

    Returns:
        `[T, heads, value_dim]`, zero in the rows that are in no tile.

    Raises:
        ConfigError: pools or sinks that do not fit, a dtype not in `DTYPES`, a scale or cap not more than 0.
    """
    kernel, order, tables, hidden = _kernel(keys.dtype), rows.order, rows.tables, seen.hidden
    (count, heads, key_dim), (_, kv_heads, tokens, value_dim) = queries.shape, values.shape
    (num_rows,), (num_tiles, _), (_, table_width) = order.shape, rows.tiles.shape, tables.shape
    _check_pools(keys, values, heads, key_dim)
    if not (scale > 0 and (softcap is None or softcap > 0) and seen.firsts.shape == (num_rows,)):
        raise ConfigError("The scale and the cap are more than 0, and what is seen is of as many rows.")
    if sinks is not None and sinks.shape != (heads,):
        raise ConfigError(f"Give a sink for each of the {heads} heads, not {list(sinks.shape)}.")
    queries = queries.float()
    queries = queries if queries.stride(2) == 1 else queries.contiguous()
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.zeros((count, heads, value_dim), dtype=torch.float32, device="cpu")
    products = num_rows * heads * table_width * tokens * (key_dim + value_dim)
    parts = torch.get_num_threads() if products >= _SHARED_PRODUCTS else 1
    asked = (
        0, parts, queries.data_ptr(), out.data_ptr(), tables.data_ptr(), rows.tiles.data_ptr(),
        seen.firsts.data_ptr(), seen.lasts.data_ptr(), order.data_ptr(),
        0 if hidden is None else hidden.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        queries.stride(0), queries.stride(1), table_width, num_tiles,
        0 if hidden is None else hidden.shape[1], kv_heads, heads // kv_heads, float_bits(scale),
        float_bits(softcap or 0.0), keys.data_ptr(), values.data_ptr(), key_dim, value_dim, tokens,
    )  # fmt: skip
    run_together(kernel, asked, parts)
    return out


@cache
def _kernel(dtype: torch.dtype) -> Any:
    if dtype not in DTYPES:
        raise ConfigError(f"No attention over keys and values of {dtype}; give float32, bfloat16 or float16.")
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
        raise ConfigError(f"Keys {list(keys.shape)} of {keys.dtype} fit no values {list(values.shape)}.")
    if tokens % _BLOCK_TOKENS or heads % kv_heads or not (keys.is_contiguous() and values.is_contiguous()):
        raise ConfigError(
            "Pools are contiguous, in blocks of 16 tokens, with heads that divide the queries'."
        )


def _check(name: str, tensor: Tensor, dtype: torch.dtype, dims: int) -> None:
    if tensor.dtype is not dtype or tensor.dim() != dims or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ConfigError(
            f"{name} is {list(tensor.shape)} of {tensor.dtype}; give {dims} dimensions of {dtype}, "
            "contiguous and on the CPU."
        )
