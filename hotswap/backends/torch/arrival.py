"""What an engine has of a request before its stream is opened: its tokens, and blocks with its states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Announced", "Arrival"]


@dataclass(slots=True, eq=False)
class Arrival:
    """KV blocks and a slot with recurrent states, which the request with these tokens takes over.

    Belongs to the engine's thread, except for `tokens` and `root`. Unlike blocks of the prefix cache it is
    for one request: the states change with the first token that follows.

    Attributes:
        tokens: The tokens whose keys and values are in the blocks. The states are those after the last one.
        root: The prefix key of the weights that computed them, adapter included.
        blocks: As many blocks as the tokens need.
        slot: The slot of the states; `None` before they are there, and once they were taken or released.
    """

    tokens: tuple[int, ...]
    root: bytes
    blocks: list[int] = field(default_factory=list[int])
    slot: int | None = None

    def continues_to(self, tokens: Sequence[int], num_reusable: int, root: bytes) -> bool:
        """Whether a request with these tokens, the first `num_reusable` - 1 without logits, goes on here."""
        count = len(self.tokens)
        is_here = self.slot is not None and root == self.root and count < num_reusable
        return is_here and tuple(tokens[:count]) == self.tokens

    def take(self) -> tuple[list[int], int | None]:
        """Return the blocks and the slot, which belong to the caller from now on."""
        taken = self.blocks, self.slot
        self.blocks, self.slot = [], None
        return taken


@dataclass(frozen=True, slots=True)
class Announced:
    """A request that arrives.

    Attributes:
        tokens: Its tokens when the move began.
        root: The prefix key of the weights that compute it, adapter included.
        keys: The prefix keys of its full blocks.
        arrival: What it takes over; `None` for a model without recurrent states.
    """

    tokens: tuple[int, ...]
    root: bytes
    keys: tuple[bytes, ...]
    arrival: Arrival | None = None
