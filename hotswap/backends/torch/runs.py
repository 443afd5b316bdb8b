"""Keys and values of requests that decode together, gathered once and then appended to.

A batch of decodes reads the blocks of all its requests in every step, and on a CPU gathering them into one
piece costs as much memory traffic as attending to them twice over. While a request goes on decoding nothing
of that changes but one token. So what was gathered is kept from step to step, within a limit, for as many
layers as it has room for.

A request is known by its blocks and position. Blocks are append-only, and whoever changes what is in one
(`KVCache.clear`, `KVCache.copy`) has it forgotten, so what goes on holds what its blocks hold.

Requests come and go one by one, and their lengths differ. Each has a slot of a run, and a run is read as wide
as its longest request. Who comes goes where least more is read for it, its blocks alone are gathered, and of
one that leaves the last of the run takes the slot. Where a run has become too wide for many in it, or two
runs might be one, some move (`grouping`).

A request that arrives with its blocks would wait for all of them to be gathered in its first step. So what is
full is gathered while others are still on their way (`Prelude`), and its run begins with that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from hotswap.backends.torch.grouping import Group, Grouping
from hotswap.backends.torch.kept import Gathered, Kept, Lender, reads_parts

__all__ = ["GATHERED_TOKENS", "Prelude", "Row", "Run", "Runs"]

Row = tuple[Sequence[int], int]
"""A request that decodes: its blocks up to the token that is computed, and that token's position."""

# Keys gathered at once for a batch of decodes, in tokens: bounds the memory of the gather.
GATHERED_TOKENS = 1 << 16
# What a run costs in a layer beside what it reads, in bytes that are read in the same time: an estimate, for
# some twenty operators, and not tuned.
_RUN_BYTES = 1 << 20
# Changes of runs in a step.
_MOST_CHANGES = 8
# Runs that had no step for so many of them are over; parts of a batch that take turns have one every few.
_PATIENCE_STEPS = 8


@dataclass(slots=True, eq=False)
class _Seat:
    """A request of a run.

    Attributes:
        blocks: Its blocks.
        position: That of its newest token.
        run: The run it is in; `None` when it has left.
        slot: Its slot there as of the last step, -1 before its first.
        row: Its number among the rows of this step.
    """

    blocks: list[int]
    position: int
    run: Run | None = None
    slot: int = -1
    row: int = -1

    @property
    def need(self) -> int:
        """Its blocks."""
        return len(self.blocks)

    @property
    def settled(self) -> bool:
        """Whether it was gathered for the run that it is in."""
        return self.slot >= 0

    def goes_on(self, row: Row) -> bool:
        """Whether this is the request, one token further."""
        blocks, position = row
        return position == self.position + 1 and list(blocks[: len(self.blocks)]) == self.blocks


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
    layers: dict[int, Kept] = field(default_factory=dict[int, Kept])

    def take(self, layer: int, tokens: int) -> Kept | None:
        """Hand over what it has of a layer, if so many tokens fit there."""
        kept = self.layers.get(layer)
        return self.layers.pop(layer) if kept is not None and kept.has_room(1, tokens) else None


class Run(Group[_Seat]):
    """Some requests that decode together, a slot for each; made and found again by `Runs`."""

    def __init__(self, lender: Lender, prelude: Prelude | None) -> None:
        super().__init__()
        self._lender, self._prelude = lender, prelude
        self.last_used = 0
        self._slots: list[_Seat] = []
        self._new: list[int] = []  # slots of those that came with this step
        self._step = 0
        self._layers: dict[int, Kept] = {}
        self._at = self._order = torch.empty(0)

    @property
    def closed(self) -> bool:
        """Whether nobody else may join yet: in its first step it takes what was gathered of its request."""
        return self._prelude is not None and not self._step

    @property
    def rows(self) -> list[int]:
        """The numbers of the requests' rows in this step, in the order of their slots."""
        return [seat.row for seat in self._slots]

    def begin(self) -> None:
        """Begin the next step: give slots to those that came, and those of who left to the last ones."""
        self._step += 1
        if self._step > 1:
            self._prelude = None
        slots = [seat if seat.run is self and seat.settled else None for seat in self._slots]
        coming = [seat for seat in self.members if not seat.settled]
        while len(slots) > len(self.members):
            last = slots.pop()
            if last is not None:
                coming.append(last)
        self._new = [slot for slot, seat in enumerate(slots) if seat is None]
        self._new += range(len(slots), len(self.members))
        for slot, seat in zip(self._new, coming, strict=True):
            seat.slot = slot
        self._slots = sorted(self.members, key=attrgetter("slot"))
        self._order = torch.arange(len(self._slots))
        self._at = torch.tensor([seat.position for seat in self._slots])

    def read(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        tokens: int,
        gather: Callable[[], Gathered],
        gather_one: Callable[[int, int], Gathered],
        *,
        across: bool = False,
    ) -> Gathered:
        """Return what the requests' blocks hold of a layer, in their first `tokens` slots or more of them.

        Args:
            layer: Its number.
            keys: `[n, kv_heads, key_dim]` of this step's tokens, which are in the blocks already.
            values: `[n, kv_heads, value_dim]` of this step's tokens.
            tokens: A multiple of the tokens of a block.
            gather: Gathers it from the blocks, into memory that is valid until the next call.
            gather_one: Gathers what the blocks of one of them hold, but for so many of its first, likewise.
            across: Whether keys that are kept from now on lie as columns.
        """
        num_requests, num_before = len(self._slots), 0
        kept = self._layers.get(layer)
        if kept is None and self._prelude is not None:
            kept = self._prelude.take(layer, tokens)
            if kept is not None:
                self._layers[layer], num_before = kept, len(self._prelude.blocks)
        current = kept is not None and kept.step >= self._step - 1
        if kept is None or not self._lender.suits(kept, num_requests, tokens):
            kept = self._make_room(layer, tokens, (keys, values), across=across, copied=current)
        if kept is None:
            return gather()
        if kept.step < self._step:
            for slot in self._new if current else range(num_requests):
                kept.fill(slot, gather_one(slot, num_before), first=num_before * self._lender.block_tokens)
        kept.append(self._order, self._at, keys, values)
        kept.step = self._step
        return kept.first(num_requests, tokens)

    def _make_room(
        self, layer: int, tokens: int, like: Gathered, *, across: bool, copied: bool
    ) -> Kept | None:
        """Make room for the requests of now, and let it hold what was kept of them if that is `copied`."""
        kept = self._layers.pop(layer, None)
        room = self._lender.make(len(self._slots), tokens, like, across=across)
        if kept is not None:
            if room is not None and copied:
                room.take_over(kept, len(self._slots))
            self._lender.put(kept.buffers)
        if room is not None:
            self._layers[layer] = room
        return room

    def close(self) -> None:
        """Give all memory back."""
        for kept in self._layers.values():
            self._lender.put(kept.buffers)
        self._layers.clear()


class Runs:
    """The runs of one KV cache, and the memory that they take.

    One thread steps; `fit` may be called from any.

    Args:
        most_bytes: The most memory that is ever taken; with 0 nothing is kept.
        block_tokens: Tokens of a block.

    Attributes:
        lender: The memory.
        grouping: By what it is decided who decodes together.
    """

    def __init__(self, most_bytes: int, block_tokens: int) -> None:
        self.lender = Lender(most_bytes, block_tokens)
        self.grouping = Grouping(fixed=0.0, most=GATHERED_TOKENS // block_tokens, opened=int)
        self._runs: list[Run] = []
        self._holders: dict[int, set[_Seat]] = {}  # of each block
        self._preludes: list[Prelude] = []
        self._step = 0
        self._whole = False  # are slots read up to their end?
        self._changed = True  # since it was last seen to that runs are as they should be

    @property
    def most_bytes(self) -> int:
        """The most memory that is ever taken."""
        return self.lender.most_bytes

    @property
    def used_bytes(self) -> int:
        """The memory that is taken now."""
        return self.lender.used_bytes

    def fit(self, room_bytes: int) -> None:
        """Take no more than `room_bytes` from the next step on."""
        self.lender.fit(room_bytes)

    def know(self, token_bytes: int, dtype: torch.dtype) -> None:
        """Learn what a layer keeps of a token, by which it is decided who decodes together."""
        block_tokens, self._whole = self.lender.block_tokens, not reads_parts(dtype)

        def roomy(num_blocks: int) -> int:
            return self.lender.roomy(num_blocks * block_tokens) // block_tokens

        self.grouping = Grouping(
            fixed=_RUN_BYTES / max(1, token_bytes * block_tokens),
            most=GATHERED_TOKENS // block_tokens,
            opened=roomy if self._whole else int,
        )

    def begin(self) -> None:
        """Begin a step: runs that ended some steps ago are closed, and all where the memory is wanted."""
        self._step += 1
        crowded = self.lender.crowded
        since = self._step - _PATIENCE_STEPS
        self._close(run for run in self._runs if crowded or run.last_used < since)
        self._drop(p for p in self._preludes if crowded or (not p.awaited and p.last_used < since))
        if crowded:
            self.lender.clear()

    def arrange(self, rows: Sequence[Row]) -> list[Run] | None:
        """Return the runs whose step this is, which share the rows; `None` if nothing is to be kept."""
        if not self.lender.limit_bytes:
            return None
        seats = [self._seat(number, row) for number, row in enumerate(rows)]
        runs = self._active(seats)
        coming = [seat for seat in seats if seat.run is None]
        for seat in sorted(coming, key=attrgetter("need"), reverse=True):
            prelude = self._prelude_of(seat)
            run = self.grouping.place(seat, _open(runs)) if prelude is None else None
            if run is None:
                runs.append(run := Run(self.lender, prelude))
            self._move(seat, run)
        self._regroup(runs)
        for run in runs:
            if run.members:
                run.last_used = self._step
                run.begin()
        self._runs += [run for run in runs if run not in self._runs]
        self._close(run for run in self._runs if not run.members)
        return [run for run in runs if run.members]

    def _seat(self, number: int, row: Row) -> _Seat:
        """The seat of a request, in the run where it was, or in none yet."""
        blocks, position = row
        # The last block is its own; it may be new, and the one before it have been the last.
        near = (seat for block in reversed(blocks[-2:]) for seat in self._holders.get(block, ()))
        seat = next((seat for seat in near if seat.goes_on(row)), None) or _Seat([], position)
        seat.position, seat.row = position, number
        for block in blocks[len(seat.blocks) :]:
            self._holders.setdefault(block, set()).add(seat)
            seat.blocks.append(block)
            self._changed = True
        return seat

    def _active(self, seats: Iterable[_Seat]) -> list[Run]:
        """The runs whose step this is: most of their requests are here, and the others have left."""
        here = Counter(seat.run for seat in seats if seat.run is not None)
        present = set(seats)
        for run, count in here.items():
            if 2 * count >= len(run.members):
                for seat in [seat for seat in run.members if seat not in present]:
                    self._remove(seat)
            else:
                for seat in [seat for seat in run.members if seat in present]:
                    self._move(seat, None)
        runs = [run for run in here if run.members and run.members[0] in present]
        for run in runs:
            self._widen(run)
        return runs

    def _regroup(self, runs: list[Run]) -> None:
        """Let requests change runs where that is soon paid back."""
        for _ in range(_MOST_CHANGES if self._changed else 0):
            move = self.grouping.change([run for run in _open(runs) if run.members])
            if move is None:
                self._changed = any(run.closed for run in runs)
                return
            if (target := move.target) is None:
                runs.append(target := Run(self.lender, None))
            for seat in list(move.members):
                self._move(seat, target)

    def _move(self, seat: _Seat, run: Run | None) -> None:
        if seat.run is not None:
            seat.run.members.remove(seat)
        seat.run, seat.slot = run, -1
        if run is not None:
            run.members.append(seat)
            self._widen(run)
        self._changed = True

    def _widen(self, run: Run) -> None:
        """Know at once how wide a run will be read, by which the next request is placed."""
        if self._whole and run.longest > run.capacity:
            run.capacity = self.grouping.opened(run.longest)

    def _remove(self, seat: _Seat) -> None:
        """Know nothing more of a request."""
        self._move(seat, None)
        for block in seat.blocks:
            holders = self._holders[block]
            holders.discard(seat)
            if not holders:
                del self._holders[block]
        seat.blocks.clear()

    def forget(self, blocks: Iterable[int]) -> None:
        """Let nothing that was kept of these blocks, whose content changes, be used any more."""
        changed = set(blocks)
        for block in changed:
            for seat in tuple(self._holders.get(block, ())):
                self._remove(seat)
        self._drop(p for p in self._preludes if not changed.isdisjoint(p.blocks))

    def prelude(self, blocks: Sequence[int]) -> Prelude:
        """Return a new one for a request that will come with these blocks, which are full."""
        made = Prelude(list(blocks))
        self._preludes.append(made)
        return made

    def prepare(self, prelude: Prelude, layer: int, gathered: Gathered) -> None:
        """Keep what its blocks hold of a layer, if there is room and it was not dropped."""
        if prelude not in self._preludes:
            return
        kept = self.lender.make(1, gathered[0].shape[2], gathered, across=False)
        if kept is not None:
            kept.fill(0, gathered)
            prelude.layers[layer] = kept

    def release(self, prelude: Prelude) -> None:
        """Keep it for a few more steps only: the request is here, or will not come."""
        prelude.awaited, prelude.last_used = False, self._step

    def drop(self, prelude: Prelude) -> None:
        """Give its memory back at once."""
        if prelude in self._preludes:
            self._drop([prelude])

    def _prelude_of(self, seat: _Seat) -> Prelude | None:
        fitting = (p for p in self._preludes if p.layers and seat.blocks[: len(p.blocks)] == p.blocks)
        return next(fitting, None)

    def _close(self, runs: Iterable[Run]) -> None:
        for run in list(runs):
            for seat in list(run.members):
                self._remove(seat)
            run.close()
            self._runs.remove(run)

    def _drop(self, preludes: Iterable[Prelude]) -> None:
        for prelude in list(preludes):
            self._preludes.remove(prelude)
            for kept in prelude.layers.values():
                self.lender.put(kept.buffers)
            prelude.layers.clear()

    def __repr__(self) -> str:
        lender = self.lender
        return f"<Runs [{len(self._runs)} runs, {lender.used_bytes:,} of {lender.limit_bytes:,} bytes]>"


def _open(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if not run.closed]
