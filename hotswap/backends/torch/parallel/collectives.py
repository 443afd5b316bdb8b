# pyright: reportUnknownMemberType=false
# torch.distributed has partial types.
"""Communication between ranks: all-reduce and all-gather within a stage, send and receive between stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from hotswap.backends.torch.parallel.grid import RankPosition

__all__ = ["Boundary", "Group"]


class Group:
    """The ranks of one stage, which have shards of the same tensors. All must make the same calls in order.

    Args:
        position: The position of this rank.
        group: The process group of the stage.
        ordered: Whether sums are taken in the order of the ranks. A ring all-reduce sums each part of a
            tensor in another order, so that with more than two ranks the bits of a row would depend on its
            position in the batch.
    """

    def __init__(self, position: RankPosition, group: dist.ProcessGroup, *, ordered: bool) -> None:
        self.size, self.part = position.grid.tp, position.part
        self._group, self._ordered = group, ordered and self.size > 2

    def sum(self, mine: Tensor) -> Tensor:
        """Return the sum over the ranks, with equal bits on all."""
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
        """Return `[..., size]`, concatenated from the slices of all ranks along the last dimension.

        Slices are those of `torch.chunk`: the last may be shorter, or empty.
        """
        if self.size == 1:
            return mine
        width = -(-size // self.size)
        if mine.shape[-1] < width:
            mine = torch.nn.functional.pad(mine, (0, width - mine.shape[-1]))
        return torch.cat(self._all(mine), -1)[..., :size]

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice along the last dimension; the inverse of `gather`."""
        size = whole.shape[-1]
        width = -(-size // self.size)
        start = min(self.part * width, size)
        return whole.narrow(-1, start, min(width, size - start))

    def _all(self, mine: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, mine.contiguous(), group=self._group)
        return parts


class Boundary:
    """Sends hidden states to the next stage and receives those of the stage before.

    All ranks of a stage have the same hidden state. Each sends its slice of 1/tp to the rank of the same part
    in the next stage, which gathers the slices of its peers. So tokens × hidden size × item size bytes cross
    between stages in all, for any number of ranks (as in Snowflake's stack).

    Args:
        position: The position of this rank.
        group: The ranks of its stage.
        device: The device of the hidden states.
        depth: The maximum number of hidden states in flight.

    Attributes:
        num_sent_bytes: The bytes sent to the next stage so far.
    """

    def __init__(self, position: RankPosition, group: Group, device: torch.device, depth: int) -> None:
        self._group, self._device, self._depth = group, device, depth
        self._before, self._after = position.rank - position.grid.tp, position.rank + position.grid.tp
        self._unsent: deque[tuple[Callable[[], object], Tensor]] = deque()
        self.num_sent_bytes = 0

    def send(self, hidden: Tensor) -> None:
        """Start sending `[num_tokens, hidden_size]`; blocks while more than `depth` are in flight."""
        mine = self._group.slice_of(hidden).contiguous()
        work = dist.isend(mine, self._after)
        assert work is not None, "the rank is a member of the default group"
        self._unsent.append((work.wait, mine))
        self.num_sent_bytes += mine.nbytes
        while len(self._unsent) > self._depth:
            self._unsent.popleft()[0]()

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Return the next hidden state `[num_tokens, hidden_size]` from the stage before."""
        width = hidden_size // self._group.size
        mine = torch.empty(num_tokens, width, dtype=dtype, device=self._device)
        dist.recv(mine, self._before)
        return self._group.gather(mine, hidden_size)
