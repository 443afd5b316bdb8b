"""An engine in a process of its own keeps the contract of engines, and reads the store that it is given."""

from __future__ import annotations

from typing import Any

from hotswap.abc import Engine
from hotswap.backends.sim import SimStore
from tests.backends import test_sim
from tests.backends.process.support import checked_store, kill, sim_engine, sim_process


class TestProcessEngine(test_sim.TestSimEngineConformsInRealTime):
    def make_engine(self) -> Any:
        return sim_process()

    def make_store(self) -> SimStore:
        return checked_store()

    def lose(self, engine: Engine) -> None:
        kill(engine)

    async def expected(self, request: Any, card: Any) -> list[int]:
        return sim_engine().expected_tokens(request, card)
