"""The vLLM engine keeps the contract that every engine keeps, over the real vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import ClassVar

import pytest
import transformers

from hotswap import Adapter, Model
from hotswap.abc import Engine
from hotswap.backends.vllm import CorePool, VllmEngine
from hotswap.testing.conformance import EngineConformance
from hotswap.testing.conformance.turns import TurnLoop
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import COMMON, make_model


class TestVllmEngine(EngineConformance):
    models = (Model("a"), Model("b"))
    can_lose = True
    step_s = 60.0  # on a machine however busy
    store: ClassVar[DictStore]
    cores: ClassVar[CorePool]
    loop: ClassVar[asyncio.Runner]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _world(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        """One event loop for all checks, on which cores wait from one to the next."""
        config = transformers.LlamaConfig(**COMMON, head_dim=32)
        cls.store, root = DictStore(), tmp_path_factory.mktemp("adapters")
        model = make_model(config, seed=1)
        cls.store.add("a", model)
        cls.store.add("b", make_model(config, seed=2))
        cls.adapters = (
            Adapter("x", "a", write(root / "x", model, seed=1, r=4, names=("q_proj", "down_proj"), size=4.0)),
            Adapter("y", "a", write(root / "y", model, seed=2, r=16, size=4.0)),
        )
        cls.bad_adapter = Adapter("z", "a", write(root / "z", make_model("gpt2"), names=("c_fc",)))
        cls.cores = CorePool(max_idle=2)
        with asyncio.Runner(loop_factory=TurnLoop) as cls.loop:
            yield
            cls.loop.run(cls.cores.close())

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        self.loop.run(self._limited(test))

    def make_engine(self) -> VllmEngine:
        return VllmEngine(
            "e0",
            kv_bytes="1280 KiB",  # 800 tokens, less than the context of 1,024
            kv_block_tokens=32,
            max_requests=8,
            max_adapters=2,
            memory_bytes="64 MiB",
            cores=self.cores,
        )

    def make_store(self) -> DictStore:
        return DictStore(self.store.manifests, self.store.buffers)

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, VllmEngine)
        engine.lose("a test dropped it")
