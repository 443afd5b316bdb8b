"""Counts what a piece of code does, so that a test of its cost depends on no clock and no other load."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hotswap import FleetView, InstanceId, Request
from hotswap.abc import Router
from hotswap.policies import LeastLoadedRouter

__all__ = ["Count", "CountingRouter", "counted_calls", "counted_opcodes"]


class Count:
    """A number that grows while a block runs."""

    value = 0


@contextmanager
def counted_calls() -> Generator[Count]:
    """Count calls of functions, builtin ones included, and resumptions of generators in this thread."""
    count = Count()

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            count.value += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield count
    finally:
        sys.setprofile(before)


@contextmanager
def counted_opcodes() -> Generator[Count]:
    """Count instructions of Python in this thread, in frames that begin or resume inside of the block."""
    count = Count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            count.value += 1
        else:
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


class CountingRouter(Router):
    """Asks another router and counts the questions."""

    def __init__(self, router: Router | None = None) -> None:
        self.router = router or LeastLoadedRouter()
        self.num_questions = 0

    def route(self, request: Request, fleet: FleetView) -> InstanceId | None:
        self.num_questions += 1
        return self.router.route(request, fleet)
