"""Synchronous handlers that hold every thread of a program are served: hotswap's threads are its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from anyio import from_thread, to_thread

from hotswap import Fleet, Model, Sampling
from hotswap.abc import Scheduler, WeightStore
from hotswap.backends.stores import NvmeStore, PinnedStore, TieredStore
from hotswap.backends.torch import TorchEngine
from hotswap.policies import AffinityRouter, WeightedLoadSwap
from tests.patience import PATIENCE_S
from tests.runtime import alphabet
from tests.runtime.support import Idle

FEW = Sampling(max_tokens=3)
STORES = ["nvme", "tiered"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return alphabet.checkpoint(tmp_path_factory.mktemp("alphabet"))


def make_store(kind: str, root: Path) -> WeightStore:
    disk = NvmeStore(root / "store")
    return disk if kind == "nvme" else TieredStore(PinnedStore("16 MiB"), disk)


def make_fleet(source: Path, store: WeightStore, scheduler: Scheduler) -> Fleet:
    return Fleet(
        engines=[TorchEngine("e0", threads=1, kv_tokens=2048)],
        store=store,
        models=[Model("one", source), Model("two", source)],
        router=AffinityRouter(),
        scheduler=scheduler,
        interval_s=0.05,
    )


@contextmanager
def every_thread_held() -> Generator[None]:
    """Hold all of the default threads, as handlers do that wait for their answers."""
    limiter = to_thread.current_default_thread_limiter()
    borrowers = range(int(limiter.total_tokens))
    for borrower in borrowers:
        limiter.acquire_on_behalf_of_nowait(borrower)
    try:
        yield
    finally:
        for borrower in borrowers:
            limiter.release_on_behalf_of(borrower)


@pytest.mark.parametrize("kind", STORES)
async def test_as_many_handlers_as_there_are_threads_are_served_from_a_cold_start(
    kind: str, source: Path, tmp_path: Path
) -> None:
    count = int(to_thread.current_default_thread_limiter().total_tokens)
    all_hold_one = threading.Barrier(count)
    texts: Counter[str] = Counter()

    def handle(fleet: Fleet, number: int) -> None:
        all_hold_one.wait(PATIENCE_S)
        done = from_thread.run(fleet.generate, ("one", "two")[number % 2], "x", FEW)
        texts[done.text] += 1

    scheduler = WeightedLoadSwap(t1=0, t2=4, b=1, patience_s=1.0, sigmas=0)
    async with make_fleet(source, make_store(kind, tmp_path), scheduler) as fleet:
        with anyio.fail_after(PATIENCE_S):
            async with anyio.create_task_group() as tasks:
                for number in range(count):
                    tasks.start_soon(to_thread.run_sync, handle, fleet, number)
    assert texts == {"yz": count}


@pytest.mark.parametrize("kind", STORES)
async def test_all_that_a_fleet_does_goes_on_while_every_thread_is_held(
    kind: str, source: Path, tmp_path: Path
) -> None:
    with anyio.fail_after(PATIENCE_S), every_thread_held():
        async with make_fleet(source, make_store(kind, tmp_path), Idle()) as fleet:
            await fleet.swap("e0", to="one")
            assert (await fleet.generate("one", "x", FEW)).text == "yz"
            held = Sampling(max_tokens=3, regex="yz?")
            assert (await fleet.generate("one", "x", held)).text.startswith("yz")
            await fleet.models.add(Model("three", source))
            await fleet.swap("e0", to="three")
            assert (await fleet.chat("three", [{"role": "user", "content": "x"}], FEW)).text == "abc"
            await fleet.unload("e0")
            await fleet.models.remove("three")


async def test_fleets_on_two_event_loops_are_served_at_once(source: Path, tmp_path: Path) -> None:
    both_swapped = threading.Barrier(2)

    async def serve(root: Path) -> str:
        async with make_fleet(source, make_store("nvme", root), Idle()) as fleet:
            await fleet.swap("e0", to="one")
            with anyio.fail_after(PATIENCE_S):
                await to_thread.run_sync(partial(both_swapped.wait, PATIENCE_S))
            await fleet.swap("e0", to="two")
            return (await fleet.generate("two", "x", FEW)).text

    texts: list[str] = []

    async def run(name: str) -> None:
        texts.append(await to_thread.run_sync(anyio.run, serve, tmp_path / name))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, "a")
        tasks.start_soon(run, "b")
    assert texts == ["yz", "yz"]
