"""An unload on a GPU waits until no tensor uses the released memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import Tensor

from hotswap.backends.torch import device
from hotswap.backends.torch.device import ReleasedMemory
from hotswap.errors import MemoryNotReclaimed


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Records the calls of `empty_cache`; CPU tensors are used in place of GPU ones."""
    calls: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(True))
    return calls


def watched(*tensors: Tensor) -> ReleasedMemory:
    released = ReleasedMemory(torch.device("cuda"))
    released.watch(*tensors)
    return released


async def test_memory_is_free_although_others_use_the_device(emptied: list[bool]) -> None:
    """Free memory is not measured: others allocate, and the allocator keeps segments with others' tensors."""
    flat, others = torch.zeros(64), torch.zeros(64)
    released = watched(flat)
    del flat
    await released.freed()
    assert emptied == [True]
    assert len(others) == 64


async def test_memory_that_a_view_still_uses_is_not_free(
    emptied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_RECLAIM_S", 0)
    flat, other = torch.zeros(64), torch.zeros(64)
    view, released = flat[8:16], watched(flat, other)
    del flat, other
    with pytest.raises(MemoryNotReclaimed, match="1 tensors"):
        await released.freed()
    assert emptied == [True], "unused memory is returned to the driver anyway"
    assert len(view) == 8
    await released.freed()  # the next unload does not wait for these tensors


async def test_memory_that_the_next_model_takes_over_is_not_waited_for(
    emptied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As KV blocks that stay across a swap; also if another tensor of the same memory is named."""
    monkeypatch.setattr(device, "_RECLAIM_S", 0)
    kept, other = torch.zeros(64), torch.zeros(64)
    released = watched(kept, other)
    released.unwatch(kept[8:16])
    del other
    await released.freed()
    assert emptied == [True]
    released.watch(kept)
    with pytest.raises(MemoryNotReclaimed, match="1 tensors"):
        await released.freed()


async def test_memory_in_a_cycle_is_collected(emptied: list[bool]) -> None:
    flat = torch.zeros(64)
    cycle: list[object] = [flat]
    cycle.append(cycle)
    released = watched(flat)
    del flat, cycle
    await released.freed()


async def test_cycles_are_collected_once_and_beside_the_event_loop(
    emptied: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, threads = gc.collect, list[int]()

    def counted(*given: int) -> int:
        threads.append(threading.get_ident())
        return collect(*given)

    monkeypatch.setattr(gc, "collect", counted)
    monkeypatch.setattr(device, "_RECLAIM_S", 0.05)
    flat = torch.zeros(64)
    with pytest.raises(MemoryNotReclaimed):
        await watched(flat).freed()
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    await ReleasedMemory(torch.device("cuda")).freed()
    assert len(threads) == 1, "nothing was in use"


async def test_nothing_is_watched_on_a_cpu(emptied: list[bool]) -> None:
    """Its buffers are cached for the next load."""
    flat, released = torch.zeros(64), ReleasedMemory(torch.device("cpu"))
    released.watch(flat)
    await released.freed()
    assert emptied == []
