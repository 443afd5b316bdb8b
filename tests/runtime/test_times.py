"""What a fleet measures of its own swaps and prefills, and shows to policies."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from hotswap import InstanceId, ModelId, Sampling, TimesView
from hotswap.offline.replay import dump_view, load_view
from hotswap.offline.virtual_time import virtual_time
from tests.runtime.support import Idle, sim_fleet, until

A, B = ModelId("a"), ModelId("b")


@virtual_time
async def test_a_swap_is_expected_to_take_as_long_as_it_then_does() -> None:
    async with sim_fleet("a", "b", "c", engines=1, scheduler=Idle()) as fleet:
        assert fleet.view().times == TimesView()
        for model in ("a", "b", "c"):
            await fleet.swap("e0", to=model)
        view = fleet.view()
        expected_s = view.swap_s(A, view.instance(InstanceId("e0")))
        record = await fleet.swap("e0", to="a")
        assert record.downtime_s == pytest.approx(expected_s, rel=0.05)
        # The store tells of the reading alone: the way to the device takes the most of a load here.
        assert view.store.load_s(A) < 0.5 * expected_s
        assert load_view(dump_view(view)) == view


@virtual_time
async def test_what_is_staged_or_has_nothing_to_unload_takes_less() -> None:
    async with sim_fleet("a", "b", engines=2, scheduler=Idle()) as fleet:
        for model in ("a", "b", "a"):
            await fleet.swap("e0", to=model)
        view = fleet.view()
        full, empty = view.instances
        assert view.swap_s(B, empty) < view.swap_s(B, full)
        assert view.swap_s(B, empty) == view.swap_s(B, full) - view.times.unload_s
        assert view.swap_s(B, replace(full, preloaded=B)) == view.times.unload_s


@virtual_time
async def test_prefills_are_timed_by_the_first_tokens_of_turns() -> None:
    async with sim_fleet("a", engines=1, scheduler=Idle()) as fleet, anyio.create_task_group() as clients:

        async def ask() -> None:
            await fleet.generate("a", (1,) * 2000, Sampling(max_tokens=3, ignore_eos=True))

        for _ in range(2):
            clients.start_soon(ask)
        await until(lambda: len(fleet.view().waiting) == 2)
        assert fleet.view().times.prefill_tokens_per_s is None
        await fleet.swap("e0", to="a")
        began_s = anyio.current_time()
        await until(lambda: fleet.view().times.prefill_tokens_per_s is not None)
        times = fleet.view().times
        assert times.prefill_s(4000) == pytest.approx(anyio.current_time() - began_s, abs=0.02)
