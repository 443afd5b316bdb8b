"""Replaces the `forward` of a linear layer that has adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from hotswap.backends.torch.adapters.plan import StepPlan
from hotswap.backends.torch.adapters.targets import Target
from hotswap.backends.torch.attention import current

__all__ = ["AdaptedLayer"]


class AdaptedLayer(ABC):
    """Replaces the `forward` of a linear layer: calls the original, then adds what adapters contribute."""

    def __init__(self, target: Target) -> None:
        self._layer, self._kept_rows = target.layer, target.kept_rows
        self._former: object = vars(target.layer).get("forward")
        self._inner: Callable[[Tensor], Tensor] = target.layer.forward

    def install(self) -> None:
        """Replace the layer's `forward`; takes effect at once, also for a running step."""
        vars(self._layer)["forward"] = self

    def remove(self) -> None:
        """Restore the `forward` that the layer had."""
        if self._former is None:
            vars(self._layer).pop("forward", None)
        else:
            vars(self._layer)["forward"] = self._former

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the layer's output, plus the contributions of adapters to the rows of the current step."""
        out = self._inner(hidden)
        step = current()
        if step is not None and step.adapters is not None:
            plan = step.adapters.kept if self._kept_rows else step.adapters.tokens
            if plan is not None:
                self._adapt(plan, hidden, out)
        return out

    @abstractmethod
    def _adapt(self, plan: StepPlan, hidden: Tensor, out: Tensor) -> None:
        """Add the contributions of the plan's adapters for the input `hidden` to `out`."""
