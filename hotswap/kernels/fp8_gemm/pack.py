"""How one-byte weights lie in memory: as they are stored, or packed four to a word for GPUs.

A GPU decodes two codes with the instructions of one where they share a 32-bit register 16 bits apart. So a
word holds four neighbours of a row in the order 0, 2, 1, 3, from the lowest byte up: its even bytes are the
neighbours 0 and 1, its odd bytes 2 and 3. Rows end at a multiple of 64 codes, filled up with zeros, so that
each begins where a wide load may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from hotswap.errors import ConfigError

__all__ = ["Fp8Weight", "pack", "pack_into", "packed_width", "unpack"]

_ROW_CODES: Final = 64
_WORD_CODES: Final = 4
# The bytes of a word that stay, and the second, which changes places with the third.
_OUTER, _SECOND = -0x00FF_FF01, 0x0000_FF00


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """The weight `[N, K]` of a linear layer, as codes and scales.

    Attributes:
        codes: As stored, `[N, K]` float8_e4m3fn; or packed, `[N, packed_width(K)]` int32.
        scales: `[N, groups]` float32, contiguous; a weight is its code times the scale of its group.
        width: K.
        group: The neighbours along K that share a scale, a multiple of 32; `None` for all of a row. The last
            group of a row may be shorter.
        dtype: What the weights were before. Where they are made whole, they are rounded to it first.

    Raises:
        ConfigError: they do not belong together.
    """

    codes: Tensor
    scales: Tensor
    width: int
    group: int | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        wide = packed_width(self.width) if self.is_packed else self.width
        known = self.codes.dtype in (torch.int32, torch.float8_e4m3fn)
        _check(known and self.codes.ndim == 2 and self.codes.shape[1] == wide, "codes", self.codes)
        _check(self.codes.is_contiguous(), "codes", self.codes)
        shape = (len(self.codes), self.num_groups)
        _check(
            self.scales.dtype is torch.float32 and tuple(self.scales.shape) == shape, "scales", self.scales
        )
        _check(self.scales.is_contiguous(), "scales", self.scales)
        if self.group is not None and (self.group < 32 or self.group % 32):
            raise ConfigError(f"group is {self.group}, it must be a multiple of 32, or None for whole rows.")

    @property
    def is_packed(self) -> bool:
        """Whether codes lie in words."""
        return self.codes.dtype is torch.int32

    @property
    def num_groups(self) -> int:
        """The scales of a row."""
        return 1 if self.group is None else -(-self.width // self.group)

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`, whatever the codes lie in."""
        return len(self.codes), self.width

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.codes.nbytes + self.scales.nbytes


def packed_width(width: int) -> int:
    """The words of a row of `width` codes, a multiple of 16."""
    return -(-width // _ROW_CODES) * (_ROW_CODES // _WORD_CODES)


def pack(weight: Fp8Weight) -> Fp8Weight:
    """Return a weight with its codes in words; itself if they are. No code changes."""
    if weight.is_packed:
        return weight
    words = weight.codes.new_empty((len(weight.codes), packed_width(weight.width)), dtype=torch.int32)
    pack_into(weight.codes, words)
    return Fp8Weight(words, weight.scales, weight.width, weight.group, weight.dtype)


def pack_into(codes: Tensor, words: Tensor) -> None:
    """Write codes to words, row by row; may be called with parts of the rows.

    Args:
        codes: `[N, K]`, of one byte each.
        words: `[N, packed_width(K)]` int32, contiguous; must not overlap the codes.
    """
    given = codes.contiguous().view(torch.uint8)
    if lacking := words.shape[1] * _WORD_CODES - codes.shape[1]:
        given = torch.nn.functional.pad(given, (0, lacking))
    elif given.storage_offset() % _WORD_CODES:
        given = given.clone()
    words.copy_(_swapped(given.view(torch.int32)))


def unpack(weight: Fp8Weight) -> Fp8Weight:
    """Return a weight with its codes as they are stored; itself if they are."""
    if not weight.is_packed:
        return weight
    rows = _swapped(weight.codes.contiguous()).view(torch.uint8)[:, : weight.width]
    codes = rows.contiguous().view(torch.float8_e4m3fn)
    return Fp8Weight(codes, weight.scales, weight.width, weight.group, weight.dtype)


def _check(holds: bool, name: str, tensor: Tensor) -> None:
    if not holds:
        raise ConfigError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, which does not fit the rest of the weight; "
            "give codes [N, K] float8_e4m3fn (or what `pack` made of them) and scales [N, groups] float32."
        )


def _swapped(words: Tensor) -> Tensor:
    """Words with their middle bytes in each other's place; twice is not at all."""
    return (words & _OUTER) | ((words & _SECOND) << 8) | ((words >> 8) & _SECOND)
