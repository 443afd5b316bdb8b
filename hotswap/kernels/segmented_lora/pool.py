"""The memory of adapters: ranks in pages, so that one comes or goes without moving another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hotswap.errors import ConfigError
from hotswap.kernels.segmented_lora.plan import PAGE_RANKS, RankPlace

__all__ = ["MOST_COLUMNS", "PageBooks", "RankPool", "pages_for"]

# Columns of B that one program may read: each slice is laid out as a multiple of it.
MOST_COLUMNS = 128
# Elements of a row of A: 16 bytes and more for every dtype, so that rows are read in whole words.
_ROW_ELEMENTS = 16


def pages_for(rank: int) -> int:
    """How many pages hold `rank` ranks."""
    return -(-rank // PAGE_RANKS)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class PageBooks:
    """Which pages are free. The pages of an adapter are the same in the pools of all layers."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages))[::-1]
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def take(self, rank: int) -> tuple[int, ...] | None:
        """Hand out pages for `rank` ranks, not always neighbours; `None` if there are too few."""
        count = pages_for(rank)
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Take pages back that were handed out."""
        for page in pages:
            self._taken.remove(page)
            self._free.append(page)

    def __repr__(self) -> str:
        return f"<PageBooks [{self.num_pages} pages: {len(self._taken)} taken, {len(self._free)} free]>"


class RankPool:
    """The ranks of all adapters for one projection, or for several that have the same input, *slices* of one.

    Ranks that a page has and its adapter has not are zero. So no program need know where in a page an adapter
    ends: what it computes there is zero.

    Args:
        num_pages: How many pages of ranks there are.
        width_in: Columns of the input.
        widths: Columns of each slice's output, side by side.
        dtype: That of A and B, and of the input: bf16, fp16 or fp32.
        device: Where they lie.

    Attributes:
        a: `[slices, num_pages * 16, width_in]`, filled up to whole words; rank by rank.
        b: `[num_pages * 16, columns]`, each slice filled up to whole blocks; transposed.
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
        """How many projections share the input."""
        return len(self.widths)

    @property
    def num_pages(self) -> int:
        """Pages of ranks."""
        return self.b.shape[0] // PAGE_RANKS

    def start_of(self, piece: int) -> int:
        """The first column of a slice in an output that has all of them."""
        return self._starts[piece]

    def part(self, piece: int) -> tuple[Tensor, Tensor]:
        """Views of one slice: A `[ranks, in]` and B `[ranks, out]`."""
        at = self._laid[piece]
        return self.a[piece, :, : self.width_in], self.b[:, at : at + self.widths[piece]]

    def put(self, place: RankPlace, parts: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Write an adapter to its pages, also over what was there.

        Args:
            place: Pages that were taken for it.
            parts: For each slice A `[rank, in]` and B transposed, `[rank, out]`; `None` if it changes nothing
                there. Ranks may differ from slice to slice.

        Raises:
            ConfigError: a part that is not of these widths, or has more ranks than its pages.
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
        """int32 `[blocks, 4]`, of each block of columns: slice, column of B, column of the output, width."""
        if columns not in self._blocks:
            if columns > MOST_COLUMNS or MOST_COLUMNS % columns:
                raise ConfigError(f"Blocks of {columns} columns were asked for; {MOST_COLUMNS} are divided.")
            records = [
                (piece, self._laid[piece] + at, self._starts[piece] + at, min(columns, width - at))
                for piece, width in enumerate(self.widths)
                for at in range(0, width, columns)
            ]
            self._blocks[columns] = torch.tensor(records, dtype=torch.int32, device=self.device)
        return self._blocks[columns]

    def blocks_of(self, columns: int, first: int, last: int) -> range:
        """Which of `blocks` are those of the slices `first` to `last`."""
        counts = [-(-width // columns) for width in self.widths]
        return range(sum(counts[:first]), sum(counts[:last]))

    @property
    def is_aligned(self) -> bool:
        """Whether every slice begins at a multiple of 16 columns and has as many."""
        return all(width % 16 == 0 for width in self.widths)

    def __repr__(self) -> str:
        return f"<RankPool [{self.num_pages} pages, {self.width_in} to {self.widths}, {self.dtype}]>"
