"""What the device can do at most: bytes copied and read, products of 16 bits."""

from __future__ import annotations

import torch

from benchmarks.gpu.session import Session

__all__ = ["run"]


def run(session: Session) -> None:
    """Measure what everything else is held against."""
    size, width = ((1 << 16), 64) if session.is_dry else ((1 << 32), 8192)
    copied, read = _moved(session, size)
    left, right = (torch.randn(width, width, device=session.device).to(session.dtype) for _ in range(2))
    out = torch.empty_like(left)
    products = 2 * width**3 / session.replayed([lambda: torch.mm(left, right, out=out)]).median * 1e6
    session.report["ceilings"] = {"copy_bytes_per_s": copied, "read_bytes_per_s": read, "flops": products}
    print(f"ceilings: {copied / 1e12:.2f} TB/s copied, {read / 1e12:.2f} read, {products / 1e12:.0f} TFLOP/s")
    if not session.is_dry:
        session.bytes_per_s, session.flops = max(copied, read), products


def _moved(session: Session, size: int) -> tuple[float, float]:
    """Bytes per second, both directions of a copy counted, and read alone."""
    source = torch.empty(size, dtype=torch.uint8, device=session.device)
    target, words = torch.empty_like(source), source.view(torch.int64)
    copied = 2 * size / session.replayed([lambda: target.copy_(source)]).median * 1e6
    read = size / session.replayed([lambda: torch.sum(words)]).median * 1e6
    return copied, read
