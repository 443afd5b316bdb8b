"""Keys and values of requests that decode together, gathered once and then appended to.

A batch of decodes reads the blocks of all its requests in every step, and on a CPU gathering them into one
piece costs as much memory traffic as attending to them twice over. While the same requests go on decoding
nothing of that changes but one token each. So what was gathered is kept from step to step, within a limit,
for as many layers as it has room for.

A run is known by its requests' blocks and positions. Blocks are append-only, and whoever changes what is in
one (`KVCache.clear`, `KVCache.copy`) has the runs that hold it forgotten, so a run that goes on holds what
its blocks hold.

A request that arrives with its blocks would wait for all of them to be gathered in its first step. So what is
full is gathered while others are still on their way (`Prelude`), and its run begins with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Gathered", "Prelude", "Row", "Run", "Runs"]

Row = tuple[Sequence[int], int]
"""A request that decodes: its blocks up to the token that is computed, and that token's position."""

Gathered = tuple[Tensor, Tensor]
"""Keys and values, `[n, kv_heads, tokens, dim]`."""

# Runs that had no step for so many of them are over; parts of a batch that take turns have one every few.
_PATIENCE_STEPS = 8
# Room for more blocks, so that a run is not gathered anew with each: a share of those there are, in limits.
_MORE_SHARE, _LEAST_MORE_BLOCKS, _MOST_MORE_TOKENS = 4, 2, 512


@dataclass(slots=True, eq=False)
class _Layer:
    """What is kept of a layer: `[n, kv_heads, capacity, dim]` each, complete up to the run's step `step`.

    Keys may be a view of columns, `[n, kv_heads, dim, capacity]` in memory.
    """

    keys: Tensor
    values: Tensor
    buffers: list[Tensor]
    step: int

    def first(self, tokens: int) -> Gathered:
        """The first `tokens`, or all there is room for where a part would be copied to be multiplied."""
        if self.keys.dtype is torch.float32:
            return self.keys[:, :, :tokens], self.values[:, :, :tokens]
        return self.keys, self.values


@dataclass(slots=True, eq=False)
class Prelude:
    """The first blocks of a request that is to decode here soon, gathered layer by layer.

    Attributes:
        blocks: Full ones, from the request's first on.
        awaited: Whether the request is still to come; once it is not, the prelude goes after a few steps.
    """

    blocks: list[int]
    awaited: bool = True
    last_used: int = 0
    layers: dict[int, _Layer] = field(default_factory=dict[int, _Layer])


class Run:
    """Some requests that decode together; made and found again by `Runs`."""

    def __init__(self, rows: Sequence[Row], owner: Runs) -> None:
        self._owner = owner
        self._tables = [list(blocks) for blocks, _ in rows]
        self._positions = [position for _, position in rows]
        self._step = 0
        self._layers: dict[int, _Layer] = {}
        self._order = torch.arange(len(rows))
        self._at = torch.tensor(self._positions)
        self.blocks = {block for table in self._tables for block in table}
        self.last_used = 0

    def goes_on(self, rows: Sequence[Row]) -> bool:
        """Whether these are the same requests, each one token further."""
        return len(rows) == len(self._tables) and all(
            position == before + 1 and blocks[: len(table)] == table
            for (blocks, position), before, table in zip(rows, self._positions, self._tables, strict=True)
        )

    def has_one_of(self, rows: Sequence[Row]) -> bool:
        """Whether a request has come from here: what it writes to is nobody else's."""
        last = {table[-1] for table in self._tables}
        return any(not last.isdisjoint(blocks[-2:]) for blocks, _ in rows)

    def go_on(self, rows: Sequence[Row]) -> None:
        """Begin the next step."""
        self._step += 1
        for index, (blocks, position) in enumerate(rows):
            table = self._tables[index]
            self.blocks.update(blocks[len(table) :])
            table += blocks[len(table) :]
            self._positions[index] = position
        self._at = torch.tensor(self._positions)

    def read(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        tokens: int,
        gather: Callable[[int], Gathered],
        *,
        across: bool = False,
    ) -> Gathered:
        """Return what the requests' blocks hold of a layer, in their first `tokens` slots or more of them.

        Args:
            layer: Its number.
            keys: `[n, kv_heads, key_dim]` of this step's tokens, which are in the blocks already.
            values: `[n, kv_heads, value_dim]` of this step's tokens.
            tokens: A multiple of the tokens of a block.
            gather: Gathers it from the blocks, all but so many of each request's first, into memory that is
                valid until the next call.
            across: Whether keys that are kept from now on lie as columns.
        """
        kept = self._layers.get(layer)
        if kept is not None and kept.step == self._step - 1 and tokens <= kept.keys.shape[2]:
            kept.keys[self._order, :, self._at] = keys
            kept.values[self._order, :, self._at] = values
            kept.step = self._step
            return kept.first(tokens)
        if not self._step and (found := self._owner.take_prelude(self._tables, layer, tokens)) is not None:
            kept, num_blocks = found
            behind = slice(num_blocks * self._owner.block_tokens, tokens)
            kept.keys[:, :, behind], kept.values[:, :, behind] = gather(num_blocks)
            self._layers[layer] = kept
            return kept.first(tokens)
        gathered = gather(0)
        self._give_back(layer)
        if self._step and (made := self._owner.keep(gathered, self._step, across=across)) is not None:
            self._layers[layer] = made  # from the second step on: a run of one would be kept in vain
        return gathered

    def _give_back(self, layer: int) -> None:
        if (kept := self._layers.pop(layer, None)) is not None:
            self._owner.put(kept.buffers)

    def close(self) -> None:
        """Give all memory back."""
        for layer in list(self._layers):
            self._give_back(layer)


class Runs:
    """The runs of one KV cache, and the memory that they take.

    One thread steps; `fit` may be called from any.

    Args:
        most_bytes: The most memory that is ever taken; with 0 nothing is kept.
        block_tokens: Tokens of a block.
    """

    def __init__(self, most_bytes: int, block_tokens: int) -> None:
        self.most_bytes, self.block_tokens = most_bytes, block_tokens
        self._limit_bytes = most_bytes
        self.used_bytes = 0
        self._runs: list[Run] = []
        self._preludes: list[Prelude] = []
        self._free: list[Tensor] = []
        self._step = 0

    def fit(self, room_bytes: int) -> None:
        """Take no more than `room_bytes` from the next step on."""
        self._limit_bytes = max(0, min(self.most_bytes, room_bytes))

    def begin(self) -> None:
        """Begin a step: runs that ended some steps ago are closed, and all where the memory is wanted."""
        self._step += 1
        crowded = self.used_bytes > self._limit_bytes
        since = self._step - _PATIENCE_STEPS
        self._close(run for run in self._runs if crowded or run.last_used < since)
        self._drop(p for p in self._preludes if crowded or (not p.awaited and p.last_used < since))
        if crowded:
            self._free.clear()
            self.used_bytes = 0

    def claim(self, rows: Sequence[Row]) -> Run | None:
        """Return the run that these requests' step belongs to; `None` if nothing is to be kept."""
        if not self._limit_bytes:
            return None
        run = next((run for run in self._runs if run.goes_on(rows)), None)
        if run is None:
            self._close(run for run in self._runs if run.has_one_of(rows))
            run = Run(rows, self)
            self._runs.append(run)
        else:
            run.go_on(rows)
        run.last_used = self._step
        return run

    def forget(self, blocks: Iterable[int]) -> None:
        """Close the runs that hold one of these blocks, whose content changes."""
        changed = set(blocks)
        self._close(run for run in self._runs if not run.blocks.isdisjoint(changed))
        self._drop(p for p in self._preludes if not changed.isdisjoint(p.blocks))

    def prelude(self, blocks: Sequence[int]) -> Prelude:
        """Return a new one for a request that will come with these blocks, which are full."""
        made = Prelude(list(blocks))
        self._preludes.append(made)
        return made

    def prepare(self, prelude: Prelude, layer: int, gathered: Gathered) -> None:
        """Keep what its blocks hold of a layer, if there is room and it was not dropped."""
        if prelude in self._preludes and (kept := self.keep(gathered, 0)) is not None:
            prelude.layers[layer] = kept

    def release(self, prelude: Prelude) -> None:
        """Keep it for a few more steps only: the request is here, or will not come."""
        prelude.awaited, prelude.last_used = False, self._step

    def drop(self, prelude: Prelude) -> None:
        """Give its memory back at once."""
        if prelude in self._preludes:
            self._drop([prelude])

    def take_prelude(self, tables: Sequence[list[int]], layer: int, tokens: int) -> tuple[_Layer, int] | None:
        """Return a layer of a request's prelude with room for `tokens`, and how many blocks it has."""
        for prelude in self._preludes:
            blocks, kept = prelude.blocks, prelude.layers.get(layer)
            if (
                kept is not None
                and len(tables) == 1
                and tables[0][: len(blocks)] == blocks
                and tokens <= kept.keys.shape[2]
            ):
                del prelude.layers[layer]
                return kept, len(blocks)
        return None

    def keep(self, gathered: Gathered, step: int, *, across: bool = False) -> _Layer | None:
        """Return a copy with room for more tokens, keys perhaps as columns; `None` if memory is short."""
        num_requests, _, tokens, _ = gathered[0].shape
        share = min(tokens // self.block_tokens // _MORE_SHARE, _MOST_MORE_TOKENS // self.block_tokens)
        more = max(_LEAST_MORE_BLOCKS, share) * self.block_tokens
        room = tokens + more
        if more >= _MOST_MORE_TOKENS:  # long decodes are gathered in whole chunks of that
            room = -(-room // _MOST_MORE_TOKENS) * _MOST_MORE_TOKENS
        shapes = [(num_requests, part.shape[1], room, part.shape[3]) for part in gathered]
        sizes = [
            torch.Size(s).numel() * part.dtype.itemsize for s, part in zip(shapes, gathered, strict=True)
        ]
        buffers = self.take(sizes)
        if not buffers:
            return None
        keys, values = (
            buffer[:size].view(part.dtype)
            for buffer, size, part in zip(buffers, sizes, gathered, strict=True)
        )
        keys = _columns(keys, shapes[0]) if across else keys.view(shapes[0])
        values = values.view(shapes[1])
        keys[:, :, :tokens], values[:, :, :tokens] = gathered
        # A masked key has weight zero, and zero times a NaN that was there before would be a NaN.
        values[:, :, tokens:] = 0
        return _Layer(keys, values, buffers, step)

    def take(self, sizes: Sequence[int]) -> list[Tensor]:
        """Lend buffers of so many bytes or more, one for each size; none if there is no room for all."""
        taken: list[Tensor] = []
        for size_bytes in sizes:
            buffer = self._take(size_bytes)
            if buffer is None:
                self.put(taken)
                return []
            taken.append(buffer)
        return taken

    def _take(self, size_bytes: int) -> Tensor | None:
        # One that was used before has its pages: new ones would cost more than what is written there.
        fitting = [buffer for buffer in self._free if size_bytes <= len(buffer) <= 2 * size_bytes]
        if fitting:
            buffer = min(fitting, key=len)
            self._free = [other for other in self._free if other is not buffer]
            return buffer
        while self._free and self.used_bytes + size_bytes > self._limit_bytes:
            self.used_bytes -= len(self._free.pop(0))
        if self.used_bytes + size_bytes > self._limit_bytes:
            return None
        self.used_bytes += size_bytes
        return torch.empty(size_bytes, dtype=torch.uint8)

    def put(self, buffers: Iterable[Tensor]) -> None:
        """Take buffers back."""
        self._free.extend(buffers)

    def _close(self, runs: Iterable[Run]) -> None:
        for run in list(runs):
            run.close()
            self._runs.remove(run)

    def _drop(self, preludes: Iterable[Prelude]) -> None:
        for prelude in list(preludes):
            self._preludes.remove(prelude)
            for kept in prelude.layers.values():
                self.put(kept.buffers)
            prelude.layers.clear()

    def __repr__(self) -> str:
        return f"<Runs [{len(self._runs)} runs, {self.used_bytes:,} of {self._limit_bytes:,} bytes]>"


def _columns(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view `[n, kv_heads, capacity, dim]` of memory in which each key is a column."""
    num_requests, heads, room, dim = shape
    return flat.view(num_requests, heads, dim, room).transpose(2, 3)
