"""The forward pass of a model that is sharded over rank processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from hotswap.backends.torch.forward import Forward, Piece, Work
from hotswap.backends.torch.kv import LayerShape, blocks_for
from hotswap.backends.torch.parallel.kv import RankedBlocks, RankedStates
from hotswap.backends.torch.parallel.messages import Step
from hotswap.backends.torch.parallel.processes import Ranks

__all__ = ["RankedForward"]


class RankedForward(Forward):
    """Sends the input of each step to all ranks, and reads the logits from memory shared with the last stage.

    As many steps are in flight as there are stages, so that all stages compute. The input is small: token
    ids, positions and block tables. Hidden states do not pass through this process.

    Args:
        ranks: The ranks, bound to the model and with KV blocks.
        logits: `[slots, rows, num_logits]` in fp32, shared with the ranks; one slot per step in flight.
        num_blocks: The number of KV blocks, equal on all ranks.
        size_bytes: The memory of those blocks and of recurrent states, on all ranks together.
        block_tokens: Tokens per block.
        keeps_states: Whether requests have recurrent states: each rank has those of its own layers.
        num_snapshots: How many snapshots of states there is room for.
        layers: What a request keeps in each layer, by rank.

    Attributes:
        cache: The KV blocks of all ranks, to copy them; `None` if some are on other nodes.
        states: The recurrent states of all ranks, likewise; `None` if there are none.
    """

    def __init__(
        self,
        ranks: Ranks,
        logits: Tensor,
        *,
        num_blocks: int,
        size_bytes: int,
        block_tokens: int,
        keeps_states: bool,
        num_snapshots: int,
        layers: Sequence[Sequence[LayerShape]],
    ) -> None:
        self.num_blocks, self.size_bytes, self.depth = num_blocks, size_bytes, len(logits)
        self.keeps_states, self.num_snapshots = keeps_states, num_snapshots
        self._ranks, self._logits, self._block_tokens = ranks, logits, block_tokens
        self._slot = 0
        is_here = all(ranks.is_here)
        self.cache = RankedBlocks(ranks, layers, block_tokens) if is_here else None
        self.states = RankedStates(ranks, layers) if is_here and keeps_states else None
        self._under_way: deque[tuple[int, Tensor]] = deque()

    def submit(self, work: Work) -> None:
        pieces = tuple(self._plain(piece) for piece in work.pieces)
        restored, saved = tuple(work.restored), tuple(work.saved)
        sent = Work(pieces, tuple(work.fresh), tuple(work.copies), restored, saved)
        number = self._ranks.submit(Step(sent, self._slot))
        num_rows = sum(piece.num_kept for piece in pieces)
        self._under_way.append((number, self._logits[self._slot, :num_rows]))
        self._slot = (self._slot + 1) % self.depth

    def result(self) -> Tensor:
        number, logits = self._under_way.popleft()
        self._ranks.finish(number)
        return logits

    def _plain(self, piece: Piece) -> Piece:
        """Return the piece with the blocks that it needs: long block tables are most of a message."""
        num_blocks = blocks_for(piece.end, self._block_tokens)
        return replace(
            piece, tokens=tuple(piece.tokens), blocks=tuple(piece.blocks[:num_blocks]), adapter=None
        )
