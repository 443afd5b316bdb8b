"""The adapters of one served model on its device: what pools of ranges and pools of pages have in common."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar

import torch

from hotswap.backends.torch.adapters.peft import AdapterWeights
from hotswap.backends.torch.adapters.places import Place
from hotswap.backends.torch.adapters.targets import Target
from hotswap.errors import UnsupportedAdapter

__all__ = ["AdapterPool", "bytes_per_rank"]

_SERIALS = itertools.count(1)

PlaceT = TypeVar("PlaceT", bound=Place)


class AdapterPool(ABC, Generic[PlaceT]):
    """Places for adapters, `num_ranks` ranks in all; belongs to one loaded model.

    Methods that write numbers may be called from any thread, also while steps run: nobody reads a place that
    is being written. `put` and `give` are called one at a time.

    Attributes:
        alignment: An adapter takes a multiple of so many ranks.
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
                f"Adapter {name!r} has rank {weights.rank}, and its engine has room for {self.num_ranks} "
                "ranks in all; give the engine more adapter_bytes."
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
    def take(self, rank: int) -> PlaceT | None:
        """Hand out a place that holds `rank`; `None` if there is none."""

    def put(self, place: PlaceT, weights: AdapterWeights) -> None:
        """Write an adapter to a place that was taken; it can be used afterwards."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if not self._closed:
                self._write(place, weights)

    def give(self, place: PlaceT) -> None:
        """Take a place back."""
        self._forget(place)

    def close(self) -> None:
        """Leave the model as it was and free the memory."""
        with self._lock:
            self._closed = True
            self._clear()

    def rounded(self, rank: int) -> int:
        """The ranks that an adapter takes."""
        return -(-rank // self.alignment) * self.alignment

    @staticmethod
    def next_serial() -> int:
        """A number that was never given."""
        return next(_SERIALS)

    @abstractmethod
    def _write(self, place: PlaceT, weights: AdapterWeights) -> None: ...

    @abstractmethod
    def _forget(self, place: PlaceT) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...


def bytes_per_rank(targets: Mapping[str, Target], dtype: torch.dtype) -> int:
    """What one rank of all layers takes."""
    return sum(target.width_in + target.width_out for target in targets.values()) * dtype.itemsize
