"""The load of a simulated engine, as it is or as the last step has reported it."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypedDict

from hotswap.backends.sim.batcher import Batcher
from hotswap.request import RequestId

__all__ = ["Load", "Reporting", "Reports", "load_of"]

Reporting: TypeAlias = Literal["live", "by_step"]


class Load(TypedDict):
    """The fields of an `EngineStatus` that change from step to step."""

    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_free_kv_blocks: int
    num_next_kv_blocks: int
    preempted: tuple[RequestId, ...]


def load_of(batcher: Batcher, *, decoding: bool = False, num_taken: int = 0) -> Load:
    """Return the load of a batcher.

    Args:
        batcher: The batcher.
        decoding: Whether the prompts of all running sequences are computed.
        num_taken: Blocks that the steps since have taken.
    """
    return {
        "num_running": len(batcher.running),
        "num_waiting": len(batcher.waiting),
        "num_prefill_tokens": batcher.num_prefill_tokens(running=not decoding),
        "num_free_kv_blocks": batcher.num_free_blocks - num_taken,
        "num_next_kv_blocks": batcher.num_next_blocks,
        "preempted": batcher.preempted,
    }


class Reports:
    """The reports of an engine that reports by step; an engine with live status has none.

    A report is made when a step is planned, and published when the step has ended. It counts no token of
    prompts that the step computes to their end. An engine without requests reports at once.

    Attributes:
        told: The last report; `None` if the status has the load as it is.
        coming: The report of the step under way.
    """

    def __init__(self, reporting: Reporting, batcher: Batcher) -> None:
        self.by_step = reporting == "by_step"
        self.told: Load | None = load_of(batcher) if self.by_step else None
        self.coming: Load | None = None
        self._batcher = batcher

    def begin(self, *, idle: bool) -> None:
        """Make the report of a step that was planned; `idle` if there is none to run."""
        if self.by_step:
            self.coming = load_of(self._batcher, decoding=self._batcher.prefills_first)
            if idle:
                self.told = self.coming

    def end(self) -> None:
        """Publish the report of the step that has ended."""
        if self.by_step:
            self.told = self.coming
