"""KV blocks and recurrent states of ranks, as one engine copies them: a part of each on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from hotswap.backends.torch.kv import LayerShape, bytes_per_token, state_bytes
from hotswap.backends.torch.parallel.messages import RestoreKV, SaveKV
from hotswap.backends.torch.parallel.processes import Ranks

__all__ = ["RankedBlocks", "RankedStates"]


class RankedBlocks:
    """The blocks of all ranks: a block is its parts, in the order of ranks. Used by the engine's thread.

    Args:
        ranks: The ranks, with KV blocks.
        layers: What a request keeps in each layer, by rank.
        block_tokens: Tokens per block.
    """

    is_local = False

    def __init__(self, ranks: Ranks, layers: Sequence[Sequence[LayerShape]], block_tokens: int) -> None:
        self._ranks, self.block_tokens, self.device = ranks, block_tokens, torch.device("cpu")
        self._sizes = [bytes_per_token(own) * block_tokens for own in layers]
        self.layers, self.block_bytes = dict(enumerate(chain.from_iterable(layers))), sum(self._sizes)

    def save(self, blocks: Sequence[int], out: Tensor) -> None:
        if not len(out):
            return
        rows = out.view(len(blocks), self.block_bytes)
        replies = self._ranks.copy([SaveKV(tuple(blocks))] * len(self._sizes))
        for part, reply in zip(_parts(rows, self._sizes), replies, strict=True):
            if reply.data:
                part.numpy()[:] = np.frombuffer(reply.data, np.uint8).reshape(part.shape)

    def restore(self, blocks: Sequence[int], data: Tensor) -> None:
        if not len(data):
            return
        rows = data.view(len(blocks), self.block_bytes)
        self._ranks.copy([RestoreKV(tuple(blocks), _bytes_of(part)) for part in _parts(rows, self._sizes)])

    def allocate(self, runs: Iterable[range]) -> None:
        """Do nothing: ranks allocate as they write."""


class RankedStates:
    """The recurrent states of all ranks, likewise.

    Args:
        ranks: The ranks, with states.
        layers: What a request keeps in each layer, by rank.
    """

    uses_kernels = False

    def __init__(self, ranks: Ranks, layers: Sequence[Sequence[LayerShape]]) -> None:
        self._ranks, self._sizes = ranks, [state_bytes(own) for own in layers]
        self.slot_bytes = sum(self._sizes)
        self.format = tuple(
            (at, state.shape, str(state.dtype).removeprefix("torch."))
            for at, layer in enumerate(chain.from_iterable(layers))
            for state in layer.states
        )

    def save(self, slot: int, out: Tensor) -> None:
        replies = self._ranks.copy([SaveKV(slot=slot)] * len(self._sizes))
        for part, reply in zip(_parts(out, self._sizes), replies, strict=True):
            if reply.data:
                part.numpy()[:] = np.frombuffer(reply.data, np.uint8)

    def restore(self, slot: int, data: Tensor) -> None:
        parts = _parts(data, self._sizes)
        self._ranks.copy([RestoreKV(data=_bytes_of(part), slot=slot) for part in parts])

    def clear(self, slot: int) -> None:
        """Do nothing: ranks allocate as they write."""


def _parts(content: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield the part of each rank, along the last dimension."""
    at = 0
    for size in sizes:
        yield content[..., at : at + size]
        at += size


def _bytes_of(part: Tensor) -> bytes:
    return part.contiguous().numpy().tobytes()
