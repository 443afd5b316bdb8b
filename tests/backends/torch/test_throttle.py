"""Background work pauses while other engines of the process compute steps, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import anyio
import anyio.to_thread
import pytest
import torch
from torch import nn

from hotswap.backends.torch import TorchEngine, throttle
from hotswap.backends.torch.linear import linear_layers
from hotswap.backends.torch.packed_cache import PackedCache
from hotswap.kernels import packed_linear
from tests.backends.torch.dict_store import DictStore
from tests.backends.torch.zoo import make_model
from tests.patience import PATIENCE_S


class Pauses(list[float]):
    """Records the pauses of an engine's thread instead of waiting; a command may end one of them."""

    ended_by_command: int | None = None

    def __call__(self, seconds: float) -> bool:
        self.append(seconds)
        return len(self) - 1 == self.ended_by_command


@pytest.fixture
def pauses() -> Pauses:
    return Pauses()


@contextmanager
def another_steps(now: Callable[[], bool] = lambda: True) -> Iterator[None]:
    begun, ends = Event(), Event()

    def run() -> None:
        with throttle.engine_thread(Pauses()):
            throttle.set_stepping(now())
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


def test_work_during_other_engines_steps_pauses_for_longer_than_it_took(pauses: Pauses) -> None:
    with throttle.engine_thread(pauses):
        throttle.pause(1e-4)
        assert pauses == []
        with another_steps():
            throttle.pause(1e-4)
            throttle.pause(1.0)
        assert pauses[0] > 5e-4
        assert pauses[1] < 0.1
        throttle.pause(1e-4)
        assert len(pauses) == 2  # the other has ended


def test_an_engine_without_requests_causes_no_pauses(pauses: Pauses) -> None:
    with another_steps(lambda: False), throttle.engine_thread(pauses):
        throttle.pause(1e-4)
        assert not throttle.others_are_stepping(None)
    assert pauses == []


def test_a_thread_that_steps_itself_does_not_pause_and_a_command_ends_a_pause(pauses: Pauses) -> None:
    with another_steps(), throttle.engine_thread(pauses):
        throttle.set_stepping(True)
        throttle.pause(1e-4)
        assert pauses == []
        throttle.set_stepping(False)
        throttle.pause(1e-4)
        assert len(pauses) == 1
        pauses.ended_by_command = 1
        assert not throttle.pause(1e-4)


def test_a_thread_outside_engines_does_not_pause(pauses: Pauses) -> None:
    with another_steps():
        assert throttle.pause(1e-4)
        assert throttle.others_are_stepping(None)
    assert pauses == []
    assert not throttle.others_are_stepping(None)


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
def test_a_layer_packed_in_pieces_has_the_bits_of_one_packed_at_once(pauses: Pauses) -> None:
    model = nn.Sequential(nn.Linear(1000, 333, bias=False))
    layers = linear_layers(model)
    cache = PackedCache(1 << 30)
    packed = cache.acquire(None, layers)
    with another_steps(), throttle.engine_thread(pauses), torch.inference_mode():
        assert cache.pack_next(packed)
    assert len(pauses) == -(-333 // (throttle.PIECE_BYTES // 128_000 * 32))
    weight = layers[0].packed
    assert weight is not None
    assert not cache.pack_next(packed)
    whole = packed_linear.pack(layers[0].weight.detach())
    assert torch.equal(weight.view(torch.int32), whole.view(torch.int32))


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
@pytest.mark.parametrize("ended_by_command", [0, 1], ids=["before it", "in the middle of it"])
def test_a_thread_that_receives_a_command_packs_the_layer_later(ended_by_command: int) -> None:
    layers = linear_layers(nn.Sequential(nn.Linear(1000, 333, bias=False)))
    cache, pauses = PackedCache(1 << 30), Pauses()
    packed = cache.acquire(None, layers)
    pauses.ended_by_command = ended_by_command
    with another_steps(), throttle.engine_thread(pauses), torch.inference_mode():
        assert cache.pack_next(packed)
        assert (packed.size_bytes, cache.used_bytes) == (0, 0)
        assert len(pauses) == ended_by_command + 1
    assert cache.pack_next(packed)
    assert packed.size_bytes == cache.used_bytes == layers[0].packed_bytes


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
async def test_a_swap_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "_LONGEST_S", 90.0)
    store, paused = DictStore(), Event()
    card = store.add("m", make_model("llama"))
    original = throttle.pause

    def pause(worked_s: float) -> bool:
        paused.set()
        return original(worked_s)

    monkeypatch.setattr(throttle, "pause", pause)
    with another_steps():
        async with TorchEngine("e0", kv_tokens=256, threads=1) as engine:
            await engine.load(card, store)
            assert await anyio.to_thread.run_sync(paused.wait, PATIENCE_S)
            await engine.unload()
