"""The grid of ranks: pipeline stages by tensor-parallel parts, and the layers of each stage."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Grid", "RankPosition"]


@dataclass(frozen=True, slots=True)
class Grid:
    """`pp` stages of `tp` ranks each. The ranks of a stage have consecutive numbers, so they share a node."""

    tp: int
    pp: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp

    @property
    def positions(self) -> tuple[RankPosition, ...]:
        """The position of every rank, in order."""
        return tuple(RankPosition(self, rank) for rank in range(self.size))

    @property
    def stages(self) -> tuple[tuple[RankPosition, ...], ...]:
        """The positions of the ranks of every stage, in order."""
        every = self.positions
        return tuple(every[first : first + self.tp] for first in range(0, self.size, self.tp))


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The position of one rank in a grid."""

    grid: Grid
    rank: int

    @property
    def stage(self) -> int:
        """The number of its stage."""
        return self.rank // self.grid.tp

    @property
    def part(self) -> int:
        """The number of its tensor-parallel part."""
        return self.rank % self.grid.tp

    @property
    def is_first(self) -> bool:
        """Whether its stage is the first, with the embeddings."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage is the last, with the output head."""
        return self.stage == self.grid.pp - 1

    def layers(self, num_layers: int) -> range:
        """Return the layers of its stage; the stages' numbers of layers differ by at most one."""
        first, last = self.stage * num_layers // self.grid.pp, (self.stage + 1) * num_layers // self.grid.pp
        return range(first, last)

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage} of {self.grid.pp}, part {self.part} of {self.grid.tp})"
