"""`Weights`: the weights of a loaded model, in memory of the engine or lent by a store."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

from torch import Tensor

from hotswap.backends.torch.fp8_linear import QuantizedWeights
from hotswap.model import TensorSpec

__all__ = ["Weights"]


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A flat weight buffer and its tensors.

    Attributes:
        flat: uint8, memory of the engine, or of the store while `loan` is open.
        specs: The tensors in it.
        loan: The open loan of the store's memory; `None` for memory of the engine.
        quantized: The weights that stay quantized; `None` if there are none.
    """

    flat: Tensor
    specs: tuple[TensorSpec, ...]
    loan: AsyncExitStack | None = None
    quantized: QuantizedWeights | None = None

    @property
    def own_bytes(self) -> int:
        """The memory of the engine that they take; 0 if lent."""
        return 0 if self.loan else len(self.flat)
