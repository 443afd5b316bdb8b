"""The llama.cpp engine keeps the contract that every engine keeps, over the real llama.cpp."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hotswap import Model
from hotswap.abc import Engine
from hotswap.backends.llamacpp import LlamaCppEngine
from hotswap.testing.conformance import EngineConformance
from tests.backends.llamacpp.gguf_files import GgufStore, write_gguf


class TestLlamaCppEngine(EngineConformance):
    models = (Model("a"), Model("b"))
    can_lose = True
    step_s = 60.0  # on a machine however busy
    long_tokens = 100
    store: ClassVar[GgufStore]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _files(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        root = tmp_path_factory.mktemp("gguf")
        cls.store = GgufStore(
            {
                "a": write_gguf(root / "a.gguf", seed=1, kind="Q4_K"),
                "b": write_gguf(root / "b.gguf", seed=2, kind="Q8_0"),
            }
        )

    def make_engine(self) -> LlamaCppEngine:
        # For each request 256 tokens, less than the context of 1,024.
        return LlamaCppEngine("e0", kv_tokens=2048, memory_bytes="64 MiB", threads=1, max_requests=8)

    def make_store(self) -> GgufStore:
        return GgufStore(self.store.files)

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, LlamaCppEngine)
        engine.lose("a test dropped it")
