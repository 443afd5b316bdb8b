"""`LlamaCppEngine`: an engine over llama.cpp, whose server runs in a process of its own. It reads GGUF files.

Tested with xllamacpp 2026.10 on CPUs.
"""

from __future__ import annotations

from importlib.util import find_spec

from hotswap.errors import BackendMissing

if find_spec("xllamacpp") is None:  # only the server's process imports it
    raise BackendMissing(
        "LlamaCppEngine needs 'xllamacpp', which is not installed: pip install 'hotswap[llamacpp]'."
    )

from hotswap.backends.llamacpp.engine import LlamaCppEngine

__all__ = ["LlamaCppEngine"]
