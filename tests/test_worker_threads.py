"""The threads of hotswap: how many run at once, on each event loop, and what a cancellation does."""

from __future__ import annotations

import threading
from functools import partial

import anyio
import anyio.lowlevel
import pytest
from anyio import CapacityLimiter, to_thread

from hotswap.worker_threads import run_in_thread
from tests.patience import PATIENCE_S


class Meeting:
    """Threads that have begun, and end when the meeting is over."""

    def __init__(self, size: int) -> None:
        self.size, self.num_present, self.most_present = size, 0, 0
        self.full, self.over = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def attend(self) -> None:
        with self._lock:
            self.num_present += 1
            self.most_present = max(self.most_present, self.num_present)
            if self.num_present == self.size:
                self.full.set()
        assert self.over.wait(PATIENCE_S)
        with self._lock:
            self.num_present -= 1


async def seven() -> int:
    return await run_in_thread(int, "7")


async def test_forty_run_at_once_and_others_wait_on_each_event_loop_apart() -> None:
    meeting = Meeting(40)
    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(100):
                tasks.start_soon(run_in_thread, meeting.attend)
            assert await to_thread.run_sync(meeting.full.wait, PATIENCE_S)
            # Another event loop has its own, and a limiter given has its.
            assert await to_thread.run_sync(anyio.run, seven) == 7
            assert await run_in_thread(int, limiter=CapacityLimiter(1)) == 0
            meeting.over.set()
    finally:
        meeting.over.set()
    assert meeting.most_present == 40


async def test_a_cancelled_call_waits_for_the_function_unless_it_may_abandon_it() -> None:
    for abandon in (True, False):
        meeting = Meeting(1)
        ended: list[bool] = []

        async def call(meeting: Meeting, abandon: bool, ended: list[bool]) -> None:
            try:
                await run_in_thread(meeting.attend, abandon_on_cancel=abandon)
            finally:
                ended.append(meeting.over.is_set())

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(partial(call, meeting, abandon, ended))
                assert await to_thread.run_sync(meeting.full.wait, PATIENCE_S)
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    for _ in range(10):  # turns of the event loop, in which a call that can return does
                        await anyio.lowlevel.checkpoint()
                assert ended == ([False] if abandon else [])
                meeting.over.set()
        finally:
            meeting.over.set()
        assert ended == [not abandon]


async def test_errors_arguments_and_results_pass() -> None:
    assert await run_in_thread(int, "12") == 12
    with pytest.raises(ValueError, match="'x'"):
        await run_in_thread(int, "x")
