"""Memory layouts of FP8 weights: plain, as stored, or packed into 32-bit words for GPUs.

A GPU converts two e4m3 values with the instructions for one if they are 16 bits apart in a 32-bit register.
So a word has four adjacent values of a row in the order 0, 2, 1, 3, from the lowest byte up: its even bytes
are the values 0 and 1, its odd bytes 2 and 3. Rows are padded with zeros to a multiple of 64 values, so that
each row is aligned for 16-byte loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError

__all__ = ["Fp8Weight", "pack", "pack_into", "packed_width", "unpack"]

_ROW_VALUES: Final = 64
_WORD_VALUES: Final = 4
# Masks of a word: the outer bytes, which stay, and the second byte, which is swapped with the third.
_OUTER, _SECOND = -0x00FF_FF01, 0x0000_FF00


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """The FP8 weight `[N, K]` of a linear layer: quantized values and scales.

    Attributes:
        qweight: Quantized values: plain, `[N, K]` float8_e4m3fn, or packed, `[N, packed_width(K)]` int32.
        scales: `[N, groups]` float32, contiguous; a weight is its value times the scale of its group.
        width: K.
        group: Number of adjacent values along K that share a scale, a multiple of 32; `None` for a whole row.
            The last group of a row may be shorter.
        dtype: The original dtype of the weights. Dequantized weights are rounded to it first.

    Raises:
        ConfigError: the tensors do not match.
    """

    qweight: Tensor
    scales: Tensor
    width: int
    group: int | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        wide = packed_width(self.width) if self.is_packed else self.width
        known = self.qweight.dtype in (torch.int32, torch.float8_e4m3fn)
        _check(known and self.qweight.ndim == 2 and self.qweight.shape[1] == wide, "qweight", self.qweight)
        _check(self.qweight.is_contiguous(), "qweight", self.qweight)
        shape = (len(self.qweight), self.num_groups)
        _check(
            self.scales.dtype is torch.float32 and tuple(self.scales.shape) == shape, "scales", self.scales
        )
        _check(self.scales.is_contiguous(), "scales", self.scales)
        if self.group is not None and (self.group < 32 or self.group % 32):
            raise ConfigError(f"group is {self.group}, it must be a multiple of 32, or None for whole rows.")

    @property
    def is_packed(self) -> bool:
        """Whether the values are packed into words."""
        return self.qweight.dtype is torch.int32

    @property
    def num_groups(self) -> int:
        """Number of scales per row."""
        return 1 if self.group is None else -(-self.width // self.group)

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`, packed or not."""
        return len(self.qweight), self.width

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.qweight.nbytes + self.scales.nbytes


def packed_width(width: int) -> int:
    """Return the words of a row of `width` values, a multiple of 16."""
    return -(-width // _ROW_VALUES) * (_ROW_VALUES // _WORD_VALUES)


def pack(weight: Fp8Weight) -> Fp8Weight:
    """Return the weight with packed values; the same object if they are packed. No value changes."""
    if weight.is_packed:
        return weight
    words = weight.qweight.new_empty((len(weight.qweight), packed_width(weight.width)), dtype=torch.int32)
    pack_into(weight.qweight, words)
    return Fp8Weight(words, weight.scales, weight.width, weight.group, weight.dtype)


def pack_into(values: Tensor, words: Tensor) -> None:
    """Pack values into words, row by row; may be called for some of the rows at a time.

    Args:
        values: `[N, K]`, of one byte each.
        words: `[N, packed_width(K)]` int32, contiguous; must not overlap `values`.
    """
    given = values.contiguous().view(torch.uint8)
    if lacking := words.shape[1] * _WORD_VALUES - values.shape[1]:
        given = torch.nn.functional.pad(given, (0, lacking))
    elif given.storage_offset() % _WORD_VALUES:
        given = given.clone()
    words.copy_(_swapped(given.view(torch.int32)))


def unpack(weight: Fp8Weight) -> Fp8Weight:
    """Return the weight with plain values; the same object if they are plain."""
    if not weight.is_packed:
        return weight
    rows = _swapped(weight.qweight.contiguous()).view(torch.uint8)[:, : weight.width]
    plain = rows.contiguous().view(torch.float8_e4m3fn)
    return Fp8Weight(plain, weight.scales, weight.width, weight.group, weight.dtype)


def _check(holds: bool, name: str, tensor: Tensor) -> None:
    if not holds:
        raise ConfigError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, which does not fit the rest of the weight; "
            "give values [N, K] float8_e4m3fn (or a result of `pack`) and scales [N, groups] float32."
        )


def _swapped(words: Tensor) -> Tensor:
    """Swap the two middle bytes of each word; the inverse of itself."""
    return (words & _OUTER) | ((words & _SECOND) << 8) | ((words >> 8) & _SECOND)
