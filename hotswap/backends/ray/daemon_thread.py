"""Calls that may never return, in threads that hold nothing up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar, TypeVarTuple, Unpack

__all__ = ["in_daemon_thread"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


async def in_daemon_thread(call: Callable[[Unpack[_Ts]], _T], *arguments: *_Ts) -> _T:
    """Return what a blocking call returns, or raise what it raises; a cancellation abandons it.

    It has a thread of its own, which does not keep the process from ending: without its head Ray answers some
    calls never.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()

    def work() -> None:
        try:
            told = partial(answer.set_result, call(*arguments))
        except Exception as exc:
            told = partial(answer.set_exception, exc)
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(_unless_done, answer, told)

    threading.Thread(target=work, name="a call of Ray", daemon=True).start()
    return await answer


def _unless_done(answer: asyncio.Future[_T], told: Callable[[], None]) -> None:
    if not answer.done():
        told()
