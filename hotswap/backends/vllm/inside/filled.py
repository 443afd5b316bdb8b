"""Layers of a model of vLLM that no tensor of a checkpoint has filled."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from hotswap.backends.vllm.names import named

__all__ = ["check_filled", "mark_unfilled"]

_PLAIN: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))
_WEIGHTS: Final = ("weight", "weight_packed", "qweight")  # the parameter with the numbers of a layer
_MOST_NAMES: Final = 5


def mark_unfilled(model: Any) -> None:
    """Mark the rows of plain linear layers and embeddings, before weights are loaded.

    The first number of each is NaN, which no imported weight is.
    """
    for _, weight in _weights(model):
        if _is_plain(weight):
            weight.select(-1, 0).fill_(float("nan"))


def check_filled(model: Any, loaded: Collection[str] | None) -> None:
    """Check that a load has filled all linear layers and embeddings.

    The check of vLLM's own loader leaves them out, and knows of layers that it joins, as queries, keys and
    values, only that one was loaded. Of quantised ones no more is known here.

    Args:
        model: The model, whose rows were marked.
        loaded: The names of parameters that the load has told; `None` if it told none.

    Raises:
        ValueError: naming layers of which numbers are missing.
    """
    lacking = [
        name
        for name, weight in _weights(model)
        if (
            bool(weight.select(-1, 0).isnan().any())
            if _is_plain(weight)
            else loaded is not None and name not in loaded
        )
    ]
    if lacking:
        more = f" and {len(lacking) - _MOST_NAMES} more" if len(lacking) > _MOST_NAMES else ""
        names = ", ".join(lacking[:_MOST_NAMES])
        raise ValueError(f"the checkpoint lacks weights of {names}{more}; fetch it again")


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of linear layers and embeddings that are here and have numbers."""
    kinds = (
        named("vllm.model_executor.layers.linear:LinearBase"),
        named("vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding"),
    )
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            parameters = module.named_parameters(prefix=name, recurse=False)
            for path, weight in parameters:
                if path.rpartition(".")[2] in _WEIGHTS and not (is_lazy(weight) or weight.is_meta):
                    yield path, weight.data


def _is_plain(weight: torch.Tensor) -> bool:
    return weight.dim() == 2 and weight.numel() > 0 and weight.dtype in _PLAIN
