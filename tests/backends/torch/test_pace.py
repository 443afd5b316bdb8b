"""Work that can wait rests while other engines of the process step, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import anyio
import anyio.to_thread
import pytest
import torch
from torch import nn

from hotswap.backends.torch import TorchEngine, pace
from hotswap.backends.torch.linear import Shelf, linear_layers
from hotswap.kernels import packed_linear
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.patience import PATIENCE_S


class Rests(list[float]):
    """How an engine's thread waits in these tests: not at all, but it is noted. It may be wanted in one."""

    wanted_in: int | None = None

    def __call__(self, seconds: float) -> bool:
        self.append(seconds)
        return len(self) - 1 == self.wanted_in


@pytest.fixture
def rests() -> Rests:
    return Rests()


@contextmanager
def another_steps(now: Callable[[], bool] = lambda: True) -> Iterator[None]:
    begun, ends = Event(), Event()

    def run() -> None:
        with pace.engine_thread(Rests()):
            pace.steps(now())
            begun.set()
            ends.wait(PATIENCE_S)

    thread = Thread(target=run)
    thread.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield
    finally:
        ends.set()
        thread.join()


def test_who_works_beside_steps_rests_for_longer_than_it_worked(rests: Rests) -> None:
    with pace.engine_thread(rests):
        pace.rest(1e-4)
        assert rests == []
        with another_steps():
            pace.rest(1e-4)
            pace.rest(1.0)
        assert rests[0] > 5e-4
        assert rests[1] < 0.1
        pace.rest(1e-4)
        assert len(rests) == 2  # the other has ended


def test_nobody_rests_for_an_engine_without_requests(rests: Rests) -> None:
    with another_steps(lambda: False), pace.engine_thread(rests):
        pace.rest(1e-4)
        assert not pace.others_step(None)
    assert rests == []


def test_who_steps_itself_or_is_waited_for_does_not_rest(rests: Rests) -> None:
    with another_steps(), pace.engine_thread(rests):
        pace.steps(True)
        pace.rest(1e-4)
        assert rests == []
        pace.steps(False)
        pace.rest(1e-4)
        assert len(rests) == 1
        rests.wanted_in = 1
        assert not pace.rest(1e-4)


def test_a_thread_of_no_engine_does_not_rest(rests: Rests) -> None:
    with another_steps():
        assert pace.rest(1e-4)
        assert pace.others_step(None)
    assert rests == []
    assert not pace.others_step(None)


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
def test_a_layer_is_packed_in_pieces_to_the_bits_of_the_whole(rests: Rests) -> None:
    model = nn.Sequential(nn.Linear(1000, 333, bias=False))
    layers = linear_layers(model)
    shelf = Shelf(1 << 30)
    packs = shelf.take(None, layers)
    with another_steps(), pace.engine_thread(rests), torch.inference_mode():
        assert shelf.pack_next(packs)
    assert len(rests) == -(-333 // (pace.PIECE_BYTES // 128_000 * 32))
    packed = layers[0].packed
    assert packed is not None
    assert not shelf.pack_next(packs)
    whole = packed_linear.pack(layers[0].weight.detach())
    assert torch.equal(packed.view(torch.int32), whole.view(torch.int32))


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
@pytest.mark.parametrize("wanted_in", [0, 1], ids=["before it", "in the middle of it"])
def test_a_thread_that_is_wanted_leaves_a_layer_to_a_later_time(wanted_in: int) -> None:
    layers = linear_layers(nn.Sequential(nn.Linear(1000, 333, bias=False)))
    shelf, rests = Shelf(1 << 30), Rests()
    packs = shelf.take(None, layers)
    rests.wanted_in = wanted_in
    with another_steps(), pace.engine_thread(rests), torch.inference_mode():
        assert shelf.pack_next(packs)
        assert (packs.size_bytes, shelf.used_bytes) == (0, 0)
        assert len(rests) == wanted_in + 1
    assert shelf.pack_next(packs)
    assert packs.size_bytes == shelf.used_bytes == layers[0].packed_bytes


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
async def test_an_engine_is_swapped_in_the_middle_of_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_LONGEST_S", 90.0)
    store, rested = DictStore(), Event()
    card = store.add("m", make_model("llama"))
    honest = pace.rest

    def rest(worked_s: float) -> bool:
        rested.set()
        return honest(worked_s)

    monkeypatch.setattr(pace, "rest", rest)
    with another_steps():
        async with TorchEngine("e0", kv_tokens=256, threads=1) as engine:
            await engine.load(card, store)
            assert await anyio.to_thread.run_sync(rested.wait, PATIENCE_S)
            await engine.unload()
