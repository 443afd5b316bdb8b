"""A model whose parts are in other processes, as the runner sees it."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from hotswap.backends.torch.forward import Forward, Piece, Work
from hotswap.backends.torch.kv import blocks_for
from hotswap.backends.torch.parallel.messages import Step
from hotswap.backends.torch.parallel.processes import Ranks

__all__ = ["RankedForward"]


class RankedForward(Forward):
    """Tells every rank what a step computes, and takes the logits from memory that the last stage writes to.

    As many steps are under way as there are stages, so that all of them work. What ranks are told is small:
    token ids, positions and block tables; hidden states never pass through this process.

    Args:
        ranks: Bound to the model, with KV blocks.
        logits: `[slots, rows, num_logits]` in fp32, shared with the ranks; a slot for each step under way.
        num_blocks: KV blocks, the same on all ranks.
        size_bytes: What they take on all ranks together.
        block_tokens: Tokens of a block.
    """

    def __init__(
        self, ranks: Ranks, logits: Tensor, *, num_blocks: int, size_bytes: int, block_tokens: int
    ) -> None:
        self.num_blocks, self.size_bytes, self.depth = num_blocks, size_bytes, len(logits)
        self._ranks, self._logits, self._block_tokens = ranks, logits, block_tokens
        self._slot = 0
        self._under_way: deque[tuple[int, Tensor]] = deque()

    def submit(self, work: Work) -> None:
        pieces = tuple(self._plain(piece) for piece in work.pieces)
        number = self._ranks.submit(Step(Work(pieces, tuple(work.fresh), tuple(work.copies)), self._slot))
        num_rows = sum(piece.samples for piece in pieces)
        self._under_way.append((number, self._logits[self._slot, :num_rows]))
        self._slot = (self._slot + 1) % self.depth

    def result(self) -> Tensor:
        number, logits = self._under_way.popleft()
        self._ranks.finish(number)
        return logits

    def _plain(self, piece: Piece) -> Piece:
        """The piece with the blocks that it needs: tables of long requests are what there is to send."""
        num_blocks = blocks_for(piece.end, self._block_tokens)
        return Piece(tuple(piece.tokens), piece.start, tuple(piece.blocks[:num_blocks]), piece.samples)
