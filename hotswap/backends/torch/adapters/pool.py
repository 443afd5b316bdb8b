"""The base class of adapter pools: the memory of a served model's adapters on its device."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import torch

from hotswap.backends.torch.adapters.peft import AdapterWeights
from hotswap.backends.torch.adapters.slots import AdapterSlot
from hotswap.backends.torch.adapters.targets import Target
from hotswap.errors import UnsupportedAdapter

__all__ = ["AdapterPool", "bytes_per_rank"]

_SERIALS = itertools.count(1)

SlotT = TypeVar("SlotT", bound=AdapterSlot)


class AdapterPool(ABC, Generic[SlotT]):
    """Slots for the adapters of one loaded model.

    `put` and `close` may be called from any thread, also while steps run: steps do not read a slot before it
    is written. Calls of `put` and `free` must not overlap.

    Args:
        targets: The layers of the model that can have adapters.
        num_ranks: The capacity: the sum of the adapters' ranks.
        dtype: The dtype of the matrices.
        device: Their device.

    Attributes:
        alignment: The rank of an adapter is rounded up to a multiple of this.
    """

    alignment: ClassVar[int]

    def __init__(
        self, targets: Mapping[str, Target], *, num_ranks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.targets = targets
        self.num_ranks = num_ranks - num_ranks % self.alignment
        self.dtype, self.device = dtype, device
        self._closed = False
        self._lock = threading.Lock()

    def check(self, name: str, weights: AdapterWeights) -> None:
        """Raise `UnsupportedAdapter` if an adapter does not fit the model, or would not fit an empty pool."""
        if self.rounded(weights.rank) > self.num_ranks:
            raise UnsupportedAdapter(
                f"Adapter {name!r} has rank {weights.rank}, and its engine has room for "
                f"{self.num_ranks} ranks in all; give the engine more adapter_bytes."
            )
        for layer, pair in weights.layers.items():
            target = self.targets.get(layer)
            if target is None:
                raise UnsupportedAdapter(
                    f"Adapter {name!r} changes {layer!r}, which is no linear layer of its model that can be "
                    "changed for some requests alone; it belongs to another model, or must be merged."
                )
            found, wanted = (pair.down.shape[1], pair.up.shape[1]), (target.width_in, target.width_out)
            if found != wanted:
                raise UnsupportedAdapter(
                    f"Adapter {name!r} has widths {found} for {layer!r}, which has {wanted}; it belongs to "
                    "another model."
                )
            if target.dtype is not self.dtype:
                raise UnsupportedAdapter(
                    f"Adapter {name!r} changes {layer!r}, which is {target.dtype} in a model that has "
                    f"adapters in {self.dtype}; merge it into the model."
                )

    @abstractmethod
    def allocate(self, rank: int, key: bytes = b"") -> SlotT | None:
        """Allocate a slot for an adapter of this rank and digest; `None` if too few ranks are free."""

    def put(self, slot: SlotT, weights: AdapterWeights) -> None:
        """Write an adapter to an allocated slot; steps may use it afterwards. Blocking."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._closed:
                self._write(slot, weights)

    def free(self, slot: SlotT) -> None:
        """Free a slot."""
        self._forget(slot)

    def close(self) -> None:
        """Restore the model's layers and free the memory. Blocking."""
        with self._lock:
            self._closed = True
            self._clear()

    def rounded(self, rank: int) -> int:
        """Return the number of ranks that an adapter of this rank takes."""
        return -(-rank // self.alignment) * self.alignment

    @staticmethod
    def next_serial() -> int:
        """Return a new serial number, unique in the process."""
        return next(_SERIALS)

    @abstractmethod
    def _write(self, slot: SlotT, weights: AdapterWeights) -> None: ...

    @abstractmethod
    def _forget(self, slot: SlotT) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...


def bytes_per_rank(targets: Mapping[str, Target], dtype: torch.dtype) -> int:
    """Return the memory of one rank in all layers."""
    return sum(target.width_in + target.width_out for target in targets.values()) * dtype.itemsize
