"""How few rows of a batched product round as many do, on the CPU that this runs on.

The products of attention are MKL's in fp32. It takes another kernel for a few rows than for many, whose sums
go in another order, and from how many rows on it takes one differs from processor to processor. Rows are
filled up with zeros to that number, in every layer of every step. So it is tried out: products of the widths
that heads have, whose rows are compared with the same rows among many.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from hotswap.backends.torch.device import multiplies_bf16

__all__ = ["keys_across", "least_rows"]

_FEW = 4
# Numbers of rows, of which all but the last are compared with it: those of decodes, and of short prompts.
_ROWS = (1, 2, 3, 4, 5, 7, 8, 11, 12, 17, 33, 64)
# Requests, heads, width of a head, and number of keys.
_SHAPES = (
    (1, 1, 64, 16),
    (6, 3, 64, 48),
    (2, 3, 80, 272),
    (1, 5, 128, 272),
    (1, 1, 128, 2048),
    (1, 2, 256, 80),
)
# Values are weighed by so many keys at once.
_MOST_SUMMED = 128
# Keys that there is room for behind those that are multiplied.
_ROOM = 32


@dataclass(frozen=True, slots=True)
class _Rounding:
    """What was seen: whether four rows do, and whether keys as columns give the bits of keys as rows."""

    few_rows: bool
    columns: bool


def least_rows(device: torch.device, threads: int, dtype: torch.dtype) -> int:
    """The least number of rows at which attention's products on the CPU no longer round by their number.

    In fp32 it is four where that is seen to do, else what was measured elsewhere: some CPUs take another
    kernel below six rows, also for a part of the rows where several threads share fewer than twelve. In bf16
    it is two, or four where the CPU has no instructions for it. 0 on other devices, where no such number is
    known.
    """
    if device.type != "cpu":
        return 0
    if dtype is torch.bfloat16:
        return 2 if multiplies_bf16() else 4
    if dtype is torch.float32 and _tried(threads).few_rows:
        return _FEW
    return 8 if threads == 1 else 12


def keys_across(dtype: torch.dtype, rows: int) -> bool:
    """Whether keys that are kept to be multiplied by so many rows are kept as columns.

    MKL copies keys into columns each time that four rows or more are multiplied by them. Columns are taken in
    fp32 alone, and only where they give the same bits.
    """
    return dtype is torch.float32 and rows >= _FEW and _tried(torch.get_num_threads()).columns


@cache
def _tried(threads: int) -> _Rounding:
    """Try it out with so many threads, on a thread of its own: their number belongs to a thread."""
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as alone:
        return alone.submit(_try_out).result()


def _try_out() -> _Rounding:
    random = torch.Generator().manual_seed(0)
    few_rows = columns = True
    for left, right, is_scores in _products(random):
        if not (few_rows or columns):
            break
        many, across = left @ right, _across(right)
        for num_rows in _ROWS:
            few = functional.pad(left[..., :num_rows, :], (0, 0, 0, max(0, _FEW - num_rows)))
            found = few @ right
            few_rows &= torch.equal(found[..., :num_rows, :], many[..., :num_rows, :])
            if is_scores:
                columns &= torch.equal(found, few @ across)
    return _Rounding(few_rows, columns)


def _across(columns: Tensor) -> Tensor:
    """The same as columns in memory, with room behind each row for more."""
    num_keys = columns.shape[-1]
    return functional.pad(columns, (0, _ROOM))[..., :num_keys]


def _products(random: torch.Generator) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Queries and keys, then weights and values, as attention multiplies them, and which of both they are."""
    for num_requests, heads, width, num_keys in _SHAPES:
        batch = num_requests, heads
        queries = torch.randn(*batch, _ROWS[-1], width, generator=random)
        keys = torch.randn(*batch, num_keys, width, generator=random)
        yield queries, keys.transpose(-1, -2), True
        num_summed = min(num_keys, _MOST_SUMMED)
        yield torch.rand(*batch, _ROWS[-1], num_summed, generator=random), keys[..., :num_summed, :], False
