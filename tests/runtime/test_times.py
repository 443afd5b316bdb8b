"""What a fleet measures of its own swaps and prefills, and shows to policies."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap import InstanceId, ModelId, Sampling, TimesView
from hotswap.offline.replay import dump_view, load_view
from hotswap.offline.virtual_time import virtual_time
from hotswap.runtime.times import MeasuredTimes
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
        usual_s = fleet.view().times.prefill_token_s
        await fleet.swap("e0", to="a")
        began_s = anyio.current_time()
        await until(lambda: fleet.view().times.prefill_token_s != usual_s)
        times = fleet.view().times
        assert times.prefill_s(4000) == pytest.approx(anyio.current_time() - began_s, abs=0.02)


def turns(*measured: tuple[int, float]) -> TimesView:
    times = MeasuredTimes()
    for tokens, seconds in measured:
        times.learn_turn(tokens, seconds)
    return times.view()


def test_what_tokens_add_to_a_prefill_is_told_from_what_they_do_not() -> None:
    """An engine that takes 30 ms for any prefill, and as many for each thousand tokens."""
    times = turns(*((tokens, 0.03 + 3e-5 * tokens) for tokens in (1, 700, 12_000, 90, 3_000)))
    assert times.prefill_start_s == pytest.approx(0.03, rel=0.05)
    assert times.prefill_token_s == pytest.approx(3e-5, rel=0.05)


def test_turns_of_one_token_say_nothing_of_a_rate() -> None:
    one = turns((1, 0.03))
    assert one.prefill_s(1) == pytest.approx(0.03, rel=0.05)
    assert one.prefill_token_s == pytest.approx(TimesView().prefill_token_s, rel=0.05)
    many = turns(*[(1, 0.03)] * 1000)
    assert many.prefill_token_s == pytest.approx(TimesView().prefill_token_s, rel=0.05)


def test_one_turn_of_many_tokens_says_most_of_its_rate() -> None:
    assert turns((10_000, 2.0)).prefill_s(50_000) == pytest.approx(10.0, rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 2**20), st.floats(1e-6, 1e4)), min_size=1))
def test_no_prefill_is_expected_to_take_less_than_nothing(measured: list[tuple[int, float]]) -> None:
    times = turns(*measured)
    assert times.prefill_start_s >= 0
    assert times.prefill_token_s >= 0
    assert times.prefill_s(1000) <= 1.01 * 1000 * max(seconds for _, seconds in measured) + 1


def test_what_a_model_computes_is_learned_from_first_tokens_and_before_them_from_turns() -> None:
    times, small, large = MeasuredTimes(), ModelId("small"), ModelId("large")
    assert times.compute_s(small, 1000) == times.view().prefill_s(1000)
    times.learn_first(small, 10, 5.0)  # tells of waits alone
    assert times.compute_s(small, 1000) == times.view().prefill_s(1000)
    times.learn_first(small, 500, 1.0)
    assert times.compute_s(small, 1000) == pytest.approx(2.0)
    assert times.compute_s(large, 1000) == times.view().prefill_s(1000)
    times.learn_first(large, 500, 10.0)
    assert (times.compute_s(small, 1000), times.compute_s(large, 1000)) == pytest.approx((2.0, 20.0))
    times.forget(small)
    assert times.compute_s(small, 1000) == times.view().prefill_s(1000)


def test_copies_are_learned_from_long_ones() -> None:
    times = MeasuredTimes()
    times.learn_save(1000, 5.0)
    times.learn_restore(1000, 5.0)
    assert times.save_s(1 << 20) == times.restore_s(1 << 20) == 0
    times.learn_save(1 << 20, 1.0)
    times.learn_restore(1 << 20, 2.0)
    assert (times.save_s(1 << 21), times.restore_s(1 << 21)) == pytest.approx((2.0, 4.0))
