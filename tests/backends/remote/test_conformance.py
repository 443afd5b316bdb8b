"""Remote engines keep the contract of engines: a simulated one in virtual time, over links in memory."""

from __future__ import annotations

from typing import Any

from hotswap.abc import Engine
from tests.backends import test_sim
from tests.backends.remote.support import HandingEngine, over_memory


class TestRemoteSimEngine(test_sim.TestSimEngineConforms):
    def make_engine(self) -> Any:
        return over_memory(super().make_engine())

    def lose(self, engine: Engine) -> None:
        assert isinstance(engine, HandingEngine)
        super().lose(engine.engine)

    async def expected(self, request: Any, card: Any) -> list[int]:
        return super().make_engine().expected_tokens(request, card)


class TestRemoteSimEngineOfABudget(test_sim.TestSimEngineOfABudgetConforms):
    def make_engine(self) -> Any:
        return over_memory(super().make_engine())
