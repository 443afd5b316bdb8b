"""The torch engine passes the conformance suite of engines."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hotswap import Adapter, DeviceBudget, Model
from hotswap.abc import Engine
from hotswap.backends.torch import SkeletonCache, TorchEngine
from hotswap.testing.conformance import EngineConformance
from hotswap.testing.conformance.engine_resize import ResizeChecks
from tests.backends.torch.adapters.files import write
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.hybrids import make_hybrid
from tests.backends.torch.zoo import make_model


class TestTorchEngine(EngineConformance):
    models = (Model("a"), Model("b"))
    step_s = 60.0  # also on a busy machine
    can_lose = True
    device: ClassVar[str] = "cpu"
    skeletons: ClassVar[SkeletonCache]
    store: ClassVar[DictStore]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _models(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.skeletons = SkeletonCache()
        cls.store = DictStore()
        model, root = make_model("llama", seed=1), tmp_path_factory.mktemp("adapters")
        cls.store.add("a", model)
        cls.adapters = (
            Adapter("x", "a", write(root / "x", model, seed=1, r=4, names=("q_proj", "down_proj"), size=4.0)),
            Adapter("y", "a", write(root / "y", model, seed=2, r=16, size=4.0)),
        )
        cls.bad_adapter = Adapter("z", "a", write(root / "z", make_model("gpt2"), names=("c_fc",)))
        cls.store.add("b", make_model("qwen3", seed=2))

    def make_engine(self) -> TorchEngine:
        # Less than the context of 1,024 tokens, more than three long requests.
        return TorchEngine(
            "e0",
            device=self.device,
            kv_tokens=800,
            memory_bytes="64 MiB",
            threads=1,
            max_requests=8,
            skeletons=self.skeletons,
        )

    def make_store(self) -> DictStore:
        return DictStore(self.store.manifests, self.store.buffers)

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, TorchEngine)
        engine.lose("a test dropped it")


class TestTorchEngineWithStates(TestTorchEngine):
    """Models with recurrent states: the delta rule with attention, and Mamba 2 without any attention."""

    keeps_prefixes = False

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _models(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.skeletons = SkeletonCache()
        cls.store = DictStore()
        model, root = make_hybrid("qwen3_5"), tmp_path_factory.mktemp("adapters")
        cls.store.add("a", model)
        names = ("q_proj", "down_proj")
        cls.adapters = (
            Adapter("x", "a", write(root / "x", model, seed=1, r=4, names=names, size=4.0)),
            Adapter("y", "a", write(root / "y", model, seed=2, r=16, names=names, size=4.0)),
        )
        cls.bad_adapter = Adapter("z", "a", write(root / "z", make_model("gpt2"), names=("c_fc",)))
        cls.store.add("b", make_hybrid("mamba2"))


class TestTorchEngineWithStatesAlone(TestTorchEngineWithStates):
    """The first model has no attention, and so no bytes in KV blocks."""

    adapters = ()
    bad_adapter = None

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _models(cls) -> None:
        cls.skeletons = SkeletonCache()
        cls.store = DictStore()
        cls.store.add("a", make_hybrid("mamba2"))
        cls.store.add("b", make_hybrid("lfm2"))


class TestTorchEngineOfABudget(ResizeChecks):
    can_resize = True
    models = (Model("a"),)
    long_tokens = 40
    step_s = 60.0
    skeletons: ClassVar[SkeletonCache]
    store: ClassVar[DictStore]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _models(cls) -> None:
        cls.skeletons, cls.store = SkeletonCache(), DictStore()
        cls.store.add("a", make_model("llama", seed=1))

    def make_engine(self) -> TorchEngine:
        return TorchEngine(
            "e0",
            kv_tokens=1600,
            kv_block_tokens=16,
            threads=1,
            max_requests=8,
            skeletons=self.skeletons,
            device_budget=DeviceBudget("8 MiB"),
            floor_bytes="1 MiB",
        )

    def make_store(self) -> DictStore:
        return DictStore(self.store.manifests, self.store.buffers)
