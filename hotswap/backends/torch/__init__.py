"""An engine in this process, over PyTorch and transformers: any causal language model, exactly.

Tested with torch 2.13 and transformers 5.23.
"""

from __future__ import annotations

from hotswap.errors import BackendMissing

try:
    from hotswap.backends.torch.engine import TorchEngine
    from hotswap.backends.torch.modeling import SkeletonCache
except ModuleNotFoundError as exc:
    raise BackendMissing(
        f"TorchEngine needs {exc.name!r}, which is not installed: pip install 'hotswap[torch]'."
    ) from exc

__all__ = ["SkeletonCache", "TorchEngine"]
