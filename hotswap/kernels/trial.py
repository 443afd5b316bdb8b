"""The smallest kernel: whether it can be compiled and launched tells whether others can."""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
import torch
import triton
import triton.language as tl

from hotswap.kernels.calls import Call

__all__ = ["launch"]


@triton.jit
def set_kernel(out_ptr):
    """`out[0] = 1`."""
    tl.store(out_ptr, 1)


def launch(device: torch.device) -> None:
    """Compile it and launch it there; whatever is raised passes."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    Call("hotswap.kernels.trial:set_kernel", (1,), (out,), {}).launch()
    if out.item() != 1:
        raise RuntimeError("a kernel was launched, and did nothing")
