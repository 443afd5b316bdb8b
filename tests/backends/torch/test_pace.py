"""Work that can wait rests while other engines of the process step, and at no other time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest
import torch
from torch import nn

from hotswap.backends.torch import pace
from hotswap.backends.torch.linear import Shelf, linear_layers
from hotswap.kernels import packed_linear


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(pace, "_sleep", found.append)
    return found


@contextmanager
def another_steps(now: Callable[[], bool] = lambda: True) -> Iterator[None]:
    begun, ends = Event(), Event()

    def run() -> None:
        with pace.engine_thread(lambda: False):
            pace.steps(now())
            begun.set()
            ends.wait(30)

    thread = Thread(target=run)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        ends.set()
        thread.join()


def test_who_works_beside_steps_rests_for_longer_than_it_worked(rests: list[float]) -> None:
    with pace.engine_thread(lambda: False):
        pace.rest(1e-4)
        assert rests == []
        with another_steps():
            pace.rest(1e-4)
            pace.rest(1.0)
        assert rests[0] > 5e-4
        assert rests[1] < 0.1
        pace.rest(1e-4)
        assert len(rests) == 2  # the other has ended


def test_nobody_rests_for_an_engine_without_requests(rests: list[float]) -> None:
    with another_steps(lambda: False), pace.engine_thread(lambda: False):
        pace.rest(1e-4)
        assert not pace.others_step(None)
    assert rests == []


def test_who_steps_itself_or_is_waited_for_does_not_rest(rests: list[float]) -> None:
    wanted = False
    with another_steps(), pace.engine_thread(lambda: wanted):
        pace.steps(True)
        pace.rest(1e-4)
        assert rests == []
        pace.steps(False)
        pace.rest(1e-4)
        assert len(rests) == 1
        wanted = True
        assert not pace.rest(1e-4)
        assert len(rests) == 1


def test_a_thread_of_no_engine_does_not_rest(rests: list[float]) -> None:
    with another_steps():
        assert pace.rest(1e-4)
        assert pace.others_step(None)
    assert rests == []
    assert not pace.others_step(None)


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
def test_a_layer_is_packed_in_pieces_to_the_bits_of_the_whole(rests: list[float]) -> None:
    model = nn.Sequential(nn.Linear(1000, 333, bias=False))
    layers = linear_layers(model)
    shelf = Shelf(1 << 30)
    packs = shelf.take(None, layers)
    with another_steps(), pace.engine_thread(lambda: False), torch.inference_mode():
        assert shelf.pack_next(packs)
    assert len(rests) == -(-333 // (pace.PIECE_BYTES // 128_000 * 32))
    packed = layers[0].packed
    assert packed is not None
    assert not shelf.pack_next(packs)
    whole = packed_linear.pack(layers[0].weight.detach())
    assert torch.equal(packed.view(torch.int32), whole.view(torch.int32))


@pytest.mark.skipif(not packed_linear.supported(torch.float32), reason="this CPU packs a layer at once")
def test_a_thread_that_is_wanted_leaves_a_layer_to_a_later_time() -> None:
    layers = linear_layers(nn.Sequential(nn.Linear(1000, 333, bias=False)))
    shelf = Shelf(1 << 30)
    packs = shelf.take(None, layers)
    wanted = True
    with another_steps(), pace.engine_thread(lambda: wanted), torch.inference_mode():
        assert shelf.pack_next(packs)
        assert (packs.size_bytes, shelf.used_bytes) == (0, 0)
    assert shelf.pack_next(packs)
    assert packs.size_bytes == shelf.used_bytes == layers[0].packed_bytes
