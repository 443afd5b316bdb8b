"""Models that vLLM serves on a CPU, and engines of little memory."""

from __future__ import annotations

from typing import Any

import transformers

from hotswap.backends.vllm import CorePool, VllmEngine
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import COMMON, make_model


def llama(**changes: Any) -> Any:
    """A config whose heads vLLM has kernels for."""
    return transformers.LlamaConfig(**COMMON | {"head_dim": 32} | changes)


def make_store() -> DictStore:
    """Two models of one architecture, `a` and `b`, and `deep` of another."""
    store = DictStore()
    store.add("a", make_model(llama(), seed=1))
    store.add("b", make_model(llama(), seed=2))
    store.add("deep", make_model(llama(num_hidden_layers=4), seed=3))
    return store


def make_engine(name: str = "e0", *, cores: CorePool | None = None, **changes: Any) -> VllmEngine:
    """An engine for these models."""
    given: dict[str, Any] = {
        "kv_bytes": "8 MiB",
        "kv_block_tokens": 32,
        "max_requests": 32,
        "memory_bytes": "256 MiB",
    }
    return VllmEngine(name, cores=cores, **given | changes)
