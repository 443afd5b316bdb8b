"""Which rank is where in the grid of stages and tensor parts, and which layers it has."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Grid", "Place"]


@dataclass(frozen=True, slots=True)
class Grid:
    """`pp` stages of `tp` ranks each. The ranks of a stage are neighbours, so that they share a node."""

    tp: int
    pp: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * self.pp

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of every rank, in their order."""
        return tuple(Place(self, rank) for rank in range(self.size))


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a grid."""

    grid: Grid
    rank: int

    @property
    def stage(self) -> int:
        """Which run of layers it has."""
        return self.rank // self.grid.tp

    @property
    def part(self) -> int:
        """Which part of each of their tensors."""
        return self.rank % self.grid.tp

    @property
    def is_first(self) -> bool:
        """Whether its stage begins with the embeddings."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether its stage ends with the logits."""
        return self.stage == self.grid.pp - 1

    @property
    def peers(self) -> range:
        """The ranks of its stage."""
        return range(self.stage * self.grid.tp, (self.stage + 1) * self.grid.tp)

    def layers(self, num_layers: int) -> range:
        """The layers of its stage: stages differ by one layer at most."""
        first, last = self.stage * num_layers // self.grid.pp, (self.stage + 1) * num_layers // self.grid.pp
        return range(first, last)

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage} of {self.grid.pp}, part {self.part} of {self.grid.tp})"
