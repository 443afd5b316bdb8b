"""The tile of a product: from the table measured on a device, or from a heuristic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any, Final, Literal

from hotswap.errors import ConfigError
from hotswap.kernels.tables import Choice, load
from hotswap.kernels.targets import Device, Target

__all__ = ["ROWS", "TABLE", "Tile", "choose", "heuristic", "kind_of", "rows_to_build"]

TABLE: Final = Path(__file__).with_name("table.json")
# Numbers of rows at which the heuristic changes; a table has these numbers.
ROWS: Final = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
# Rows from which the heuristic takes the dense path. On an H100 and an H200 it was faster from 1,024 rows on
# for every layer, and from 128 or 256 for some.
_DENSE_ROWS: Final = 512
_LEAST_STEPS: Final = 4
_MOST_PARTS: Final = 8
# Programs per unit of a device that keep enough loads in progress.
_BUSY: Final = 3


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile configuration of a product.

    Attributes:
        block_m: Rows of x in a tile; a power of two, like the other sizes.
        block_n: Rows of the weight in a tile.
        block_k: Columns of a loop step; divides the group of the weight.
        warps: Warps of a program.
        stages: Pipeline stages: loop steps whose loads are in progress at once.
        parts: Number of parts that K is split into (split-K).
        weights_left: Whether the weights are the left operand, which is faster on wide tensor cores.
        path: `"dense"` dequantizes the weights first and ignores the other settings.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    warps: int = 4
    stages: int = 4
    parts: int = 1
    weights_left: bool = False
    path: Literal["fused", "dense"] = "fused"

    @classmethod
    def of(cls, choice: Choice) -> Tile:
        """Return the tile of a table entry.

        Raises:
            ConfigError: the entry has other settings.
        """
        values = dict[str, Any](choice)
        try:
            values["weights_left"] = bool(values.get("weights_left", False))
            return cls(**values)
        except TypeError as exc:
            raise ConfigError(f"The table has a tile {values!r} ({exc}); sweep again.") from exc

    @property
    def choice(self) -> Choice:
        """The entry of this tile in a table."""
        return {
            name: int(value) if isinstance(value, bool) else value for name, value in asdict(self).items()
        }

    @property
    def shared_bytes(self) -> int:
        """Estimated shared memory of a program: the words and the 16-bit inputs of all stages."""
        return self.stages * (self.block_n + 2 * self.block_m) * self.block_k

    def parts_of(self, width: int) -> int:
        """Return the number of parts of a K of `width`; each has one step at least."""
        return min(self.parts, ceil(width / self.block_k))

    def fitted(self, group: int | None) -> Tile:
        """Return the tile with `block_k` reduced to divide the group of the weight."""
        block_k = self.block_k
        while group is not None and group % block_k:
            block_k //= 2
        return replace(self, block_k=block_k)


DENSE: Final = Tile(path="dense")


def kind_of(dtype: str, group: int | None) -> str:
    """Return the kind of a table's records for a dtype and a group size."""
    return f"{dtype}/{'channel' if group is None else f'g{group}'}"


@lru_cache(maxsize=4096)
def choose(rows: int, shape: tuple[int, int], dtype: str, group: int | None, device: Device) -> Tile:
    """Return the tile of a product on a device: from the table, else from `heuristic`.

    Args:
        rows: M.
        shape: `(N, K)`.
        dtype: `"bfloat16"` or `"float16"`.
        group: Group size of the weight.
        device: The device; one without a target takes the dense path.
    """
    target = device.target
    if target is None or not target.mma:
        return DENSE
    found = load(TABLE).find(device.name, target.name, kind_of(dtype, group), shape, rows)
    tile = heuristic(rows, shape, target, device.num_units) if found is None else Tile.of(found)
    return tile.fitted(group)


@lru_cache(maxsize=256)
def rows_to_build(
    shape: tuple[int, int], dtype: str, group: int | None, device: Device, most_rows: int | None = None
) -> tuple[int, ...]:
    """Return numbers of rows whose products together use every program that `choose` can select.

    Every number up to `most_rows` is tried, because a program depends on the tile and on whether K is split,
    which changes with the number of tiles. `None` is no limit.
    """
    # All larger numbers of rows use the same programs.
    last = max(_DENSE_ROWS, *(record.rows + 1 for _, record in load(TABLE).records()), 1)
    least: dict[Tile, int] = {}
    for rows in range(1, last + 1 if most_rows is None else min(last, most_rows) + 1):
        tile = choose.__wrapped__(rows, shape, dtype, group, device)
        program = replace(tile, parts=min(2, tile.parts_of(shape[1])))
        least.setdefault(DENSE if tile.path == "dense" else program, rows)
    return tuple(least.values())


def heuristic(rows: int, shape: tuple[int, int], target: Target, num_units: int) -> Tile:
    """Return a tile without measurements: enough rows, and as many parts of K as keep the device busy.

    Decode steps are bound by reading weights, so tiles are small and many. A part has a few loop steps at
    least, because each part costs a write and a read of its sums.
    """
    if rows >= _DENSE_ROWS or not target.mma:
        return DENSE
    tile = _amd(rows) if target.is_amd else _nvidia(rows, shape, target, num_units)
    num_tiles = ceil(rows / tile.block_m) * ceil(shape[0] / tile.block_n)
    wanted = _BUSY * num_units if rows <= 64 else num_units
    steps = ceil(shape[1] / tile.block_k)
    parts = min(_MOST_PARTS, steps // _LEAST_STEPS, round(wanted / num_tiles))
    return replace(tile, parts=max(1, parts))


def _nvidia(rows: int, shape: tuple[int, int], target: Target, num_units: int) -> Tile:
    is_small = target.shared_bytes < 128 << 10
    if rows <= 16:
        return Tile(16, 128, 128, 4, 3) if _is_large(shape, num_units) else Tile(16, 64, 128, 4, 4)
    if rows <= 32:
        is_wide = _is_large(shape, num_units) and not is_small
        return Tile(32, 128, 128, 4, 3) if is_wide else Tile(32, 64, 128, 4, 4)
    if rows <= 64:
        if target.wide_mma:
            # Tensor memory is read back in rows of 128; with fewer, registers spill.
            return Tile(64, 128 if target.wide_mma == "UTCHMMA" else 64, 128, 4, 3, weights_left=True)
        return Tile(64, 64, 128, 4, 3)
    if target.wide_mma:
        return Tile(128, 128, 128, 8, 3, weights_left=True)
    return Tile(128, 64 if is_small else 128, 64, 8, 3)


def _is_large(shape: tuple[int, int], num_units: int) -> bool:
    """Whether tiles of 128 weight rows are enough to keep the device busy."""
    return shape[0] >= 128 * 2 * num_units


def _amd(rows: int) -> Tile:
    return Tile(16, 64, 128, 4, 2) if rows <= 16 else Tile(64, 64, 64, 4, 2)
