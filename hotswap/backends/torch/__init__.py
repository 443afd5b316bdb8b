"""An in-process engine on PyTorch and transformers, for any causal language model, with exact outputs.

Tested with torch 2.13 and transformers 5.24.
"""

from __future__ import annotations

from hotswap.errors import BackendMissing

try:
    from hotswap.backends.torch.engine import TorchEngine
    from hotswap.backends.torch.modeling import SkeletonCache
    from hotswap.backends.torch.parallel.host import StageHost
    from hotswap.backends.torch.parallel.nodes import LinkedNode, StageNode
    from hotswap.backends.torch.step_options import GpuSteps
except ModuleNotFoundError as exc:
    raise BackendMissing(
        f"TorchEngine needs {exc.name!r}, which is not installed: pip install 'hotswap[torch]'."
    ) from exc

__all__ = ["GpuSteps", "LinkedNode", "SkeletonCache", "StageHost", "StageNode", "TorchEngine"]
