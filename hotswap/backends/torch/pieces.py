"""`Piece`: consecutive tokens of one request, a part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotswap.backends.torch.adapters.slots import AdapterSlot

__all__ = ["Piece"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Consecutive tokens of one request.

    Attributes:
        tokens: Their ids.
        start: The position of the first.
        blocks: The request's block table, at least up to the last of these tokens.
        samples: Whether the logits of the last token are needed.
        adapter: The slot of the request's adapter; `None` without one.
        num_scored: Of how many tokens, from the first on, the logits are needed too, the last one excluded if
            it samples.
        slot: The slot of the request's recurrent states, which begin at zero if `start` is 0.
        length: The length by which RoPE factors are chosen (`long_rope`); 0 where these depend on no length.
    """

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    samples: bool
    adapter: AdapterSlot | None = None
    num_scored: int = 0
    slot: int = 0
    length: int = 0

    @property
    def num_kept(self) -> int:
        """Of how many tokens the logits are needed."""
        return self.num_scored + self.samples

    def blocks_up_to_end(self, block_tokens: int) -> Sequence[int]:
        """Return the blocks up to the last token, for blocks of `block_tokens`."""
        return self.blocks[: -(-self.end // block_tokens)]

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)
