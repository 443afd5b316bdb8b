"""Ranks that refuse a model, end or hang during a load or an unload: the engine is EMPTY, or LOST."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import anyio
import pytest

from hotswap import InstanceState
from hotswap.abc import ModelCard
from hotswap.backends.torch import TorchEngine
from hotswap.backends.torch.parallel import local_ranks
from hotswap.backends.torch.parallel.processes import Ranks
from hotswap.errors import InstanceLost, UnsupportedModel
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.parallel.support import ask, loader_of, make_engine, make_prompts, tokens_of
from tests.backends.torch.parallel.test_loss import is_alive
from tests.backends.torch.zoo import generate, make_model
from tests.patience import PATIENCE_S

EMPTY, LOST = InstanceState.EMPTY, InstanceState.LOST
BROKEN = "raise RuntimeError('no such device')"
# The second rank hangs, so that the first one's error is received before the timeout.
REFUSING = f"""
import signal
from hotswap.backends.torch.parallel.stage import Stage
from hotswap.errors import UnsupportedModel
def step(self, command):
    if self._position.rank:
        signal.pause()
    raise UnsupportedModel("It is of the wrong kind.")
Stage.step = step
{local_ranks._PROGRAM}
"""


def stored() -> tuple[DictStore, ModelCard]:
    store = DictStore()
    return store, store.add("llama", make_model("llama"))


def be_impatient(engine: TorchEngine, patch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout until ranks are restarted, which takes longer."""
    original = Ranks.start

    def start(ranks: Ranks) -> None:
        ranks.timeout_s = 10 * PATIENCE_S  # longer than a test may last
        original(ranks)

    patch.setattr(Ranks, "start", start)
    loader_of(engine)._ranks.timeout_s = 1.0


@pytest.mark.slow
async def test_ranks_load_another_model_after_a_refused_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store, card = stored()
    prompt = make_prompts(1, 20)[0]
    program = local_ranks._PROGRAM
    monkeypatch.setattr(local_ranks, "_PROGRAM", REFUSING)
    async with make_engine(pp=2) as engine:
        before = loader_of(engine).pids
        monkeypatch.setattr(local_ranks, "_PROGRAM", program)
        with pytest.raises(UnsupportedModel, match="wrong kind"):
            await engine.load(card, store)
        assert engine.status().state is EMPTY
        assert not set(before) & set(loader_of(engine).pids)
        await engine.load(card, store)
        assert await tokens_of(engine, ask("llama", prompt, 5)) == generate(make_model("llama"), prompt, 5)
        await engine.unload()
        os.kill(loader_of(engine).pids[0], signal.SIGKILL)
        while engine.status().state is not LOST:  # noqa: ASYNC110 - another process ends
            await anyio.sleep(0.01)


async def test_an_engine_whose_ranks_cannot_restart_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store, card = stored()
    monkeypatch.setattr(local_ranks, "_PROGRAM", REFUSING)
    async with make_engine(pp=2) as engine:
        monkeypatch.setattr(local_ranks, "_PROGRAM", BROKEN)
        with pytest.raises(InstanceLost, match="exit code 1"):
            await engine.load(card, store)
        assert engine.status().state is LOST
        with pytest.raises(InstanceLost, match="cannot start"):
            await engine.unload()
        assert engine.status().state is LOST


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["ends", "falls silent"])
async def test_a_rank_failure_during_a_load_loses_the_instance(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, card = stored()
    async with make_engine(pp=2) as engine:
        be_impatient(engine, monkeypatch)
        pids = loader_of(engine).pids
        store.on_chunk = once(lambda: os.kill(pids[1], number))
        with pytest.raises(InstanceLost):
            await engine.load(card, store)
        assert engine.status().state is LOST
        assert engine.status().weight_bytes == 0
    assert not any(map(is_alive, pids))


@pytest.mark.slow
async def test_a_hanging_rank_is_replaced_at_an_unload_and_killed_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, card = stored()
    async with make_engine(pp=2) as engine:
        await engine.load(card, store)
        before = loader_of(engine).pids
        be_impatient(engine, monkeypatch)
        os.kill(before[1], signal.SIGSTOP)
        await engine.unload()
        assert engine.status().state is EMPTY
        after = loader_of(engine).pids
        assert not set(before) & set(after)
        await engine.load(card, store)
        os.kill(after[1], signal.SIGSTOP)
    assert not any(map(is_alive, (*before, *after)))


def once(call: Callable[[], None]) -> Callable[[str, int], None]:
    """Return an `on_chunk` for a store that calls `call` at the first chunk."""
    return lambda model, index: call() if not index else None
