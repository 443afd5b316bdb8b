"""The torch engine behind a link over TCP keeps the contract of engines."""

from __future__ import annotations

from typing import Any

from hotswap.abc import Engine
from tests.backends.remote.support import HandingEngine, over_tcp
from tests.backends.torch import test_conformance


class TestRemoteTorchEngine(test_conformance.TestTorchEngine):
    def make_engine(self) -> Any:
        return over_tcp(super().make_engine())

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, HandingEngine)
        super().lose(engine.engine)


class TestRemoteTorchEngineWithStates(test_conformance.TestTorchEngineWithStates):
    def make_engine(self) -> Any:
        return over_tcp(super().make_engine())

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, HandingEngine)
        super().lose(engine.engine)
