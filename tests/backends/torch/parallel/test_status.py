"""An engine with ranks notifies its listener of every change of its status."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio

from hotswap import InstanceState
from hotswap.backends.stores import NvmeStore
from hotswap.testing.cancel import cancel_at
from hotswap.testing.conformance.engine_status import all_told
from hotswap.testing.conformance.suite import until
from hotswap.testing.conformance.turns import TurnLoop
from tests.backends.torch.parallel.support import add, ask, card_of, loader_of, make_engine, tokens_of
from tests.backends.torch.zoo import make_model


def test_a_listener_is_notified_of_loads_requests_and_a_killed_rank(tmp_path: Path) -> None:
    add(tmp_path / "store", "m", make_model("llama"))

    async def scenario() -> None:
        async with NvmeStore(tmp_path / "store") as store, make_engine(pp=2) as engine:
            card = await card_of(store, "m")
            with anyio.fail_after(240), all_told(engine):
                await cancel_at(3, lambda: engine.load(card, store))
                await engine.unload()
                await engine.load(card, store)
                assert await tokens_of(engine, ask("m", [1, 2, 3], 20))
                await engine.evict(deadline_s=0)
                await engine.unload()
                await engine.load(card, store)
                os.kill(loader_of(engine).pids[1], signal.SIGKILL)
                await until(lambda: engine.status().state is InstanceState.LOST)
                await engine.unload()

    anyio.run(scenario, backend_options={"loop_factory": TurnLoop})
