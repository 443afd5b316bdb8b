"""The memory of the largest step on a GPU, measured before KV blocks take what is left.

As vLLM's profile run, it computes one step of the largest size; with requests at the end of their context,
since keys that are gathered take memory too. KV blocks without values stand for those of all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import torch

from hotswap.backends.torch.device import out_of_memory_mapped
from hotswap.backends.torch.distribution import Workspace
from hotswap.backends.torch.forward import MAX_SCORED_ROWS, Piece, assemble
from hotswap.backends.torch.kv import KVCache, LayerShape, blocks_for
from hotswap.backends.torch.modeling import Skeleton
from hotswap.backends.torch.recurrent.states import StatePool
from hotswap.backends.torch.sampling import Sampler, sample
from hotswap.backends.torch.step_options import StepOptions
from hotswap.request import ModelId
from hotswap.sampling import Sampling

__all__ = ["LargestStep", "largest_step", "measure_step_bytes"]

_SAMPLING = Sampling(temperature=1.0, top_p=0.9, seed=0)


def largest_step(steps: StepOptions, context: int, *, by_length: bool = False) -> tuple[Piece, ...]:
    """Return the pieces of a step as large as steps can be: one long prompt, and decodes, all near their end.

    Args:
        steps: The limits of a step.
        context: The maximum length of a request, in tokens.
        by_length: Whether RoPE factors depend on the length of a request.
    """
    decodes = min(steps.max_requests, steps.max_tokens) - 1
    prompt = min(steps.max_tokens - decodes, context)
    blocks = (1,) * blocks_for(context, steps.block_tokens)
    length = context if by_length else 0
    return (
        *(Piece((0,), context - 1, blocks, True, length=length) for _ in range(decodes)),
        Piece(
            tuple(repeat(0, prompt)),
            context - prompt,
            blocks,
            True,
            num_scored=min(MAX_SCORED_ROWS, prompt - 1),
            length=length,
        ),
    )


def measure_step_bytes(
    skeleton: Skeleton, device: torch.device, layers: Sequence[LayerShape], steps: StepOptions, context: int
) -> int:
    """Return the peak of the memory that the largest step takes on a GPU, its sampling included.

    Resets PyTorch's statistics of the peak. What others of the process allocate meanwhile is counted too.

    Args:
        skeleton: The bound model.
        device: Its GPU.
        layers: What a request keeps in each layer.
        steps: How steps are computed, and their limits.
        context: The maximum length of a request, in tokens.

    Raises:
        torch.OutOfMemoryError: the memory does not suffice for it.
    """
    cache = KVCache(1, steps.block_tokens, device, layers, by_kernels=steps.by_kernels)
    kept = [layer.states for layer in layers]
    states = StatePool(1, device, kept) if any(kept) else None
    pieces = largest_step(steps, context, by_length=skeleton.long_rope is not None)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        batch = assemble(pieces, cache, invariant=steps.invariant, states=states)
        logits = batch.logits(skeleton.module)
        rows = logits[len(logits) - len(pieces) :]
        samplers = [Sampler(_SAMPLING, (), ()) for _ in pieces]
        sample(rows, samplers, [0] * len(pieces), Workspace())
    return max(0, torch.cuda.max_memory_allocated(device) - before)


class LargestStep:
    """Measures the largest step of each architecture once.

    Args:
        device: The GPU.
        steps: How steps are computed, and their limits.
        measured: What was measured so far, which engines of a process may share.
    """

    def __init__(self, device: torch.device, steps: StepOptions, measured: dict[object, int]) -> None:
        self._device, self._steps, self._measured = device, steps, measured

    def size_bytes(
        self, model: ModelId, skeleton: Skeleton, layers: Sequence[LayerShape], context: int, way: str
    ) -> int:
        """Return the memory that the largest step of a bound model takes; see `measure_step_bytes`.

        Args:
            model: The model's name, for errors.
            skeleton: Its modules.
            layers: What a request keeps in each layer.
            context: The maximum length of a request, in tokens.
            way: How it is computed: models of one architecture and one way have equal steps.

        Raises:
            OutOfMemory: the memory does not suffice for it.
        """
        key = (skeleton.key, way, self._steps, context)
        found = self._measured.get(key)
        if found is None:
            with out_of_memory_mapped(f"a step of {self._steps.max_tokens} tokens of {model!r}"):
                found = measure_step_bytes(skeleton, self._device, layers, self._steps, context)
            self._measured[key] = found
        return found
