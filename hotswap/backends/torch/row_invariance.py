"""A test at the start of an engine: whether the bits of a row depend on the other rows of a product.

Linear layers that hotswap's own kernel computes have the same bits for any number of rows. Those of oneDNN
had on every CPU that was tried (`linear`), which the library does not promise: so it is tried on this one.
"""

from __future__ import annotations

from functools import cache

import torch

from hotswap.backends.torch.linear import MIN_ROWS, invariant_linear, supported_dtypes
from hotswap.kernels import packed_linear

__all__ = ["warnings_of_products"]

# Inputs and outputs of layers, and numbers of rows around those at which libraries change their kernel.
_SHAPES = ((64, 96), (257, 130), (1024, 512))
_ROWS = (MIN_ROWS, 5, 16, 31, 33, 64, 80)


@cache
def warnings_of_products() -> tuple[str, ...]:
    """Return a sentence for each dtype whose products depend on other rows. Takes milliseconds, once."""
    return tuple(
        f"Products of {name} on this CPU depend on the other rows of a batch, so tokens may too: PyTorch's "
        "oneDNN is not batch-invariant here. Use another version of PyTorch, or serve in another dtype."
        for dtype in sorted(supported_dtypes(), key=str)
        if not packed_linear.supported(dtype) and not _is_invariant(dtype)
        for name in (str(dtype).removeprefix("torch."),)
    )


def _is_invariant(dtype: torch.dtype) -> bool:
    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for inputs, outputs in _SHAPES:
            rows = torch.randn(max(_ROWS), inputs, generator=random).to(dtype)
            weight = torch.randn(outputs, inputs, generator=random).to(dtype)
            expected = invariant_linear(rows, weight)
            for count in _ROWS:
                first = max(_ROWS) - count
                if not torch.equal(invariant_linear(rows[:count], weight), expected[:count]):
                    return False
                if not torch.equal(invariant_linear(rows[first:].contiguous(), weight), expected[first:]):
                    return False
    return True
