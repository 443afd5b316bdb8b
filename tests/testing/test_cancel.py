"""Cancel everywhere: each point once, shields respected, and leaks found."""

from __future__ import annotations

import anyio
import pytest
from anyio.lowlevel import checkpoint

from hotswap.offline.virtual_time import virtual_time
from hotswap.testing.cancel import cancel_everywhere


class Account:
    """Something to be given back."""

    def __init__(self) -> None:
        self.taken = 0
        self.trail: list[int] = []


async def nothing() -> None:
    """Check nothing."""


async def test_each_checkpoint_is_cancelled_once() -> None:
    trails: list[list[int]] = []

    async def scenario() -> None:
        trails.append([])
        for step in range(4):
            trails[-1].append(step)
            await checkpoint()
        trails[-1].append(4)

    assert await cancel_everywhere(scenario, nothing) == 4
    assert trails == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]


async def test_what_a_cancellation_leaves_behind_is_found_and_placed() -> None:
    account = Account()

    async def leaky() -> None:
        await checkpoint()
        account.taken += 1
        await checkpoint()  # without a finally, a cancellation here keeps it
        account.taken -= 1

    async def check() -> None:
        assert account.taken == 0

    with pytest.raises(AssertionError) as caught:
        await cancel_everywhere(leaky, check)
    assert caught.value.__notes__ == ["This is what cancelling the scenario at checkpoint 2 left behind."]


async def test_what_is_shielded_goes_on() -> None:
    account = Account()

    async def careful() -> None:
        with anyio.CancelScope(shield=True):
            account.taken += 1
            await checkpoint()
            account.taken -= 1
        await checkpoint()

    async def check() -> None:
        assert account.taken == 0

    assert await cancel_everywhere(careful, check) == 2


async def test_an_error_of_the_scenario_comes_through() -> None:
    async def raises_when_cancelled() -> None:
        try:
            await checkpoint()
        finally:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await cancel_everywhere(raises_when_cancelled, nothing)
    assert caught.value.__notes__ == ["The scenario was cancelled at checkpoint 1."]


async def test_an_endless_scenario_is_given_up() -> None:
    async def endless() -> None:
        while True:
            await checkpoint()

    with pytest.raises(AssertionError, match="never ran to its end"):
        await cancel_everywhere(endless, nothing, limit=10)


@virtual_time
async def test_turns_reach_what_happens_while_the_scenario_waits() -> None:
    account = Account()

    async def helper() -> None:
        for _ in range(3):
            await anyio.sleep(1)
            account.trail.append(1)

    async def scenario() -> None:
        account.trail.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(helper)

    seen: set[int] = set()

    async def check() -> None:
        seen.add(len(account.trail))

    await cancel_everywhere(scenario, check)
    assert seen == {0, 3}  # the task itself has a single checkpoint, at its group's end
    await cancel_everywhere(scenario, check, every="turn")
    assert seen == {0, 1, 2, 3}


async def test_turns_need_virtual_time() -> None:
    with pytest.raises(TypeError, match="VirtualTimeLoop"):
        await cancel_everywhere(nothing, nothing, every="turn")
