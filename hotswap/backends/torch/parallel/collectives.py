# pyright: reportUnknownMemberType=false
# torch.distributed has partial types.
"""What ranks tell each other while they compute: sums and slices within a stage, hidden states across."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hotswap.backends.torch.parallel.places import Place

__all__ = ["Boundary", "Group"]


class Group:
    """The ranks that hold parts of the same tensors. All of them make each call, in the same order.

    Args:
        place: This rank's.
        group: Theirs.
        ordered: Whether sums must be taken in the order of the ranks. A ring adds each piece of a tensor in
            another order, so that beyond two ranks a row's bits would depend on where in the batch it is.
    """

    def __init__(self, place: Place, group: dist.ProcessGroup, *, ordered: bool) -> None:
        self.size, self.part = place.grid.tp, place.part
        self._group, self._ordered = group, ordered and self.size > 2

    def sum(self, mine: Tensor) -> Tensor:
        """Return the sum over the ranks, the same bits on each."""
        if self.size == 1:
            return mine
        if not self._ordered:
            mine = mine.contiguous()
            dist.all_reduce(mine, group=self._group)
            return mine
        first, *others = self._all(mine)
        for other in others:
            first += other
        return first

    def gather(self, mine: Tensor, size: int) -> Tensor:
        """Return `[..., size]` of which each rank has the next slice along the last dimension.

        Slices are as `torch.chunk` cuts them: the last may be shorter, or empty.
        """
        if self.size == 1:
            return mine
        width = -(-size // self.size)
        if mine.shape[-1] < width:
            mine = torch.nn.functional.pad(mine, (0, width - mine.shape[-1]))
        return torch.cat(self._all(mine), -1)[..., :size]

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice along the last dimension, as `gather` puts it back."""
        size = whole.shape[-1]
        width = -(-size // self.size)
        start = min(self.part * width, size)
        return whole.narrow(-1, start, min(width, size - start))

    def _all(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self._group)
        return parts


class Boundary:
    """Where one stage ends and the next begins: one fused hidden state crosses, and nothing else.

    All ranks of a stage have the same hidden state. Each sends its slice of 1/tp to the rank of the same part
    in the next stage, which gathers the slices from its peers: what crosses between nodes is
    tokens × hidden size × item size bytes in all, however many ranks a stage has (Snowflake's stack does the
    same).

    Args:
        place: This rank's.
        group: The ranks of its stage.
        device: Where hidden states lie.
        depth: How many may be on their way.
    """

    def __init__(self, place: Place, group: Group, device: torch.device, depth: int) -> None:
        self._group, self._device, self._depth = group, device, depth
        self._before, self._after = place.rank - place.grid.tp, place.rank + place.grid.tp
        self._unsent: deque[tuple[Callable[[], object], Tensor]] = deque()
        self.num_sent_bytes = 0

    def send(self, hidden: Tensor) -> None:
        """Send `[num_tokens, hidden_size]` on its way; the slice is kept until it has gone."""
        mine = self._group.slice_of(hidden).contiguous()
        work = dist.isend(mine, self._after)
        assert work is not None, "a rank is no member of its own world"
        self._unsent.append((work.wait, mine))
        self.num_sent_bytes += mine.nbytes
        while len(self._unsent) > self._depth:
            self._unsent.popleft()[0]()

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Return the hidden state `[num_tokens, hidden_size]` that the stage before has sent."""
        width = hidden_size // self._group.size
        mine = torch.empty(num_tokens, width, dtype=dtype, device=self._device)
        dist.recv(mine, self._before)
        return self._group.gather(mine, hidden_size)
