"""The forward pass of a step: rows of tokens in, logits out.

The input is plain values, so that the model may run in this process or in others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hotswap.backends.torch.adapters.plan import adaptation
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.attention import Paged, Step
from hotswap.backends.torch.batch import Batch
from hotswap.backends.torch.blocks import Copy
from hotswap.backends.torch.decode_graphs import DecodeGraphs
from hotswap.backends.torch.device_attention import numbers_of
from hotswap.backends.torch.gathered import Gathering
from hotswap.backends.torch.kv import KVCache
from hotswap.backends.torch.linear import MIN_ROWS
from hotswap.backends.torch.pieces import Piece
from hotswap.backends.torch.recurrent.snapshots import StateCopy
from hotswap.backends.torch.recurrent.states import Span, StatePool, StepStates
from hotswap.backends.torch.step_numbers import send
from hotswap.kernels.paged_attention import Rows

__all__ = ["MAX_SCORED_ROWS", "Forward", "LocalForward", "Piece", "Work", "assemble"]

MAX_SCORED_ROWS = 64
"""The most rows of a step whose logits are needed beside those that sample; bounds the memory of logits."""

# Rows of a prompt that a CPU computes together, so that their scores fit its cache.
_TILE_ROWS = 8


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The input of one step.

    Attributes:
        pieces: The tokens, at most one piece per request.
        fresh: Newly allocated KV blocks, to be cleared first.
        copies: Copies between KV blocks, to be made before that.
        restored: Snapshots with whose states requests begin, to be copied before the step.
        saved: States to be copied to snapshots after the step.
    """

    pieces: tuple[Piece, ...]
    fresh: Sequence[int] = ()
    copies: Sequence[Copy] = ()
    restored: Sequence[StateCopy] = ()
    saved: Sequence[StateCopy] = ()

    @property
    def num_tokens(self) -> int:
        """The number of rows."""
        return sum(len(piece.tokens) for piece in self.pieces)


class Forward(ABC):
    """A model with its KV cache, in this process or in others. One thread calls `submit` and `result`.

    Steps are computed in the order of `submit`. So several steps in flight may contain consecutive pieces of
    one request, and a block may be reallocated while a step that writes to it is in flight.

    Attributes:
        num_blocks: The number of KV blocks.
        size_bytes: The memory of those blocks, and of the recurrent states of requests.
        depth: The maximum number of steps in flight.
        keeps_states: Whether requests have recurrent states, which a step changes: a part of a request cannot
            be computed twice, and its KV blocks alone do not continue it.
        num_snapshots: How many snapshots of states there is room for, after the slots of requests.
    """

    num_blocks: int
    size_bytes: int
    depth: int = 1
    keeps_states: bool = False
    num_snapshots: int = 0

    @abstractmethod
    def submit(self, work: Work) -> None:
        """Start a step; at most `depth` steps may be in flight."""

    @abstractmethod
    def result(self) -> Tensor:
        """Return the logits of the oldest step in flight, `[rows that are needed, vocabulary]`.

        In the order of the pieces; of each, the tokens that are scored come before the one that samples.
        Valid until the next `submit`. If the forward pass is batch-invariant, the order of pieces does not
        change the bits of their logits.
        """

    def do_background_work(self) -> bool:
        """Do a small piece of work between two steps that makes later ones faster; false if none is left."""
        return False


class LocalForward(Forward):
    """A model in this process.

    Args:
        model: The modules.
        cache: Their KV cache.
        invariant: See `assemble`.
        linear_only: See `assemble`.
        background_work: Called by `do_background_work`.
        states: The recurrent states of requests; `None` for models without any.
        graphs: Runs decode steps, where it can.
        num_snapshots: How many of the slots of states are for snapshots, the last ones.

    Attributes:
        cache: The KV cache.
        states: The recurrent states of requests; `None` for models without any.
        work: What was submitted last.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        *,
        invariant: bool,
        linear_only: bool = False,
        background_work: Callable[[], bool] = lambda: False,
        states: StatePool | None = None,
        graphs: DecodeGraphs | None = None,
        num_snapshots: int = 0,
    ) -> None:
        self.num_blocks, self.size_bytes = cache.num_blocks, cache.size_bytes
        self.cache, self.states, self.keeps_states = cache, states, states is not None
        if states is not None:
            self.size_bytes += states.size_bytes
        self._model, self._background_work = model, background_work
        self._invariant, self._linear_only = invariant, linear_only
        self._graphs, self.num_snapshots = graphs, num_snapshots
        self.work = Work(())

    def submit(self, work: Work) -> None:
        self.work = work

    def result(self) -> Tensor:
        self.cache.copy(self.work.copies)
        self.cache.clear(self.work.fresh)
        if self.states is None:
            return self._logits()
        self.states.copy(self.work.restored)
        logits = self._logits()
        self.states.copy(self.work.saved)
        return logits

    def _logits(self) -> Tensor:
        pieces = self.work.pieces
        if self._graphs is not None and (logits := self._graphs.logits(pieces)) is not None:
            return logits
        batch = assemble(
            pieces, self.cache, invariant=self._invariant, linear_only=self._linear_only, states=self.states
        )
        return batch.logits(self._model)

    def do_background_work(self) -> bool:
        return self._background_work()


def assemble(
    pieces: Sequence[Piece],
    cache: KVCache,
    *,
    invariant: bool,
    linear_only: bool = False,
    states: StatePool | None = None,
) -> Batch:
    """Build the tensors of a step from its pieces, in one row.

    All its integers are sent to the device in one copy. On devices that gather blocks pieces sorted by length
    need less padding.

    Args:
        pieces: The tokens, at most one piece per request.
        cache: The KV cache of the model.
        invariant: Whether logits must be batch-invariant to the bit.
        linear_only: Whether linear layers are the only products with weights: they are batch-invariant from
            `MIN_ROWS` rows on. If not, the pass runs in `BatchInvariantMode`, which takes more time.
        states: The recurrent states of requests; `None` for models without any.
    """
    ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    keep: list[int] = []
    adapted: list[tuple[AdapterSlot, range, range]] = []
    starts: list[int] = []
    for piece in pieces:
        starts.append(len(ids))
        span = range(piece.start, piece.end)
        ids += piece.tokens
        positions += span
        blocks += [piece.blocks[at // cache.block_tokens] for at in span]
        rows = range(len(ids) - len(span), len(ids))
        if piece.adapter is not None:
            adapted.append((piece.adapter, rows, range(len(keep), len(keep) + piece.num_kept)))
        keep += rows[: piece.num_scored]
        keep += rows[-1:] if piece.samples else ()
    least = MIN_ROWS if invariant else 0
    num_kept, padding = len(keep), [0] * (least - len(ids))
    keep += [0] * max(0, least - num_kept)
    positions += padding
    longs = {
        "ids": ids + padding,
        "positions": positions,
        "blocks": blocks + padding,
        "offsets": [position % cache.block_tokens for position in positions],
        "keep": keep,
    }
    numbers = numbers_of(pieces, starts, cache) if cache.has_kernels else None
    sent = send(longs, {} if numbers is None else numbers.ints, cache.device)
    at = sent["positions"]
    return Batch(
        ids=sent["ids"][None],
        positions=at[None],
        keep=sent["keep"],
        num_kept=num_kept,
        step=Step(
            cache=cache,
            blocks=sent["blocks"],
            offsets=sent["offsets"],
            paged=_paged(pieces, starts, at, cache) if cache.in_place else None,
            on_device=None if numbers is None else numbers.rows(sent, at, is_padded=bool(padding)),
            gathering=None if cache.in_place else Gathering(pieces, starts, cache),
            adapters=adaptation(adapted, cache.device),
            positions=at,
            lengths=_lengths(pieces, at),
            states=None
            if states is None
            else StepStates(states, _spans(pieces, starts), watches=invariant and linear_only),
        ),
        watched=invariant and not linear_only,
    )


def _lengths(pieces: Sequence[Piece], at: Tensor) -> Tensor | None:
    """Return the length by which each row's RoPE factors are chosen, `[T]`; `None` without any."""
    if not any(piece.length for piece in pieces):
        return None
    each = [piece.length for piece in pieces for _ in piece.tokens]
    each += [0] * (len(at) - len(each))
    return torch.maximum(torch.tensor(each, device=at.device), at + 1)


def _spans(pieces: Sequence[Piece], starts: Sequence[int]) -> list[Span]:
    return [
        Span(piece.slot, first, first + len(piece.tokens), is_new=piece.start == 0)
        for piece, first in zip(pieces, starts, strict=True)
    ]


def _paged(pieces: Sequence[Piece], starts: Sequence[int], at: Tensor, cache: KVCache) -> Paged:
    """Build the block tables and row tiles of a step on a CPU."""
    tables = [piece.blocks_up_to_end(cache.block_tokens) for piece in pieces]
    width = max(map(len, tables), default=0)
    tiles: list[tuple[int, int, int]] = []
    parts: list[range] = []
    for number, (piece, start) in enumerate(zip(pieces, starts, strict=True)):
        end = start + len(piece.tokens)
        tiles += ((number, row, min(_TILE_ROWS, end - row)) for row in range(start, end, _TILE_ROWS))
        if parts and len(piece.tokens) == 1 == len(pieces[number - 1].tokens):
            parts[-1] = range(parts[-1].start, end)
        else:
            parts.append(range(start, end))
    num_rows = parts[-1].stop if parts else 0
    return Paged(
        rows=Rows(
            tables=_integers([[*table, *[0] * (width - len(table))] for table in tables]),
            tiles=_integers(tiles),
            order=torch.arange(num_rows, dtype=torch.int32),
        ),
        parts=[at[part.start : part.stop] for part in parts],
    )


def _integers(values: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
