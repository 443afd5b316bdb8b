"""Paged memory of adapters: an adapter is loaded or removed without moving others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.segmented_lora.plan import PAGE_RANKS, RankPlace

__all__ = ["MOST_COLUMNS", "PageAllocator", "RankPool", "pages_for"]

# Columns of B that one program may read: each slice is padded to a multiple of it.
MOST_COLUMNS = 128
# A row of A is padded to a multiple of these elements, at least 16 bytes for every dtype, for wide loads.
_ROW_ELEMENTS = 16


def pages_for(rank: int) -> int:
    """Return the number of pages for `rank` ranks."""
    return -(-rank // PAGE_RANKS)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class PageAllocator:
    """Allocates pages of ranks. The pages of an adapter are the same in the pools of all layers."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]
        self._allocated: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def allocate(self, rank: int) -> tuple[int, ...] | None:
        """Allocate pages for `rank` ranks, not necessarily adjacent; `None` if too few are free."""
        count = pages_for(rank)
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._allocated.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Free allocated pages."""
        for page in pages:
            self._allocated.remove(page)
            self._free.append(page)

    def __repr__(self) -> str:
        return f"<PageAllocator [{self.num_pages} pages, {len(self._free)} free]>"


class RankPool:
    """The ranks of all adapters for one projection, or for several with the same input, its *slices*.

    Ranks of a page beyond the rank of its adapter are zero, so kernels need not know where an adapter ends:
    these ranks add zero.

    Args:
        num_pages: Number of pages.
        width_in: Width of the input.
        widths: Output width of each slice; slices are adjacent in the output.
        dtype: Dtype of A, B and the input: bf16, fp16 or fp32.
        device: Device of the pool.

    Attributes:
        a: A matrices, `[slices, num_pages * 16, width_in]`, with padded rows.
        b: B matrices, transposed, `[num_pages * 16, columns]`, with each slice padded to whole blocks.
    """

    def __init__(
        self,
        num_pages: int,
        width_in: int,
        widths: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_pages < 1 or width_in < 1 or not widths or min(widths) < 1:
            raise ConfigError(
                f"A pool of {num_pages} pages from {width_in} to {tuple(widths)} columns holds nothing; "
                "give one or more of each."
            )
        self.width_in, self.widths, self.dtype = width_in, tuple(widths), dtype
        laid = [_round_up(width, MOST_COLUMNS) for width in widths]
        num_ranks = num_pages * PAGE_RANKS
        self.a = torch.zeros(
            len(widths), num_ranks, _round_up(width_in, _ROW_ELEMENTS), dtype=dtype, device=device
        )
        self.b = torch.zeros(num_ranks, sum(laid), dtype=dtype, device=device)
        self.device = self.b.device
        self._starts = [sum(widths[:piece]) for piece in range(len(widths) + 1)]
        self._laid = [sum(laid[:piece]) for piece in range(len(widths) + 1)]
        self._blocks: dict[int, Tensor] = {}

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.widths)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return self.b.shape[0] // PAGE_RANKS

    def start_of(self, piece: int) -> int:
        """Return the first column of a slice in an output with all slices."""
        return self._starts[piece]

    def part(self, piece: int) -> tuple[Tensor, Tensor]:
        """Return views of one slice: A `[ranks, in]` and B `[ranks, out]`."""
        at = self._laid[piece]
        return self.a[piece, :, : self.width_in], self.b[:, at : at + self.widths[piece]]

    def put(self, place: RankPlace, parts: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Write an adapter to its pages, and overwrite their content.

        Args:
            place: The pages allocated for it.
            parts: For each slice A `[rank, in]` and B transposed, `[rank, out]`; `None` if the adapter does
                not change the slice. Ranks may differ between slices.

        Raises:
            ConfigError: a part has another width, or more ranks than the pages.
        """
        room = len(place.pages) * PAGE_RANKS
        ranks = torch.tensor(
            [page * PAGE_RANKS + rank for page in place.pages for rank in range(PAGE_RANKS)],
            dtype=torch.long,
            device=self.device,
        )
        for piece, given in enumerate(parts):
            for pool, part in zip(self.part(piece), given or (None, None), strict=True):
                if part is not None and (part.shape[1] != pool.shape[1] or part.shape[0] > room):
                    raise ConfigError(
                        f"Slice {piece} was given {tuple(part.shape)}, and has {room} ranks and "
                        f"{pool.shape[1]} columns; it belongs to another projection."
                    )
                content = torch.zeros(room, pool.shape[1], dtype=self.dtype)
                if part is not None:
                    content[: part.shape[0]] = part
                pool.index_copy_(0, ranks, content.to(self.device))

    def blocks(self, columns: int) -> Tensor:
        """Return int32 `[blocks, 4]`, per block of columns: slice, column of B, output column, width."""
        if columns not in self._blocks:
            if columns > MOST_COLUMNS or MOST_COLUMNS % columns:
                raise ConfigError(
                    f"Blocks of {columns} columns were requested; give a divisor of {MOST_COLUMNS}."
                )
            records = [
                (piece, self._laid[piece] + at, self._starts[piece] + at, min(columns, width - at))
                for piece, width in enumerate(self.widths)
                for at in range(0, width, columns)
            ]
            self._blocks[columns] = torch.tensor(records, dtype=torch.int32, device=self.device)
        return self._blocks[columns]

    def blocks_of(self, columns: int, first: int, last: int) -> range:
        """Return the indices of `blocks` that belong to the slices `first` to `last`."""
        counts = [-(-width // columns) for width in self.widths]
        return range(sum(counts[:first]), sum(counts[:last]))

    @property
    def is_aligned(self) -> bool:
        """Whether the width of every slice, and so its first column, is a multiple of 16."""
        return all(width % 16 == 0 for width in self.widths)

    def __repr__(self) -> str:
        return f"<RankPool [{self.num_pages} pages, {self.width_in} to {self.widths}, {self.dtype}]>"
