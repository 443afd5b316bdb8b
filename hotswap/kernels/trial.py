"""The smallest Triton kernel; `targets.runs_triton` launches it to see whether kernels can be launched."""

# mypy: ignore-errors
# pyright: basic, reportMissingImports=false
import torch
import triton
import triton.language as tl

from hotswap.kernels.calls import Call

__all__ = ["launch"]


@triton.jit
def set_kernel(out_ptr):
    """Set `out[0] = 1`."""
    tl.store(out_ptr, 1)


def launch(device: torch.device) -> None:
    """Compile and launch the kernel on a device; every error is raised to the caller."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    Call("hotswap.kernels.trial:set_kernel", (1,), (out,), {}).launch()
    if out.item() != 1:
        raise RuntimeError("the kernel was launched, but its result is missing")
